"""Compute options of a rank: dtype, compiling, quantized and streamed weights, applied to a UNet or transformer.

Launchers read the options, so torch is imported in the functions that use it.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from svdq.pipeline.errors import InputError, reason_of

if TYPE_CHECKING:
    import torch

Dtype = Literal["auto", "fp32", "fp16", "bf16"]  # auto: float32 on CPUs, half precision on GPUs
Compiled = Literal["off", "blocks", "whole"]
Approximate = Literal["int8"]
Offload = Literal["off", "blocks"]
Weights = Literal["auto", "native", "stored", "made"]
#: Blocks that a GPU holds at a time if they are streamed: the present one, the next one, and one for what the allocator
#: cannot use at once.
STREAMED_BLOCKS = 3
INT8 = "int8"  # comfy-kitchen's attention, by its name among the backends of attention
KEPT_BUFFER = "stored_"  # how the names of buffers begin that weights are made of
BACKEND: Any = "inductor"  # the compiler: torch's inductor, which generates C++ for CPUs and Triton for GPUs
MAX_COMPILED = 4096  # variants kept per function: shapes of videos times kinds of a block, with a margin
#: Largest batch of CUDA's fused attention kernels, where it is a grid dimension. Attention over frames has a batch of
#: 2 x H/8 x W/8 with guidance, which is 73,728 at 2048x1152.
MAX_ATTENTION_BATCH = 65_535


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """How a UNet or transformer computes. The defaults are diffusers' own."""

    dtype: Dtype = "auto"  # of weights and activations
    compiled: Compiled = "off"  # what torch.compile compiles
    approximate: tuple[Approximate, ...] = ()  # what changes results by more than rounding
    attention: str = "native"  # the backend of diffusers' attention dispatcher, or comfy-kitchen's int8
    offload: Offload = "off"  # what stays in host memory until it is needed; changes no bits
    weights: Weights = "auto"  # whether weights stay as files store them; between stored and made no bit differs
    native: tuple[str, ...] = ()  # titles of the formats of files that layers multiply in, as decided by `weights`

    @property
    def quantizes(self) -> bool:
        """Whether weights are quantized as they are loaded."""
        return "int8" in self.approximate

    @property
    def multiplied(self) -> tuple[str, ...]:
        """Titles of the formats that layers of the denoising components multiply in."""
        return ("int8",) if self.quantizes else self.native

    @property
    def may_keep(self) -> bool:
        """Whether layers may keep what weights files store."""
        return self.weights in ("native", "stored") or (self.weights == "auto" and self.compiled == "off")

    def changed(self) -> dict[str, Any]:
        """Return the options that may change bits and differ from the defaults, by name, as in JSON."""
        found = {name: value for name, value in asdict(self).items() if value != getattr(type(self), name)}
        for name in ("offload", "weights"):
            found.pop(name, None)
        lists = {"approximate": self.ways, "native": self.multiplied}
        return found | {name: list(each) for name, each in lists.items() if each}

    @property
    def ways(self) -> tuple[str, ...]:
        """What makes results approximate: what is asked for, and attention in int8 or fp8."""
        if self.attention == INT8:  # which is also the name of weights in int8
            return (*self.approximate, "int8 attention")
        return self.approximate + ((self.attention,) if "sage" in self.attention else ())


DEFAULTS = ComputeOptions()  # the defaults of diffusers


def apply(unet: Any, options: ComputeOptions, blocks: Collection[str], device: "torch.device | None" = None) -> Any:
    """Configure a UNet or transformer, on its device in its dtype, for the options, and return it.

    `blocks` are the classes of its repeated blocks.
    """
    # Pixels are the batch of a UNet's attention over frames; transformers attend to all tokens at once.
    over_frames = any(type(processor).__name__ == "AttnProcessor2_0" for processor in unet.attn_processors.values())
    if device is not None and device.type == "cuda" and over_frames:
        split_attention(unet)
    if options.attention != "native":
        _use_attention(unet, options.attention, device)
    if options.compiled != "off":
        _compile(unet, options.compiled, blocks)
    if options.offload == "blocks":
        assert device is not None
        _stream_blocks(unet, device)
    return unet


def _use_attention(transformer: Any, name: str, device: "torch.device | None") -> None:
    """Use a backend of the attention dispatcher; raises InputError if it is unknown, or cannot be used here."""
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

    if not any(hasattr(each, "_attention_backend") for each in transformer.attn_processors.values()):
        raise InputError(
            "--attention is for transformers, whose attention diffusers dispatches; this model has none: leave it out."
        )
    if name == INT8:
        from svdq.pipeline.models.compute.int8_attention import use_int8_attention

        use_int8_attention(transformer.attn_processors.values(), device)
        return
    known = [backend.value for backend in AttentionBackendName]
    if name not in known:
        raise InputError(
            f"--attention {name} is not known; the backends of this diffusers are {', '.join(known)}, and {INT8} is "
            "comfy-kitchen's."
        )
    try:
        with attention_backend("native"):  # which undoes that it is set for the whole process
            transformer.set_attention_backend(name)
    except Exception as error:
        reason = reason_of(error).partition(". ")[0]
        raise InputError(
            f"--attention {name} cannot be used here ({reason}); install it, or choose another."
        ) from error


def _stream_blocks(transformer: Any, device: "torch.device") -> None:
    """Keep a transformer in host memory, and copy each block to the GPU while the one before computes.

    Without `record_stream` diffusers waits for a block before it frees it. With it, the copies run ahead of the compute
    until the GPU holds most blocks, which are four times as fast to copy as to compute.
    """
    import torch

    transformer.enable_group_offload(
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=device.type == "cuda",  # diffusers has no stream on a processor, which tests use
    )


def stream_layers(encoder: Any, device: "torch.device") -> Any:
    """Put a text encoder, in host memory, on a device, but for its layers, each of which comes when it computes."""
    import torch
    from diffusers.hooks import apply_group_offloading

    lists = (getattr(module, "layers", None) for module in encoder.modules())
    layers = max((each for each in lists if isinstance(each, torch.nn.ModuleList)), key=len)
    inside = {id(each) for each in (*layers.parameters(), *layers.buffers())}
    for weight in (*encoder.parameters(), *encoder.buffers()):
        if id(weight) not in inside:
            weight.data = weight.data.to(device)
    holder: Any = torch.nn.Module()  # diffusers would take embeddings off the device that the head is tied to
    holder.layers = layers
    on_gpu = device.type == "cuda"
    apply_group_offloading(
        holder,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=on_gpu,
        low_cpu_mem_usage=on_gpu,  # which pins a layer when it comes, and leaves the weights mapped
    )
    return encoder


def split_attention(unet: Any, max_batch: int = MAX_ATTENTION_BATCH) -> None:
    """Limit the batch of attention calls to `max_batch` elements, and attend to one token without attention."""
    from diffusers.models.attention_processor import AttnProcessor2_0

    unet.set_attn_processor(_SplitAttention(AttnProcessor2_0(), max_batch))


class _SplitAttention:
    """Splits the batch, whose elements do not attend to each other, into equal parts of at most `max_batch`.

    Cross-attention to one token, the photo's, needs neither queries nor keys.
    """

    def __init__(self, processor: Any, max_batch: int) -> None:
        self._processor = processor
        self._max_batch = max_batch

    def __call__(
        self,
        attn: Any,
        hidden_states: "torch.Tensor",
        encoder_hidden_states: "torch.Tensor | None" = None,
        attention_mask: None = None,
        temb: None = None,
    ) -> "torch.Tensor":
        """Compute attention: hidden_states (B, tokens, C); cross attention also has encoder_hidden_states."""
        import torch

        if encoder_hidden_states is not None and encoder_hidden_states.shape[1] == 1:
            # The softmax over one key is exactly 1, so each query gets the value of that key.
            value: torch.Tensor = attn.to_out[0](attn.to_v(encoder_hidden_states)) / attn.rescale_output_factor
            return value.expand(-1, hidden_states.shape[1], -1)
        num_parts = -(-len(hidden_states) // self._max_batch)
        if num_parts <= 1:
            whole: torch.Tensor = self._processor(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
            return whole
        assert attention_mask is None
        queries = hidden_states.chunk(num_parts)
        keys = [None] * num_parts if encoder_hidden_states is None else encoder_hidden_states.chunk(num_parts)
        return torch.cat([self._processor(attn, *pair) for pair in zip(queries, keys, strict=True)])


def weight_bytes(module: Any, streamed: Collection[str] = ()) -> int:
    """Return the bytes of all weights, quantized ones as they are; of `streamed` blocks, those on the GPU."""
    kept = [each for name, each in module.named_buffers() if KEPT_BUFFER in name]
    total: int = sum(weight.nbytes for weight in (*module.parameters(), *kept))
    blocks = [weight_bytes(block) for block in module.modules() if type(block).__name__ in streamed]
    return total - sum(blocks) + sum(sorted(blocks)[-STREAMED_BLOCKS:])


def _compile(unet: Any, what: str, blocks: Collection[str]) -> None:
    import torch
    import torch._dynamo.config as dynamo_config
    import torch._inductor.config as inductor_config

    # All blocks of a class share torch's limit of shapes; with its default of 8, the second size of video would fail.
    dynamo_config.recompile_limit = MAX_COMPILED
    dynamo_config.accumulated_recompile_limit = MAX_COMPILED
    # Kernels chosen by timing would differ between ranks, and so would the last bits. Older torch lacks this setting.
    if hasattr(inductor_config, "deterministic"):
        inductor_config.deterministic = True
    how = {"fullgraph": True, "dynamic": False, "backend": BACKEND}
    if what == "whole":
        unet.forward = torch.compile(unet.forward, **how)
        return
    # One by one: much faster to compile than the whole, for nearly the same gain.
    for module in unet.modules():
        if type(module).__name__ in blocks:
            module.compile(**how)

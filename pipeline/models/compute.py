"""How a rank computes: dtype, compiling and int8 weights, applied to a UNet.

The command line reads the names of the options from this module, so torch is imported in the functions that use it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from svdq.pipeline.errors import InputError

if TYPE_CHECKING:
    import torch

#: Types to compute in, by the names of options; torch's name of each.
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
#: Weights that do for each, the best first: True for half precision ones, False for the full ones. bfloat16 keeps the
#: range of the full weights; float32 promises diffusers' bits, and nothing may be rounded.
WEIGHTS = {"fp32": (False,), "fp16": (True, False), "bf16": (False, True)}
#: What can be compiled.
COMPILED = ("off", "blocks", "whole")
#: Options that change results by more than rounding.
APPROXIMATE = ("int8",)
#: The blocks that a UNet repeats, compiled one by one: much quicker than the whole, for nearly the same gain.
BLOCKS = ("BasicTransformerBlock", "TemporalBasicTransformerBlock", "SpatioTemporalResBlock")
#: What compiles: torch's inductor, which writes C++ for processors and Triton for GPUs.
BACKEND: Any = "inductor"
#: Compiled forms that torch keeps of one function: shapes of videos times kinds of a block, with room to spare.
MAX_COMPILED = 4096
#: Largest batch that CUDA's fused attention kernels take: it is a dimension of their grid. Attention along the frames
#: has a batch of 2 x H/8 x W/8 with guidance, which is 73,728 at 2048x1152.
MAX_ATTENTION_BATCH = 65_535


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """How a UNet computes. The defaults are diffusers' own."""

    #: Type of weights and activations: auto (float32 on processors, float16 on GPUs), fp32, fp16 or bf16.
    dtype: str = "auto"
    #: What torch.compile compiles: off, blocks or whole.
    compiled: str = "off"
    #: Options that change results by more than rounding, of APPROXIMATE.
    approximate: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("dtype", self.dtype, ("auto", *DTYPES)),
            ("compiled", self.compiled, COMPILED),
            *(("approximate", value, APPROXIMATE) for value in self.approximate),
        ):
            if value not in allowed:
                raise InputError(f"There is no {name} {value!r}; choose one of {', '.join(allowed)}.")

    def changed(self) -> dict[str, Any]:
        """Give the options that differ from the defaults, by name, as they stand in JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value != getattr(type(self), name)
        }


#: diffusers' own way.
DEFAULTS = ComputeOptions()


def dtype_of(options: ComputeOptions, device: "torch.device") -> "torch.dtype":
    """Give the dtype to compute in; auto is float32 on processors, where results equal diffusers', else float16."""
    import torch

    name = options.dtype
    if name == "auto":
        name = "fp32" if device.type == "cpu" else "fp16"
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def apply(unet: Any, options: ComputeOptions, device: "torch.device | None" = None) -> Any:
    """Change a UNet, which has its dtype already, to compute as the options say, and return it.

    It is on its device already, or with int8 on the host: it then goes to `device`, and is never there in full.

    Raises:
        InputError: a package is missing.
    """
    if device is not None and device.type == "cuda":
        split_attention(unet)
    if "int8" in options.approximate:
        _to_int8(unet, device)
    if options.compiled != "off":
        _compile(unet, options.compiled)
    return unet


def split_attention(unet: Any, max_batch: int = MAX_ATTENTION_BATCH) -> None:
    """Make attention compute at most `max_batch` elements of its batch at a time."""
    from diffusers.models.attention_processor import AttnProcessor2_0

    unet.set_attn_processor(_SplitAttention(AttnProcessor2_0(), max_batch))


class _SplitAttention:
    """A diffusers attention processor that gives another one its batch in equal parts of at most `max_batch`.

    Elements of a batch do not attend to each other, so each part's result is what it is in the whole.
    """

    def __init__(self, processor: Any, max_batch: int) -> None:
        self._processor = processor
        self._max_batch = max_batch

    def __call__(
        self,
        attn: Any,
        hidden_states: "torch.Tensor",
        encoder_hidden_states: "torch.Tensor | None" = None,
        attention_mask: "torch.Tensor | None" = None,
        temb: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """Attend: hidden_states (B, tokens, C) and, in cross attention, encoder_hidden_states (B, tokens', C')."""
        import torch

        num_parts = -(-len(hidden_states) // self._max_batch)
        if num_parts <= 1:
            whole: torch.Tensor = self._processor(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
            return whole
        assert attention_mask is None
        queries = hidden_states.chunk(num_parts)
        keys = [None] * num_parts if encoder_hidden_states is None else encoder_hidden_states.chunk(num_parts)
        return torch.cat([self._processor(attn, *pair) for pair in zip(queries, keys, strict=True)])


def weight_bytes(unet: Any) -> int:
    """Count the bytes of all weights, quantised ones as they are stored."""
    return sum(map(stored_bytes, unet.parameters()))


def stored_bytes(weight: Any) -> int:
    """Count the bytes of a weight as it is stored."""
    return sum(part.nbytes for part in stored_parts(weight))


def stored_parts(weight: Any) -> "Iterator[torch.Tensor]":
    """Give the tensors that a weight is stored as: a quantised one calls itself float, and is made of several."""
    names = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else ()
    if not names:
        yield weight
    for name in names:
        yield from stored_parts(getattr(weight, name))


def _to_int8(unet: Any, device: "torch.device | None") -> None:
    """Keep the weights of linear layers as int8, with a scale for each row; what is computed keeps its dtype."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise InputError("--approximate int8 needs the package torchao; pip install 'svdq[approximate]'.") from error
    quantize_(unet, Int8WeightOnlyConfig(), device=device)


def _compile(unet: Any, what: str) -> None:
    """Have the blocks or the whole compiled when they are first used with a shape, and for each further shape anew."""
    import torch
    import torch._dynamo.config as dynamo_config
    import torch._inductor.config as inductor_config

    # All blocks of a class share torch's count of shapes; at 8, its default, the second size of video would fail.
    dynamo_config.recompile_limit = MAX_COMPILED
    dynamo_config.accumulated_recompile_limit = MAX_COMPILED
    # Kernels chosen by timing them would differ between ranks, and with them the last bits. Older torch cannot.
    if hasattr(inductor_config, "deterministic"):
        inductor_config.deterministic = True
    how = {"fullgraph": True, "dynamic": False, "backend": BACKEND}
    if what == "whole":
        unet.forward = torch.compile(unet.forward, **how)
        return
    for module in unet.modules():
        if type(module).__name__ in BLOCKS:
            module.compile(**how)

"""How much memory the parts of a model take for a video of some shape: estimated without computing anything.

The model's own code runs on tensors of the meta device, which have shapes and no contents, while a meter follows which
of them are alive at the same time. What is not a tensor is not seen: workspaces of cuDNN and cuBLAS, the context of
CUDA, what the allocator cannot use because it is in pieces. Knows nothing of ranks and of how much memory there is.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any

import PIL.Image
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from svdq.pipeline.models.compute import ComputeOptions, stored_bytes
from svdq.pipeline.models.model import Part
from svdq.pipeline.models.svd import SvdModel
from svdq.pipeline.parameters import VideoParameters

aten = torch.ops.aten

#: Kernels that first copy an input that does not lie in one piece; the copy is gone when they are done.
_COPIERS = (aten.convolution.default, aten.native_group_norm.default, aten.native_layer_norm.default)
META = torch.device("meta")


class LeavesDeviceError(Exception):
    """A result without contents is wanted on the host: what follows is not the device's memory any more."""


class StorageMeter(TorchDispatchMode):
    """Follows the memory of all tensors that are made within it, on the meta device or a real one.

    Attention counts as a fused kernel, as it runs on GPUs: what it takes grows with the number of tokens.
    """

    def __init__(self, device_types: Sequence[str], *, is_fused: bool = True) -> None:
        """Make it.

        Args:
            device_types: tensors on other devices do not count.
            is_fused: else attention on the meta device counts as matrix products, with the square of the tokens.
        """
        super().__init__()
        self._device_types = device_types
        self._is_fused = is_fused
        #: Storages that are alive, by the identity of their Python object, which torch keeps for as long as they live.
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        #: Bytes that are alive now, and the most that ever were.
        self.live = self.peak = 0

    def surge(self, num_bytes: int) -> None:
        """Count memory that is taken and given back at once."""
        self.peak = max(self.peak, self.live + num_bytes)

    @contextmanager
    def peak_apart(self) -> Iterator[Callable[[], int]]:
        """Give what tells, after the block, how much was alive in it at most, besides what was alive before."""
        live, peak = self.live, self.peak
        self.peak = live
        found = 0
        yield lambda: found
        found = self.peak - live
        self.peak = max(self.peak, peak)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count what it makes."""
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return 1  # a question such as whether all is finite: yes
        if func is aten._to_copy.default and args[0].is_meta and kwargs.get("device", META).type != "meta":
            raise LeavesDeviceError
        with self:
            if self._is_fused and func is aten.scaled_dot_product_attention.default and args[0].is_meta:
                return _fused_attention(*args[:3])
            # In inference mode operations arrive whole that are made of others.
            parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        made = func(*args, **kwargs)
        given = [leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # A view is no new memory, be it of a weight or of what is followed already.
        seen = set(map(id, given))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type in self._device_types:
                storage = tensor.untyped_storage()
                if id(storage) not in seen:
                    self._follow(storage)
        if func in _COPIERS:
            in_pieces = (leaf for leaf in args if isinstance(leaf, Tensor) and not _is_in_one_piece(leaf))
            self.surge(sum(tensor.nbytes for tensor in in_pieces))
        return made

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            self.live -= num_bytes

        self._alive[key] = weakref.ref(storage, gone)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


def _fused_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Make what a fused kernel makes of (B, heads, tokens, D): the result, laid out as it is used next, and a sum."""
    batch, heads, tokens, _ = query.shape
    _sums = torch.empty((batch, heads, tokens), dtype=torch.float32, device=query.device)
    return torch.empty((batch, tokens, heads, value.shape[-1]), dtype=query.dtype, device=query.device).transpose(1, 2)


def _is_in_one_piece(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.ndim in formats and tensor.is_contiguous(memory_format=formats[tensor.ndim])


class MemoryEstimator:
    """Estimates for one model, dtype and way of computing; each is made once and takes up to some seconds."""

    def __init__(self, name: str, dtype: torch.dtype, device_type: str, options: ComputeOptions) -> None:
        """Make it; nothing is opened yet.

        Args:
            name: a diffusers folder or hub id, as for `open_model`.
            dtype: what it computes in.
            device_type: cpu or cuda; on a CPU what is prepared on the host counts, too.
            options: how it computes. A compiled UNet is taken to need what any other does.
        """
        self._name = name
        self._dtype = dtype
        self._device_types = ("meta", "cpu") if device_type == "cpu" else ("meta",)
        self._options = replace(options, compiled="off")
        #: Peak, shape and dtype of what the VAE makes of a chunk, by the chunk's shape.
        self._decoded: dict[torch.Size, tuple[int, torch.Size, torch.dtype]] = {}
        self.weights = cache(self._weights)
        self.encode = cache(self._encode)
        self.step = cache(self._step)
        self.decode = cache(self._decode)
        self._skeleton = cache(self._open)

    def _weights(self, parts: Part) -> int:
        """Count the bytes of the weights that a rank with these parts holds.

        Raises:
            InputError: there is no such model, or its configs are broken.
        """
        components = self._skeleton(parts, False).pipeline.components.values()
        modules = [component for component in components if isinstance(component, torch.nn.Module)]
        tensors = {id(tensor): tensor for module in modules for tensor in [*module.parameters(), *module.buffers()]}
        return sum(map(stored_bytes, tensors.values()))

    def _encode(self, parts: Part, width: int, height: int) -> int:
        """Estimate what encoding a photo takes besides weights; more where the decoder is converted along with it."""
        parameters = VideoParameters(width=width, height=height, frames=1, seed=0)
        model = self._skeleton(parts & ~Part.DENOISER, False)
        return self._peak(lambda: model.encode(PIL.Image.new("RGB", (width, height), "gray"), parameters))

    def _step(self, width: int, height: int, frames: int, guided: bool, chunked: bool = False) -> int:
        """Estimate what a step of denoising takes besides weights, with what stays between steps.

        Args:
            width: in pixels.
            height: in pixels.
            frames: F.
            guided: whether guidance is on.
            chunked: with forward chunking, whether the options have it or not.
        """
        scale = 3.0 if guided else 1.0
        parameters = VideoParameters(width=width, height=height, frames=frames, max_guidance_scale=scale, seed=0)
        model = self._skeleton(Part.DENOISER, chunked)
        latents = (1, frames, 4, height // 8, width // 8)

        def step() -> None:
            tensors = {
                "latents": self._empty(*latents),
                "image_latents": self._empty(1, *latents[2:]),
                "image_embedding": self._empty(1, 1, model.pipeline.unet.config.cross_attention_dim),
            }
            model.denoiser(tensors, parameters).step(tensors["latents"], 0)

        return self._peak(step)

    def _decode(self, width: int, height: int, frames: int, decode_chunk_size: int) -> int:
        """Estimate what a decode takes besides weights."""
        parameters = VideoParameters(width=width, height=height, frames=frames, seed=0)
        model = self._skeleton(Part.DECODER, False)
        latents = (1, frames, 4, height // 8, width // 8)
        return self._peak(
            lambda: model.decode({"latents": self._empty(*latents)}, parameters, min(decode_chunk_size, frames))
        )

    def _open(self, parts: Part, chunked: bool) -> SvdModel:
        model = SvdModel(self._name, parts, META, self._dtype, self._options)
        if parts == Part.DECODER:
            model.pipeline.vae.decode = self._decode_once(model.pipeline.vae.decode)
        return model

    def _decode_once(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        """Make a VAE's `decode` that does chunks of the same shape once: of 25 chunks 24 are like the first."""
        from diffusers.models.autoencoders.vae import DecoderOutput

        def decode_or_remember(latents: Tensor, **arguments: Any) -> Any:
            if latents.shape in self._decoded:
                num_bytes, shape, dtype = self._decoded[latents.shape]
                self._meter.surge(num_bytes)
                return DecoderOutput(sample=torch.empty(shape, dtype=dtype, device=META))
            with self._meter.peak_apart() as peak:
                decoded = decode(latents, **arguments)
            self._decoded[latents.shape] = (peak(), decoded.sample.shape, decoded.sample.dtype)
            return decoded

        return decode_or_remember

    def _peak(self, run: Callable[[], object]) -> int:
        self._meter = StorageMeter(self._device_types)
        with torch.inference_mode(), self._meter, suppress(LeavesDeviceError):
            run()
        return self._meter.peak

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=META)

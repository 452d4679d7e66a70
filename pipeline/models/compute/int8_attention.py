"""comfy-kitchen's int8 attention (SageAttention's method), as a backend of diffusers' attention dispatcher."""

import importlib.util
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from svdq.pipeline.errors import InputError, how_to_install

_NAME: Final = "int8"
_OLDEST_CUDA: Final = 13  # major version that comfy-kitchen's kernels are built for


def use_int8_attention(processors: Iterable[Any], device: torch.device | None) -> None:
    """Have a transformer's attention processors compute in int8; raises InputError if the device has no kernel."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    if lack := _lack(device):
        raise InputError(f"--attention {_NAME} cannot be used here: {lack}.")
    # The dispatcher takes members of its enumeration only, which Python does not extend.
    backend: Any = str.__new__(AttentionBackendName, _NAME)
    backend._name_ = backend._value_ = _NAME
    _AttentionBackendRegistry.register(backend)(_attend)
    for processor in processors:
        if hasattr(processor, "_attention_backend"):
            processor._attention_backend = backend


def _lack(device: torch.device | None) -> str:
    """Return what a device lacks, as a clause; "" if nothing."""
    if device is None or device.type != "cuda":
        return "it is for GPUs; leave it out"
    if importlib.util.find_spec("comfy_kitchen") is None:
        return f"it needs the package comfy-kitchen; {how_to_install('int8')}"
    if torch.version.cuda is not None and int(torch.version.cuda.partition(".")[0]) < _OLDEST_CUDA:
        return f"it needs torch for CUDA {_OLDEST_CUDA}, and this one is for {torch.version.cuda}"
    import comfy_kitchen

    if not comfy_kitchen.int8_attention_is_available(device):
        return "comfy-kitchen has no kernel for this GPU, as it has from compute capability 7.5; choose another"
    return ""


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Return the attention of queries (B, L, H, D) to keys and values (B, S, H, D): (B, L, H, D)."""
    import comfy_kitchen

    by_heads = (each.transpose(1, 2) for each in (query, key, value))
    found: Tensor = comfy_kitchen.int8_attention(*by_heads, scale=scale, attn_mask=attn_mask)
    return found.transpose(1, 2)

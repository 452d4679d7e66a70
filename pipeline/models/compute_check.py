"""Checks on small tensors that a device supports the compute options of a worker."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from svdq.pipeline.errors import InputError
from svdq.pipeline.models import options
from svdq.pipeline.models.device_memory import is_out_of_memory
from svdq.pipeline.models.options import ComputeOptions, dtype_of


def check(options: ComputeOptions, device: torch.device) -> None:
    """Try the dtype and the compiler.

    Raises:
        InputError: the dtype or the compiler does not work here.
    """
    dtype = dtype_of(options, device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this processor"
    if options.dtype != "auto":
        reason = _reason(lambda: _layers(torch.ones(2, 32, 4, 8, 8, device=device, dtype=dtype)))
        if reason:
            raise InputError(f"--dtype {options.dtype} does not work on {where} ({reason}); use --dtype auto.")
    if options.compiled != "off":
        reason = _reason(lambda: _compiled(device, dtype))
        if reason:
            raise InputError(
                f"--compile {options.compiled} does not work on {where} ({reason}); torch.compile needs a C++ "
                "compiler, and Triton on a GPU. Use --compile off."
            )


def _reason(attempt: Callable[[], object]) -> str:
    """Return the first line of torch's error if an attempt fails, or ""."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # The first line of a compiler error only names the backend.
        lines = [line for line in str(error).strip().splitlines() if not line.endswith("raised:")]
        return (lines[0] if lines else type(error).__name__).rstrip(".")[:160]
    return ""


def _layers(features: Tensor) -> None:
    """Apply the kinds of layers that a UNet has to features (B, C, F, H, W)."""
    channels = features.shape[1]
    kernel = torch.ones((channels, channels, 3, 3, 3), device=features.device, dtype=features.dtype)
    with torch.inference_mode():
        functional.conv3d(features, kernel, padding=1)
        functional.conv2d(features[:, :, 0], kernel[:, :, 0], padding=1)
        functional.group_norm(features, 8)
        tokens = features.flatten(2).transpose(1, 2)
        functional.gelu(functional.linear(functional.layer_norm(tokens, (channels,)), kernel[:, :, 0, 0, 0]))
        functional.silu(features)
        functional.interpolate(features[:, :, 0], scale_factor=2.0)


def _compiled(device: torch.device, dtype: torch.dtype) -> None:
    def small(values: Tensor) -> Tensor:
        return functional.silu(values) + 1

    with torch.inference_mode():
        torch.compile(small, fullgraph=True, dynamic=False, backend=options.BACKEND)(
            torch.ones(64, device=device, dtype=dtype)
        )

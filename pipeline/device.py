"""Chooses the device of a rank, and checks that it can compute."""

import os

import torch
from torch.nn import functional

from svdq.pipeline.errors import InputError


def check_device(wanted: str) -> None:
    """Check that torch can use a GPU if one is requested.

    Raises:
        InputError: torch cannot use a GPU; has torch's reason.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"PyTorch cannot use a GPU here ({_why_no_gpu()}); install a PyTorch that is built for CUDA and a driver "
            "that is new enough for it, or use --device cpu."
        )


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Convert auto, cpu or cuda to a rank's device; ranks share GPUs in rotation if there are more ranks.

    Raises:
        InputError: a GPU is requested, and torch cannot use it.
    """
    _choose_mig_instance(local_rank)
    check_device(wanted)
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    try:
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"The GPU of rank {local_rank} of this host cannot be used: {_first_line(error)}.") from error
    return device


def check_computes(device: torch.device, dtype: torch.dtype) -> None:
    """Run one convolution and one attention on a GPU: one that can only copy would fail every job.

    Raises:
        InputError: the GPU cannot compute; has torch's reason.
    """
    if device.type != "cuda":
        return
    try:
        with torch.inference_mode():
            features = torch.ones((1, 32, 3, 8, 8), device=device, dtype=dtype)
            kernel = torch.ones((32, 32, 3, 3, 3), device=device, dtype=dtype)
            functional.conv3d(features, kernel, padding=1)
            functional.conv2d(features[:, :, 0], kernel[:, :, 0], padding=1)
            tokens = torch.ones((1, 2, 16, 64), device=device, dtype=dtype)
            functional.scaled_dot_product_attention(tokens, tokens, tokens)
        torch.cuda.synchronize(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"The GPU {device} cannot compute: {_first_line(error)}. Check whether this PyTorch ({torch.__version__}) "
            "supports it and whether another program holds it, or use --device cpu."
        ) from error


def _choose_mig_instance(local_rank: int) -> None:
    """Select one MIG instance for a rank: a CUDA process uses only the first visible one."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if any(name.startswith("MIG-") for name in names):
        os.environ["CUDA_VISIBLE_DEVICES"] = names[local_rank % len(names)]


def _why_no_gpu() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return _first_line(error)
    return "it finds none"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".")[:300]

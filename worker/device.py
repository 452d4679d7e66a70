"""Chooses the device of a rank, checks on small tensors that it can compute, and divides its memory among ranks."""

import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute import options as compute_options
from svdq.pipeline.models.compute.memory import RESERVE_BYTES
from svdq.pipeline.models.compute.options import ComputeOptions


def check_device(wanted: str) -> None:
    """Raise an InputError with torch's reason if a GPU is requested and torch cannot use it."""
    if wanted == "cuda" and not torch.cuda.is_available():
        reason = "it finds none"
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            reason = _first_line(error)
        raise InputError(
            f"PyTorch cannot use a GPU here ({reason}); install a PyTorch that is built for CUDA and a driver "
            "that is new enough for it, or use --device cpu."
        )


def choose_device(wanted: str, rank: int) -> torch.device:
    """Convert auto, cpu or cuda to a rank's device, GPUs in rotation; raise an InputError if torch cannot use a GPU."""
    if instances := _mig_instances():  # a CUDA process uses only the first visible one
        os.environ["CUDA_VISIBLE_DEVICES"] = instances[rank % len(instances)]
    check_device(wanted)
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    try:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"The GPU of rank {rank} cannot be used: {_first_line(error)}.") from error
    return device


def check_computes(device: torch.device, dtype: torch.dtype, options: ComputeOptions) -> None:
    """Try the layers of a model on a GPU, and the requested dtype and compiler; raise an InputError with the reason."""
    where = f"the GPU {device}" if device.type == "cuda" else "this processor"
    if device.type == "cuda" or options.dtype != "auto":
        reason = _failure(lambda: _apply_layers(device, dtype))
        if reason and options.dtype != "auto":
            raise InputError(f"--dtype {options.dtype} does not work on {where} ({reason}); use --dtype auto.")
        if reason:
            raise InputError(
                f"The GPU {device} cannot compute: {reason}. Check whether this PyTorch ({torch.__version__}) "
                "supports it and whether another program holds it; leave it out with CUDA_VISIBLE_DEVICES, or use "
                "--device cpu."
            )
    if options.compiled != "off" and (reason := _failure(lambda: _compile(device, dtype))):
        raise InputError(
            f"--compile {options.compiled} does not work on {where} ({reason}); torch.compile needs a C++ "
            "compiler, and Triton on a GPU. Use --compile off."
        )


def _failure(attempt: Callable[[], None]) -> str:
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            attempt()
    except Exception as error:  # noqa: BLE001 - torch and its compilers raise many types
        return _first_line(error)
    return ""


def _apply_layers(device: torch.device, dtype: torch.dtype) -> None:
    features = torch.ones((2, 32, 4, 8, 8), device=device, dtype=dtype)  # (B, C, F, H, W)
    kernel = torch.ones((32, 32, 3, 3, 3), device=device, dtype=dtype)
    functional.conv3d(features, kernel, padding=1)
    functional.conv2d(features[:, :, 0], kernel[:, :, 0], padding=1)
    functional.group_norm(features, 8)
    tokens = features.flatten(2).transpose(1, 2)
    functional.gelu(functional.linear(functional.layer_norm(tokens, (32,)), kernel[:, :, 0, 0, 0]))
    functional.scaled_dot_product_attention(tokens, tokens, tokens)
    functional.silu(features)
    functional.interpolate(features[:, :, 0], scale_factor=2.0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compile(device: torch.device, dtype: torch.dtype) -> None:
    def small(values: Tensor) -> Tensor:
        return functional.silu(values) + 1

    compiled = torch.compile(small, fullgraph=True, dynamic=False, backend=compute_options.BACKEND)
    compiled(torch.ones(64, device=device, dtype=dtype))


def capacity(device: torch.device, limit: int | None, ranks_per_gpu: int) -> int | None:
    """Return the bytes that a rank may use, weights included, at most `limit`, and enforce them on a shared GPU."""
    if device.type != "cuda":
        return limit  # host memory is shared, swapped and mapped, so its capacity is unknown
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    granted = limit or max(0, share_of_gpu(free, total, held, ranks_per_gpu) - RESERVE_BYTES)
    if ranks_per_gpu > 1:
        torch.cuda.set_per_process_memory_fraction(min(1.0, granted / total), device)
    return granted


def bytes_in_reach(device: torch.device) -> int | None:
    """Return the bytes of a GPU that this process holds or could take; None on processors."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def share_of_gpu(free: int, total: int, held: int, ranks_per_gpu: int) -> int:
    """Divide a GPU's bytes equally among its ranks, in whatever order they load; this rank holds `held`."""
    # While the others load, free memory is too high; after that it excludes what other programs hold.
    return min(total // ranks_per_gpu, held + free // ranks_per_gpu)


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a GPU; "" of the processor."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def name_of(device: torch.device) -> str:
    """Return the kind of a device, such as "NVIDIA RTX A5000" or "cpu"."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


def _mig_instances() -> list[str]:
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names if any(name.startswith("MIG-") for name in names) else []


def _first_line(error: BaseException) -> str:
    # The first line of a compiler error only names the backend.
    lines = [line for line in str(error).strip().splitlines() if not line.endswith("raised:")]
    return (lines[0] if lines else type(error).__name__).rstrip(".")[:300]

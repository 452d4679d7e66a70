"""What one denoising step of Stable Video Diffusion costs, with each option that makes it faster or smaller.

Weights are random: time and memory do not depend on them. Each option runs on a UNet of its own with the same weights,
so that what it changes in the result is seen, too. Knows no jobs and no ranks.
"""

import gc
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from svdq.pipeline.models import compute_check
from svdq.pipeline.models.compute import DTYPES, VARIANTS, apply, weight_bytes
from svdq.pipeline.models.full_size import UNET_CONFIG
from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.model_index import read_json
from svdq.pipeline.models.svd_folder import be_quiet

#: Rows and columns of the matrices whose product gives a device's rate.
_MATRIX = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True, kw_only=True)
class UnetShape:
    """What a step computes on."""

    frames: int
    width: int
    height: int
    #: With guidance a step computes twice as much.
    guided: bool = True

    @property
    def batch(self) -> int:
        """Samples that go through the UNet at once."""
        return 2 if self.guided else 1


@dataclass(frozen=True, kw_only=True)
class UnetFigures:
    """What was measured of one option."""

    option: str
    dtype: str
    #: Why it could not be run, as a clause; all figures are 0 then.
    failure: str = ""
    #: Seconds of a step: the median, and all of them.
    step_s: float = 0.0
    steps_s: tuple[float, ...] = ()
    #: Seconds until the first step was done: compiling, choosing kernels.
    first_s: float = 0.0
    #: Eager's median over this one's.
    speedup: float = 0.0
    #: Floating-point operations a second, and what part that is of the rate of a large matrix product.
    flops_per_s: float = 0.0
    matrix_share: float = 0.0
    #: Bytes of the weights, and the most that was allocated on the GPU besides; None on a processor.
    weight_bytes: int = 0
    activation_bytes: int | None = None
    #: Largest difference to eager's result, over that result's largest value.
    difference: float = 0.0


def measure_unet(
    shape: UnetShape,
    *,
    model: str | None,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    options: tuple[str, ...],
    repeats: int,
) -> Iterator[UnetFigures]:
    """Measure options one after the other, eager first for each dtype, whether asked for or not.

    Args:
        shape: of the video.
        model: a folder or hub id whose UNet's config is taken; None for the published one of SVD-XT.
        device: where to compute.
        dtypes: of weights and activations.
        options: of `VARIANTS`.
        repeats: measured steps of each option.

    Raises:
        InputError: there is no such model.
    """
    config = read_json(find_folder(model) / "unet" / "config.json", model) if model else UNET_CONFIG
    num_flops = _count_flops(config, shape)
    for dtype in dtypes:
        rate = matrix_rate(device, dtype)
        eager_s, reference = math.nan, None
        for option in ("eager", *(name for name in options if name != "eager")):
            try:
                figures, result = _measure(option, config, shape, device, dtype, repeats)
            except Exception as error:  # noqa: BLE001 - torch raises whatever it likes; the next option may do
                name = str(dtype).removeprefix("torch.")
                yield UnetFigures(option=option, dtype=name, failure=_first_line(error))
                continue
            if option == "eager":
                eager_s, reference = figures["step_s"], result
            scale = math.nan if reference is None else float(reference.abs().max())
            difference = math.nan if reference is None else float((result - reference).abs().max()) / scale
            yield UnetFigures(
                **figures,
                speedup=eager_s / figures["step_s"],
                flops_per_s=num_flops / figures["step_s"],
                matrix_share=num_flops / figures["step_s"] / rate,
                difference=difference,
            )


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure floating-point operations a second of a large matrix product, the best of five."""
    size = _MATRIX[device.type]
    left, right = (torch.randn((size, size), device=device).to(dtype) for _ in range(2))
    left @ right
    times_s = []
    for _ in range(5):
        _wait(device)
        started = time.perf_counter()
        left @ right
        _wait(device)
        times_s.append(time.perf_counter() - started)
    return 2 * size**3 / min(times_s)


def _measure(
    option: str, config: dict[str, Any], shape: UnetShape, device: torch.device, dtype: torch.dtype, repeats: int
) -> tuple[dict[str, Any], Tensor]:
    """Measure one option; gives the fields of `UnetFigures` that need no other option, and a step's result."""
    torch.compiler.reset()
    gc.collect()
    name = next(short for short, long in DTYPES.items() if long == str(dtype).removeprefix("torch."))
    compute_check.check(replace(VARIANTS[option], dtype=name), device)
    unet = apply(_make_unet(config, device, dtype), VARIANTS[option])
    inputs = _inputs(unet, shape, device, dtype)
    with torch.inference_mode():
        started = time.perf_counter()
        result = unet(**inputs, return_dict=False)[0]
        _wait(device)
        first_s = time.perf_counter() - started
        before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        steps_s = []
        for _ in range(repeats):
            _wait(device)
            started = time.perf_counter()
            unet(**inputs, return_dict=False)
            _wait(device)
            steps_s.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    figures = {
        "option": option,
        "dtype": str(dtype).removeprefix("torch."),
        "step_s": statistics.median(steps_s),
        "steps_s": tuple(steps_s),
        "first_s": first_s,
        "weight_bytes": weight_bytes(unet),
        "activation_bytes": peak,
    }
    return figures, result.float().cpu()


def _make_unet(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    be_quiet()
    from diffusers import UNetSpatioTemporalConditionModel

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # so that the full size is never there in float32
    try:
        with device:
            unet = UNetSpatioTemporalConditionModel.from_config({**config})
    finally:
        torch.set_default_dtype(before)
    # Some of its parameters are made where no default counts.
    return unet.to(device, dtype).eval().requires_grad_(False)


def _inputs(unet: Any, shape: UnetShape, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Make what diffusers' loop gives its UNet: (B, F, 8, H/8, W/8), a timestep, (B, 1, E) and (B, 3)."""
    generator = torch.Generator().manual_seed(1)
    latents = (shape.batch, shape.frames, unet.config.in_channels, shape.height // 8, shape.width // 8)
    embedding = (shape.batch, 1, unet.config.cross_attention_dim)
    return {
        "sample": torch.randn(latents, generator=generator).to(device, dtype),
        "timestep": torch.tensor(1.6, device=device),
        "encoder_hidden_states": torch.randn(embedding, generator=generator).to(device, dtype),
        "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]] * shape.batch).to(device, dtype),
    }


def _count_flops(config: dict[str, Any], shape: UnetShape) -> int:
    """Count the floating-point operations of a step, without computing any."""
    meta = torch.device("meta")
    unet = _make_unet(config, meta, torch.float32)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        unet(**_inputs(unet, shape, meta, torch.float32))
    return int(counter.get_total_flops())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]

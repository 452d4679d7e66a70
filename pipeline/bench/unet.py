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

from svdq.pipeline.errors import InputError
from svdq.pipeline.models import compute_check
from svdq.pipeline.models.compute import DTYPES, VARIANTS, apply, weight_bytes
from svdq.pipeline.models.full_size import UNET_CONFIG
from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.model_index import check_configs, check_index, read_json
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
    #: Eager's median over this one's; None where eager could not be run.
    speedup: float | None = None
    #: Floating-point operations a second, and what part that is of the rate of a large matrix product in the same type.
    #: None for half precision on a processor: its products are slower there than other layers, and no measure of it.
    flops_per_s: float = 0.0
    matrix_share: float | None = None
    #: Bytes of the weights, and the most that was allocated on the GPU besides; None on a processor.
    weight_bytes: int = 0
    activation_bytes: int | None = None
    #: Largest difference to eager's result, over that result's largest value; None where eager could not be run, or one
    #: of both is not finite.
    difference: float | None = None


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
        InputError: there is no such model, or it is not one of Stable Video Diffusion.
    """
    config = UNET_CONFIG if model is None else _config_of(model)
    num_flops = _count_flops(config, shape, "published" if model is None else model)
    for dtype in dtypes:
        is_measure = device.type == "cuda" or dtype == torch.float32
        rate = matrix_rate(device, dtype) if is_measure else None
        eager_s, reference = None, None
        for option in ("eager", *(name for name in options if name != "eager")):
            try:
                figures, result = _measure(option, config, shape, device, dtype, repeats)
            except Exception as error:  # noqa: BLE001 - torch raises whatever it likes; the next option may do
                name = str(dtype).removeprefix("torch.")
                yield UnetFigures(option=option, dtype=name, failure=_first_line(error))
                continue
            if option == "eager":
                eager_s, reference = figures["step_s"], result
            flops_per_s = num_flops / figures["step_s"]
            yield UnetFigures(
                **figures,
                speedup=None if eager_s is None else eager_s / figures["step_s"],
                flops_per_s=flops_per_s,
                matrix_share=None if rate is None else flops_per_s / rate,
                difference=None if reference is None else relative_difference(result, reference),
            )


def relative_difference(result: Tensor, reference: Tensor) -> float | None:
    """Give the largest difference of two results over the second one's largest value; None where one is not finite."""
    difference = float((result - reference).abs().max()) / (float(reference.abs().max()) or 1.0)
    return difference if math.isfinite(difference) else None


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


def _config_of(model: str) -> dict[str, Any]:
    """Read the config of a model's UNet; its weights are not looked at, since random ones take their place.

    Raises:
        InputError: there is no such model, or it is not one of Stable Video Diffusion.
    """
    folder = find_folder(model)
    check_index(folder, model)
    check_configs(folder, model)
    return read_json(folder / "unet" / "config.json", model)


def _count_flops(config: dict[str, Any], shape: UnetShape, model: str) -> int:
    """Count the floating-point operations of a step, without computing any.

    Raises:
        InputError: no UNet can be made of the config, or it computes nothing.
    """
    meta = torch.device("meta")
    try:
        unet = _make_unet(config, meta, torch.float32)
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            unet(**_inputs(unet, shape, meta, torch.float32))
    except Exception as error:  # diffusers and torch raise whatever they like of a config that does not fit together
        raise InputError(
            f"The unet of the model {model} cannot be made of its config ({_first_line(error)}); "
            "give a StableVideoDiffusionPipeline."
        ) from error
    return int(counter.get_total_flops())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200].rstrip(".")

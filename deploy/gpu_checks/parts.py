"""Sections `speed` and `memory`: a step, an encode and a decode alone, each in the plain way and in others.

As a program it measures one part: `python -m gpu_checks.parts` in deploy, with nothing else of the model loaded.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from gpu_checks.check import Check, write_once
from gpu_checks.full_size import COMPONENTS, write_full_size_model
from gpu_checks.night import WANTED_PEAK, night_model
from gpu_checks.wan import write_wide_wan
from svdq.pipeline.models.compute.memory import Activity, shape_for
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.families import family_for, family_named
from svdq.pipeline.models.loader import dtype_for, open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.svd.tiny import write_tiny_model
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.weights.components import name_of
from svdq.pipeline.planning.binding import step_costs
from svdq.pipeline.video_parameters import VideoParameters
from svdq.worker.device import choose_device

ATTENTION = [f"attention {name}" for name in ("_flash_3", "flash")]
#: What each way changes: fields of `ComputeOptions`, or of the video.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "compiled": {"compiled": "blocks"},
    "int8": {"approximate": ("int8",)},
    "streamed": {"offload": "blocks"},
    "channels last": {},
    "VAE in bf16": {},
    "8 frames at a time": {"decode_chunk_size": 8},
    "1 frame at a time": {"decode_chunk_size": 1},
    "tiles": {"decode_chunk_size": 1},
} | {each: {"attention": each.split()[1]} for each in ATTENTION}
#: Model, part, and the ways beside the plain one.
SPEED: Sequence[tuple[str, Activity, Sequence[str]]] = [
    ("wan-2", "step", [*ATTENTION, "compiled", "int8"]),
    ("svd", "step", ["compiled"]),
    ("wan-2", "encode", ["channels last"]),
    ("wan-2", "decode", ["channels last", "VAE in bf16"]),
]
MEMORY: Sequence[tuple[str, Activity, Sequence[str]]] = [
    ("svd", "decode", ["8 frames at a time", "1 frame at a time"]),
    ("wan-2", "decode", ["tiles"]),
    ("wan", "step", ["streamed"]),
]
REPEATS, ENOUGH_S = 3, 15.0  # how often a part is measured, and after which seconds no more


def speed(check: Check) -> None:
    """Measure ways to compute, each a candidate to be kept from a gain of 5% on."""
    for task in SPEED:
        check.task(f"Speed of the {task[1]} of {task[0]}", partial(_compare, check, *task))


def memory(check: Check) -> None:
    """Measure the memory of decodes, of streamed blocks, and of loading."""
    for task in MEMORY:
        check.task(f"Memory of the {task[1]} of {task[0]}", partial(_compare, check, *task))


def write_models(check: Check, tasks: Sequence[tuple[str, Activity, Sequence[str]]]) -> None:
    """Write the models of some tasks."""
    for name, _, _ in tasks:
        _model(check, name)


def _model(check: Check, name: str) -> Path:
    """Write a model: SVD-XT, or Wan 2.2 I2V-A14B with all layers or with two."""
    if name == "wan":
        return night_model(check)
    if name == "wan-2":
        write: Callable[[Path], None] = partial(write_wide_wan, num_layers=2, narrow=not check.on_gpu)
    elif check.on_gpu:
        write = partial(write_full_size_model, dtype=torch.float16, components=COMPONENTS)
    else:
        write = write_tiny_model
    return write_once(check.folder / name, write)


def _compare(check: Check, name: str, part: str, others: Sequence[str]) -> None:
    path = check.folder / "part.json"
    shape = [] if check.on_gpu else ["--shape", "64x64x5"]
    arguments = ["--model", _model(check, name), "--part", part, *check.device, *shape, "--json", path]
    check.run("gpu_checks.parts", *arguments, "plain", *others)
    rows = json.loads(path.read_text(encoding="utf-8"))
    for way, row in rows.items():
        what = f"{name}, {part}, {way}"
        if "failure" in row:  # an attention backend may be missing
            check.figure(what, f"failed: {row['failure']}", good=None if way in ATTENTION else False)
            continue
        measured = f"{row['seconds']:.4g} s, {row['difference']} apart, most of it in {row['kernels']}"
        if plain_s := rows["plain"].get("seconds"):
            measured += f", {plain_s / row['seconds']:.3f} times as fast"
        if not row["peak"]:
            check.figure(what, measured)
            continue
        measured += f", peak {row['peak']:.2f} GB, in loading {row['load_peak']:.2f} GB"
        wanted = f"peak at most {row['estimate']:.2f} GB and 5%; weights of {row['weights']:.2f} GB"
        good = row["peak"] <= WANTED_PEAK * row["estimate"] if way != "channels last" else None
        check.figure(what, measured, wanted, good=good)


def measure(name: str, part: Activity, way: str, device: torch.device, shape: str | None) -> dict[str, Any]:
    """Measure one part in one way; return seconds, GB, and the first result as `result`."""
    resolved = resolve(name)
    assert resolved.family is not None
    family, facts, changes = family_named(resolved.family), resolved.facts, WAYS[way]
    of_video = {each: value for each, value in changes.items() if each == "decode_chunk_size"}
    parameters = family.parameters.of_shape(shape) if shape else family.parameters.model_validate({"seed": 1})
    video = family.complete(parameters, facts)
    video = video.model_copy(update={"decode_chunk_size": video.num_frames} | of_video)
    options = ComputeOptions(**changes if not of_video else {})
    dtype = dtype_for(resolved, device, options)
    component = family.unit_costs(video, facts).segments[0].component
    encodes = part == "encode"
    components = frozenset({component} if part == "step" else ())
    role = Role(embed=encodes, encode=encodes, components=components, decode=part == "decode")
    before = reset_peak(device)
    started = time.perf_counter()
    model: Any = open_model(resolved, role, device, dtype, options)
    load_s, load_peak = time.perf_counter() - started, peak(device) - before
    if way == "channels last":
        channels_last(model.pipeline.vae)
    if way == "VAE in bf16":
        model.pipeline.vae.to(torch.bfloat16)
    work = _work(model, part, video)
    reset_peak(device)
    seconds, results = [], []
    for number in range(REPEATS + 1):  # the first is not counted: it compiles and reserves memory
        if len(seconds) > 1 and sum(seconds) > ENOUGH_S:
            break
        started = time.perf_counter()
        result = work(number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
        results = results or [result.float().cpu()]
        del result
    sizes = {"peak": peak(device) - before}
    kernels = slowest_kernels(partial(work, REPEATS), device)
    weights = model.info.weight_bytes
    estimate = weights + family.memory(part, shape_for(part, video), name_of(dtype), facts, has_decoder=False)
    found = {"seconds": statistics.median(seconds[1:]), "first_s": seconds[0], "load_s": load_s}
    sizes |= {"weights": weights, "estimate": estimate, "load_peak": load_peak}
    return found | {each: size / 1e9 for each, size in sizes.items()} | {"kernels": kernels, "result": results[0]}


def slowest_kernels(work: Callable[[], object], device: torch.device) -> str:
    """Return the names of the three kernels, of operators on a processor, that take most time, with their shares."""
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    times = {
        each.key: each.self_device_time_total if on_gpu else each.self_cpu_time_total
        for each in profiler.key_averages()
    }
    slowest = sorted(times, key=lambda key: times[key], reverse=True)[:3]
    return ", ".join(f"{key[:60]} {times[key] / sum(times.values()):.0%}" for key in slowest)


def channels_last(module: nn.Module) -> None:
    """Store the weights of convolutions with the channels last, which cuDNN's kernels for half precision prefer."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            layer.to(memory_format=torch.channels_last)
        elif isinstance(layer, nn.Conv3d):
            layer.to(memory_format=torch.channels_last_3d)


def reset_peak(device: torch.device) -> int:
    """Forget the peak of memory on a GPU; return the bytes in use, 0 on a processor."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device: torch.device) -> int:
    """Return the most bytes that a GPU has held since the peak was forgotten, 0 on a processor."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _work(model: Any, part: str, video: VideoParameters) -> Callable[[int], Tensor]:
    """Return a function that does the part for the n-th time and returns its result; of a step, the prediction."""
    if part == "encode":
        photo = Image.effect_mandelbrot((video.width, video.height), (-2, -1, 1, 1), 90).convert("RGB")

        def encode(number: int) -> Tensor:
            # Another prompt each time, as for most photos: the embeddings of known ones are cached.
            new = {"prompt": f"Photo {number}."} if hasattr(video, "prompt") else {}
            state = model.encode(photo, video.model_copy(update=new))
            return torch.cat([state[name].flatten() for name in family_for(video).encoded])

        return encode
    # An artificial state, the same in all ways; latents of SVD are as noisy as before a step.
    generator = torch.Generator().manual_seed(1)
    state = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
        for name, tensor in model.zeros(video).items()
    }
    if part == "decode":
        return lambda _: torch.as_tensor(model.decode(state, video, video.decode_chunk_size))
    if isinstance(video, SvdParameters):
        model.pipeline.scheduler.set_timesteps(video.steps)
        state["latents"] *= (float(model.pipeline.scheduler.sigmas[0]) ** 2 + 1) ** 0.5
    denoiser = model.denoiser(state, video, step_costs(model.segments(video)))
    component = getattr(model.pipeline, model.segments(video)[0].component)

    def step(number: int) -> Tensor:
        predicted: list[Tensor] = []
        with component.register_forward_hook(lambda _module, _inputs, output: predicted.append(output[0])):
            state.update(denoiser.step(state, number))
        return predicted[0]

    return step


def main() -> None:
    """Measure a part in some ways, and write what was found; a way that fails has the reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--part", choices=["encode", "step", "decode"], required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--shape", help="WIDTHxHEIGHTxFRAMES [default: the model's]")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("ways", nargs="+", choices=list(WAYS))
    options = parser.parse_args()
    device = choose_device(options.device, 0)
    rows: dict[str, dict[str, Any]] = {}
    plain: Tensor | None = None
    for way in options.ways:
        torch.compiler.reset()
        try:
            row = measure(options.model, options.part, way, device, options.shape)
        except Exception as error:  # noqa: BLE001 - torch raises many types; the next way may work
            rows[way] = {"failure": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
            continue
        result = row.pop("result")
        plain = result if plain is None else plain
        row["difference"] = f"{float((result - plain).abs().max() / (plain.abs().max() or 1)):.2g}"
        rows[way] = row
    options.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    print(json.dumps(rows, indent=2))  # noqa: T201


if __name__ == "__main__":
    main()

"""Measures time, memory and results of a model's parts on one device: a denoising step, an encode, a decode.

Each part runs through the model that a worker opens, with nothing else loaded, as on a rank that has only this part.
"""

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from pydantic import TypeAdapter
from torch import Tensor

from gpu_checks.model_cases import PARTS, Case, Row, cases_of, denoising_components
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute_options import APPROXIMATE, COMPILED, KEPT, OFFLOADED, ComputeOptions
from svdq.pipeline.models.diffusers_model import DiffusersModel
from svdq.pipeline.models.failures import is_out_of_memory
from svdq.pipeline.models.families import family_named
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.model_folder import DTYPES
from svdq.pipeline.models.model_names import resolve
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.video_model import Role, all_finite
from svdq.pipeline.planning.binding import step_costs
from svdq.pipeline.video_parameters import VideoParameters
from svdq.worker.device import choose_device

#: What a part computes, in float32 on the host.
Results = tuple[Tensor, ...]


def measure(
    name: str, cases: Sequence[Case], *, device: torch.device, repeats: int, earlier: Collection[Case] = ()
) -> Iterator[Row]:
    """Measure cases one by one; the row of a case that cannot be measured has the reason.

    Args:
        name: a model folder or hub id.
        cases: as `cases.cases_of` orders them.
        device: where to compute.
        repeats: number of measurements per case, after a first run that is not counted.
        earlier: cases that an earlier run measured; there are no results of them to compare with.

    Raises:
        InputError: the model does not exist.
    """
    model = resolve(name, dtype=cases[0].dtype if cases else "auto")
    #: Results of the first rows of a part and component, by size.
    references: dict[tuple[Any, ...], Results] = {}
    gone = {_compared_with(case) for case in earlier}
    for _, group in itertools.groupby(cases, key=_opened_with):
        bench = _Bench(model, device, repeats)
        for case in group:
            figures, result = bench.measure(case)
            if result is not None:
                key = _compared_with(case)
                figures |= differences(result, None if key in gone else references.setdefault(key, result))
            yield Row(**asdict(case) | figures)


def random_state(model: DiffusersModel, video: VideoParameters, index: int) -> dict[str, Tensor]:
    """Draw an artificial state before step `index`, to measure a step or a decode without an encoder.

    Its numbers follow from the video's seed and are the same in all dtypes, but for rounding; latents of Stable Video
    Diffusion are as noisy as there. Before the step after the last it can be decoded.
    """
    generator = torch.Generator().manual_seed(video.seed)
    state = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
        for name, tensor in model.zeros(video).items()
    }
    if isinstance(video, SvdParameters):
        scheduler = model.pipeline.scheduler
        scheduler.set_timesteps(video.steps)
        state["latents"] *= (float(scheduler.sigmas[index]) ** 2 + 1) ** 0.5
    return state


def _opened_with(case: Case) -> tuple[Any, ...]:
    return case.part, case.component, case.dtype, case.compiled, case.approximate, case.offload, case.weights


def _compared_with(case: Case) -> tuple[Any, ...]:
    return case.part, case.component, case.width, case.height, case.guidance


def differences(results: Results, references: Results | None) -> dict[str, Any]:
    """Return the fields of `Row` about results: whether they are finite, and the difference from references.

    Of several tensors, the one that differs most counts.
    """
    if not all_finite(results):
        return {"finite": False}
    if references is None or not all_finite(references):
        return {}
    found = []
    for result, reference in zip(results, references, strict=True):
        largest, apart = float(reference.abs().max()) or 1.0, (result - reference).abs()
        found.append((float(apart.max()) / largest, float(apart.mean()) / largest))
    return {"difference": max(most for most, _ in found), "mean_difference": max(mean for _, mean in found)}


def _role(case: Case) -> Role:
    """Return the role of a rank that does only this part."""
    if case.part == "step":
        return Role(components=None if case.component is None else frozenset({case.component}))
    encodes = case.part == "encode"
    return Role(embed=encodes, encode=encodes, components=frozenset(), decode=case.part == "decode")


def _torch_dtype(case: Case) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, DTYPES[case.dtype])
    return dtype


class _Bench:
    """One part of a model with one set of compute options, opened at the first measurement."""

    def __init__(self, model: ResolvedModel, device: torch.device, repeats: int) -> None:
        self._resolved = model
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._repeats = repeats
        self._model: DiffusersModel | None = None
        self._results: Results | None = None

    def measure(self, case: Case) -> tuple[dict[str, Any], Results | None]:
        """Measure one case; return fields of `Row`, and the results, or None after a failure."""
        self._results = None
        try:
            return self._measure(case), self._results
        except Exception as error:  # noqa: BLE001 - torch raises many types; the next case may work
            if is_out_of_memory(error):
                return {"failure": "out of memory"}, None
            line = str(error).strip().partition("\n")[0][:200]
            return {"failure": f"{type(error).__name__}: {line}"}, None

    def _measure(self, case: Case) -> dict[str, Any]:
        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()
        load_s = 0.0
        if self._model is None:
            torch.compiler.reset()
            options = ComputeOptions(
                dtype=case.dtype,
                compiled=case.compiled,
                approximate=case.approximate,
                offload=case.offload,
                weights=case.weights,
            )
            started = time.perf_counter()
            self._model = open_model(self._resolved, _role(case), self._device, _torch_dtype(case), options)
            load_s = time.perf_counter() - started
        run = self._work(self._model, case)
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        allocated, reserved = self._memory()
        first_s, *all_s = (self._timed(run, number) for number in range(self._repeats + 1))
        figures = {
            "seconds": statistics.median(all_s),
            "all_s": tuple(all_s),
            "first_s": first_s,
            "load_s": load_s,
            "weight_bytes": self._model.info.weight_bytes,
        }
        if self._on_gpu:
            figures["peak_bytes"] = torch.cuda.max_memory_allocated(self._device) - allocated
            figures["reserved_bytes"] = torch.cuda.max_memory_reserved(self._device) - reserved
        return figures

    def _memory(self) -> tuple[int, int]:
        if not self._on_gpu:
            return 0, 0
        return torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)

    def _timed(self, run: Callable[[int], None], number: int) -> float:
        started = time.perf_counter()
        run(number)
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started

    def _work(self, model: DiffusersModel, case: Case) -> Callable[[int], None]:
        """Return a function that does the work of a case for the n-th time and keeps the first results."""
        family = model.info.family
        assert family is not None
        shape = {"width": case.width, "height": case.height, "frames": case.frames}
        unguided = {"guidance_scale": 1.0} if case.guidance == "off" else {}
        video = model.complete(family.parameters.model_validate({**shape, **unguided, "seed": 1}))
        if case.part == "encode":
            photo = Image.effect_mandelbrot((case.width, case.height), (-2, -1, 1, 1), 90).convert("RGB")

            def encode(number: int) -> None:
                # Another prompt each time, as for most photos: the embeddings of known ones are cached.
                new = {"prompt": f"{case.width}x{case.height}, {number}"} if hasattr(video, "prompt") else {}
                state = model.encode(photo, video.model_copy(update=new))
                self._keep(number, *(state[name] for name in family.encoded))

            return encode
        if case.part == "decode":
            state = random_state(model, video, video.steps)
            chunk_size = case.decode_chunk_size or case.frames
            return lambda number: self._keep(number, model.decode(state, video, chunk_size))
        return self._step(model, case, video)

    def _step(self, model: DiffusersModel, case: Case, video: VideoParameters) -> Callable[[int], None]:
        """Return a function that does the n-th step of a component."""
        segment = next(each for each in model.segments(video) if case.component in (None, each.component))
        steps = range(segment.start, segment.stop)
        state = random_state(model, video, segment.start)
        denoiser = model.denoiser(state, video, step_costs(model.segments(video)))
        component = getattr(model.pipeline, segment.component)

        def keep(_module: object, _arguments: object, predicted: tuple[Tensor]) -> None:
            self._keep(0, predicted[0])

        def step(number: int) -> None:
            # The result of a step is mostly its input noise, so the prediction is kept instead.
            with component.register_forward_hook(keep) if number == 0 else contextlib.nullcontext():
                state.update(denoiser.step(state, steps[number % len(steps)]))

        return step

    def _keep(self, number: int, *results: Tensor) -> None:
        if number == 0:
            self._results = tuple(result.float().cpu() for result in results)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write each row into the file of --json as soon as it is there; 1 if no row could be measured."""
    options = _parse(arguments)
    device = choose_device(options.device, 0)
    resolved = resolve(options.model)
    if resolved.family is None:
        raise InputError(f"The model {options.model} has no parts; give the folder or hub id of a model.")
    family, facts = family_named(resolved.family), resolved.facts
    shapes: list[dict[str, int]] = []
    for size in options.size or [""]:
        sides = dict(zip(("width", "height"), map(int, size.split("x")), strict=True)) if size else {}
        shapes.append(sides | ({"frames": options.frames} if options.frames else {}))
    videos = [
        family.fill_in(family.parameters.model_validate({**shape, "seed": 0}), options.model, facts) for shape in shapes
    ]
    cases = cases_of(
        options.part or PARTS,
        videos,
        denoising_components(videos, facts),
        dtypes=options.dtype or (family.half if device.type == "cuda" else "fp32",),
        compiled=options.compile or ("off",),
        approximate=options.approximate,
        offload=options.offload,
        weights=options.weights,
        guidance=options.guidance or ("on",),
        # Fewer frames than all at a time are tiles to Wan, whatever the number.
        chunk_sizes=options.decode_chunk_size or (videos[0].smaller_chunk(16), videos[0].num_frames),
    )
    rows = (
        TypeAdapter(dict[str, list[Row]]).validate_json(options.json.read_bytes())["rows"]
        if options.json.exists()
        else []
    )
    done = {row.case: row for row in rows if not row.failure}
    missing = [case for case in cases if case not in done]
    for row in measure(options.model, missing, device=device, repeats=options.repeats, earlier=list(done)):
        done[row.case] = row
        print(row.sentence(), flush=True)  # noqa: T201
        options.json.write_text(json.dumps({"rows": [asdict(one) for one in done.values()]}, indent=2))
    return 0 if any(not done[case].failure for case in cases) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpu_checks.model_parts", description=__doc__)
    parser.add_argument("--model", required=True, help="a model folder or hub id")
    parser.add_argument("--json", type=Path, required=True, help="file of the rows; those in it are kept")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--frames", type=int, help="frames of the video [default: the model's]")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each row")
    choices_of: dict[str, Collection[str]] = {
        "part": PARTS,
        "dtype": DTYPES,
        "compile": COMPILED,
        "approximate": APPROXIMATE,
    }
    choices_of |= {"offload": OFFLOADED, "weights": KEPT, "guidance": ("on", "off")}
    for name, choices in choices_of.items():
        parser.add_argument(f"--{name}", action="append", choices=list(choices), default=[], help="repeatable")
    parser.add_argument("--size", action="append", default=[], help="WIDTHxHEIGHT; repeatable [default: the model's]")
    parser.add_argument(
        "--decode-chunk-size", action="append", type=int, default=[], help="frames at a time; repeatable"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

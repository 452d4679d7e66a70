"""Measures time, memory and results of a model's parts on one device: a denoising step, an encode, a decode.

Each part runs through the model that a worker opens, with nothing else loaded, as on a rank that has only this part.
"""

import contextlib
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

from svdq.pipeline.bench.model_states import keep_predictions, random_state
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.base import Role, VideoModel
from svdq.pipeline.models.components import acceptable
from svdq.pipeline.models.device_memory import is_out_of_memory
from svdq.pipeline.models.family import Segment
from svdq.pipeline.models.folder_check import check_folder
from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.options import DTYPES, ComputeOptions, stored_bytes
from svdq.pipeline.models.registry import family_of, layout_of
from svdq.pipeline.models.svd.full_size import COMPONENTS, write_full_size_model
from svdq.pipeline.parameters import VideoParameters

#: The parts to measure.
PARTS = ("step", "encode", "decode")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one row measures; names of fields are those of the JSON."""

    #: One of PARTS.
    part: str
    #: The video's shape; sides in pixels.
    width: int
    height: int
    frames: int
    #: One of DTYPES.
    dtype: str
    #: The part of the UNet or transformer that is compiled, and approximate options: see ComputeOptions. Steps only.
    compiled: str = "off"
    approximate: tuple[str, ...] = ()
    #: Frames decoded at a time. Decodes only.
    decode_chunk_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Row(Case):
    """The measurements of a case."""

    #: Why it could not be measured, as a clause; "" otherwise.
    failure: str = ""
    #: Seconds: the median, and all of them.
    seconds: float = 0.0
    all_s: tuple[float, ...] = ()
    #: Seconds of the first run, which is not counted: compiling, choosing kernels, reserving memory.
    first_s: float = 0.0
    #: Bytes of the loaded weights.
    weight_bytes: int = 0
    #: Peak bytes of tensors on the GPU besides the weights, and bytes that PyTorch's allocator reserved for them; None
    #: on a CPU.
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    #: Largest and mean difference from the result of the first row of the same part and size, relative to the largest
    #: value there; None if there is no such row or a result is not finite.
    difference: float | None = None
    mean_difference: float | None = None
    #: Whether the result is finite: a worker fails the video otherwise.
    finite: bool = True


def cases_of(
    parts: Collection[str],
    sizes: Sequence[tuple[int, int]],
    frames: int,
    *,
    dtypes: Sequence[str],
    compiled: Sequence[str],
    approximate: Sequence[str],
    chunk_sizes: Sequence[int],
) -> list[Case]:
    """List the cases, ordered so that those with the same loaded model are adjacent."""
    ways: list[dict[str, Any]] = [{"compiled": what} for what in compiled]
    ways += [{"approximate": (what,)} for what in approximate]
    chunks: list[dict[str, Any]] = [
        {"decode_chunk_size": size} for size in sorted({min(size, frames) for size in chunk_sizes})
    ]
    return [
        Case(part=part, dtype=dtype, width=width, height=height, frames=frames, **way, **chunk)
        for part in PARTS
        if part in parts
        for dtype in dtypes
        for way in (ways if part == "step" else [{}])
        for width, height in sizes
        for chunk in (chunks if part == "decode" else [{}])
    ]


def measure(
    name: str, cases: Sequence[Case], *, device: torch.device, repeats: int, earlier: Collection[Case] = ()
) -> Iterator[Row]:
    """Measure cases one by one; the row of a case that cannot be measured has the reason.

    Args:
        name: a model folder or hub id.
        cases: as `cases_of` orders them.
        device: where to compute.
        repeats: number of measurements per case, after a first run that is not counted.
        earlier: cases that an earlier run measured; there are no results of them to compare with.

    Raises:
        InputError: the model does not exist, or makes no video of such a shape.
    """
    if cases:
        folder = find_folder(name)
        check_folder(folder, name, layout_of(folder, name), half=acceptable(_torch_dtype(cases[0])))
    for case in cases:
        video_of(name, case, 1)
    #: Results of the first rows of a part, by size.
    references: dict[tuple[str, int, int], Tensor] = {}
    gone = {(case.part, case.width, case.height) for case in earlier}
    for _, group in itertools.groupby(cases, key=lambda case: (case.part, case.dtype, case.compiled, case.approximate)):
        bench = _Bench(name, device, repeats)
        for case in group:
            figures, result = bench.measure(case)
            if result is not None:
                key = (case.part, case.width, case.height)
                figures |= differences(result, None if key in gone else references.setdefault(key, result))
            yield Row(**asdict(case) | figures)


def differences(result: Tensor, reference: Tensor | None) -> dict[str, Any]:
    """Return the fields of `Row` about a result: whether it is finite, and its difference from a reference."""
    if not torch.isfinite(result).all():
        return {"finite": False}
    if reference is None or not torch.isfinite(reference).all():
        return {}
    largest, apart = float(reference.abs().max()) or 1.0, (result - reference).abs()
    return {"difference": float(apart.max()) / largest, "mean_difference": float(apart.mean()) / largest}


@contextlib.contextmanager
def model_folder(model: str | None, parts: Collection[str]) -> Iterator[str]:
    """Yield a model, or a temporary folder of SVD-XT's published sizes with random weights in half precision.

    Args:
        model: a folder or hub id; None for the published sizes, which take 1.5 GB of disk without the UNet and 4.5 GB
            with it.
        parts: the parts to measure.
    """
    if model is not None:
        yield model
        return
    components = [name for name in COMPONENTS if name != "unet" or "step" in parts]
    with tempfile.TemporaryDirectory(prefix="svdq-bench-") as folder:
        write_full_size_model(Path(folder), torch.float16, components=components)
        yield folder


def video_of(name: str, case: Case, steps: int) -> VideoParameters:
    """Return the parameters of a case's video, with the model's defaults.

    Raises:
        InputError: the model makes no video of such a shape.
    """
    folder = find_folder(name)
    family = family_of(folder, name)
    shape = {"width": case.width, "height": case.height, "frames": case.frames}
    try:
        video = family.parameters.model_validate(shape | {"steps": steps, "seed": 0})
    except ValidationError as error:
        problem = error.errors()[0]
        allowed = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        field = str(problem["loc"][0])
        verb, pronoun = ("are", "they") if field == "frames" else ("is", "it")
        raise InputError(
            f"The {field} {problem['input']} {verb} not allowed for the model {name}: {pronoun} must be {allowed}."
        ) from error
    return family.complete(video, family.read_facts(folder, name))


def _segment(name: str, case: Case, steps: int) -> Segment:
    """Return the first of the segments of a case's video; its component is measured."""
    folder = find_folder(name)
    family = family_of(folder, name)
    return family.segments(video_of(name, case, steps), family.read_facts(folder, name))[0]


def _torch_dtype(case: Case) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, DTYPES[case.dtype])
    return dtype


class _Bench:
    """One part of a model with one set of compute options, opened at the first measurement."""

    def __init__(self, name: str, device: torch.device, repeats: int) -> None:
        self._name = name
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._repeats = repeats
        self._model: VideoModel | None = None
        self._result: Tensor | None = None

    def measure(self, case: Case) -> tuple[dict[str, Any], Tensor | None]:
        """Measure one case; return fields of `Row`, and the result in float32 on the host, or None after a failure."""
        self._result = None
        try:
            return self._measure(case), self._result
        except Exception as error:  # noqa: BLE001 - torch raises many types; the next case may work
            if is_out_of_memory(error):
                return {"failure": "out of memory"}, None
            line = str(error).strip().partition("\n")[0][:200]
            return {"failure": f"{type(error).__name__}: {line}"}, None

    def _measure(self, case: Case) -> dict[str, Any]:
        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()
        if self._model is None:
            torch.compiler.reset()
            options = ComputeOptions(dtype=case.dtype, compiled=case.compiled, approximate=case.approximate)
            component = _segment(self._name, case, self._num_steps()).component
            role = Role(
                encode=case.part == "encode",
                decode=case.part == "decode",
                components=frozenset({component} if case.part == "step" else ()),
            )
            self._model = open_model(self._name, role, self._device, _torch_dtype(case), options)
        pipeline: Any = getattr(self._model, "pipeline")  # noqa: B009 - models with weights have one
        loaded = [item for item in pipeline.components.values() if isinstance(item, torch.nn.Module)]
        weight_bytes = sum(stored_bytes(weight) for module in loaded for weight in module.parameters())
        run = self._work(self._model, case)
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        allocated, reserved = self._memory()
        first_s, *all_s = (self._timed(run, number) for number in range(self._repeats + 1))
        figures = {
            "seconds": statistics.median(all_s),
            "all_s": tuple(all_s),
            "first_s": first_s,
            "weight_bytes": weight_bytes,
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

    def _num_steps(self) -> int:
        return max(25, self._repeats + 1)

    def _work(self, model: VideoModel, case: Case) -> Callable[[int], None]:
        """Return a function that does the work of a case for the n-th time and keeps the first result."""
        video = video_of(self._name, case, self._num_steps())
        if case.part == "encode":
            photo = Image.effect_mandelbrot((case.width, case.height), (-2, -1, 1, 1), 90).convert("RGB")

            def encode(number: int) -> None:
                # Models keep the embeddings of prompts, so each run has another one.
                prompt = {"prompt": f"Wave {number} breaks."} if hasattr(video, "prompt") else {}
                state = model.encode(photo, video.model_copy(update=prompt))
                drawn = [state[name].float().flatten() for name in sorted(state) if name != "latents"]
                self._keep(number, torch.cat(drawn))

            return encode
        state = random_state(model, video, _torch_dtype(case), self._device)
        if case.part == "decode":
            chunk_size = case.decode_chunk_size or case.frames
            return lambda number: self._keep(number, model.decode(state, video, chunk_size))
        # The first steps of a video. The result of a step is mostly its input noise, so the prediction is kept instead.
        segment = _segment(self._name, case, self._num_steps())
        denoiser = model.denoiser(state, video)

        def step(number: int) -> None:
            index = number % segment.stop
            if number:
                state.update(denoiser.step(state, index))
            else:
                with keep_predictions(denoiser, segment.component, lambda predicted: self._keep(0, predicted)):
                    state.update(denoiser.step(state, index))

        return step

    def _keep(self, number: int, result: Tensor) -> None:
        if number == 0:
            self._result = result.float().cpu()

"""One part of a video measured alone on one device: an encode, a denoising step or a decode.

Goes through the model that a worker opens, with nothing loaded but the part that is measured, as on a rank that has
only this part. Knows no jobs, no ranks and no terminal.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.device_memory import is_out_of_memory
from svdq.pipeline.models.memory import Activity, estimate, shape_for
from svdq.pipeline.models.model import Part
from svdq.pipeline.models.model_index import UNET_DEFAULTS
from svdq.pipeline.models.svd import SvdModel
from svdq.pipeline.models.svd_folder import SvdFolder
from svdq.pipeline.models.tiny import SCHEDULER_CONFIG
from svdq.pipeline.parameters import VideoParameters

#: What the parts are called here.
NAMES = {Part.DENOISER: "step", Part.ENCODER: "encode", Part.DECODER: "decode"}


@dataclass(frozen=True, kw_only=True)
class PartFigures:
    """What was measured of one part; names of fields are those of the JSON."""

    #: step, encode or decode; of a video of this shape, computed in this type.
    part: str
    width: int
    height: int
    frames: int
    dtype: str
    #: Frames decoded at a time; None but for a decode.
    decode_chunk_size: int | None = None
    #: Why it could not be measured, as a clause; all figures are 0 then.
    failure: str = ""
    #: Seconds: the median, and all of them.
    seconds: float = 0.0
    all_s: tuple[float, ...] = ()
    #: Seconds of the first time, which is not counted: choosing kernels, reserving memory.
    first_s: float = 0.0
    #: Bytes of what is loaded for this part, and the most that was allocated on the GPU besides; None on a processor.
    weight_bytes: int = 0
    peak_bytes: int | None = None
    #: Bytes that a worker estimates that to be.
    estimated_bytes: int = 0
    #: How many steps it takes as long as; None where no step was measured in its type.
    worth_steps: float | None = None
    #: Largest difference of its result to float32's, over that result's largest value; None where that is not known.
    difference: float | None = None
    #: Whether its result holds finite numbers only: a worker fails a video otherwise.
    finite: bool = True


def measure_parts(
    model: str,
    parts: Sequence[Part],
    videos: Sequence[VideoParameters],
    *,
    device: torch.device,
    dtype: torch.dtype,
    chunk_sizes: Sequence[int] | None,
    repeats: int,
) -> Iterator[tuple[PartFigures, Tensor | None]]:
    """Measure parts of a model, each with videos of several shapes; what cannot be measured says so in its figures.

    Args:
        model: a folder or hub id.
        parts: which.
        videos: whose shapes are measured.
        device: where to compute.
        dtype: of weights and activations.
        chunk_sizes: frames decoded at a time, one after the other; None does what a worker does: all frames, then,
            while memory does not suffice, half as many.
        repeats: how often each is measured, after a first time that is not counted.

    Yields:
        Figures, and a result of the part in float32 on the host: what the UNet predicts, image latents, frames from 0
        to 255. None where it failed.

    Raises:
        InputError: there is no such model.
    """
    folder = SvdFolder.find(model, dtype)
    embedding_dim = (UNET_DEFAULTS | folder.config("unet"))["cross_attention_dim"]
    for part in parts:
        bench = _Bench(model, part, embedding_dim, device, dtype, repeats)
        for video in videos:
            if part is not Part.DECODER:
                yield bench.measure(video, None)
            elif chunk_sizes is not None:
                for chunk_size in sorted({min(size, video.num_frames) for size in chunk_sizes}):
                    yield bench.measure(video, chunk_size)
            else:
                chunk_size = video.num_frames
                found = bench.measure(video, chunk_size)
                while found[0].failure and bench.out_of_memory and chunk_size > 1:
                    yield found
                    chunk_size = (chunk_size + 1) // 2
                    found = bench.measure(video, chunk_size)
                yield found


class _Bench:
    """One part of a model, opened when it is first measured."""

    def __init__(
        self, name: str, part: Part, embedding_dim: int, device: torch.device, dtype: torch.dtype, repeats: int
    ) -> None:
        self._name = name
        self._part = part
        self._embedding_dim = embedding_dim
        self._device = device
        self._dtype = dtype
        self._repeats = repeats
        self._model: SvdModel | None = None
        self._result: Tensor | None = None
        #: Whether memory did not suffice the last time.
        self.out_of_memory = False

    def measure(self, video: VideoParameters, chunk_size: int | None) -> tuple[PartFigures, Tensor | None]:
        """Measure it with one shape."""
        figures = PartFigures(
            part=NAMES[self._part],
            width=video.width,
            height=video.height,
            frames=video.num_frames,
            dtype=str(self._dtype).removeprefix("torch."),
            decode_chunk_size=chunk_size,
        )
        self._result, self.out_of_memory = None, False
        try:
            figures = replace(figures, **self._measure(video, chunk_size))
            finite = self._result is None or bool(torch.isfinite(self._result).all())
            return replace(figures, finite=finite), self._result
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - torch raises whatever it likes; the next one may do
            self.out_of_memory = is_out_of_memory(error)
            line = str(error).strip().partition("\n")[0][:200]
            failure = "out of memory" if self.out_of_memory else f"{type(error).__name__}: {line}"
            return replace(figures, failure=failure), None

    def _measure(self, video: VideoParameters, chunk_size: int | None) -> dict[str, Any]:
        on_gpu = self._device.type == "cuda"
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        if self._model is None:
            self._model = SvdModel(self._name, self._part, self._device, self._dtype)
        loaded = [item for item in self._model.pipeline.components.values() if isinstance(item, torch.nn.Module)]
        weights = [weight for module in loaded for weight in module.parameters()]
        run = self._work(self._model, video, chunk_size)
        before = 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
        first_s, *all_s = (self._timed(run, number) for number in range(self._repeats + 1))
        return {
            "seconds": statistics.median(all_s),
            "all_s": tuple(all_s),
            "first_s": first_s,
            "weight_bytes": sum(weight.numel() * weight.element_size() for weight in weights),
            "peak_bytes": torch.cuda.max_memory_allocated(self._device) - before if on_gpu else None,
            "estimated_bytes": self._estimated(video, chunk_size),
        }

    def _estimated(self, video: VideoParameters, chunk_size: int | None) -> int:
        activities: dict[Part, Activity] = {Part.ENCODER: "encode", Part.DENOISER: "step", Part.DECODER: "decode"}
        activity = activities[self._part]
        in_chunks = video.model_copy(update={"decode_chunk_size": chunk_size})
        return estimate(activity, shape_for(activity, in_chunks), str(self._dtype).removeprefix("torch."))

    def _timed(self, run: Callable[[int], None], number: int) -> float:
        started = time.perf_counter()
        run(number)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started

    def _work(self, model: SvdModel, video: VideoParameters, chunk_size: int | None) -> Callable[[int], None]:
        """Make what is measured: a function that does it for the n-th time and keeps the first result."""
        if self._part is Part.ENCODER:
            photo = Image.effect_mandelbrot((video.width, video.height), (-2, -1, 1, 1), 90).convert("RGB")
            return lambda number: self._keep(number, model.encode(photo, video)["image_latents"])
        tensors = self._tensors(video)
        if self._part is Part.DECODER:
            assert chunk_size is not None
            return lambda number: self._keep(number, torch.from_numpy(model.decode(tensors, video, chunk_size)))
        return self._steps(model, tensors, video)

    def _steps(self, model: SvdModel, tensors: dict[str, Tensor], video: VideoParameters) -> Callable[[int], None]:
        # The first steps of a video, one after the other. A step's own result is mostly the noise that it was given,
        # so what is kept is what the UNet predicts.
        noise = tensors["latents"] * (SCHEDULER_CONFIG["sigma_max"] ** 2 + 1) ** 0.5
        denoiser = model.denoiser(tensors, video)
        latents = [noise]

        def step(number: int) -> None:
            watch = None
            if number == 0:
                watch = model.pipeline.unet.register_forward_hook(lambda _unet, _in, out: self._keep(0, out[0]))
            try:
                latents[0] = denoiser.step(latents[0], number)
            finally:
                if watch is not None:
                    watch.remove()

        return step

    def _keep(self, number: int, result: Tensor) -> None:
        if number == 0:
            self._result = result.float().cpu()

    def _tensors(self, video: VideoParameters) -> dict[str, Tensor]:
        """Draw what a sample holds: (1, 1, E), (1, 4, H/8, W/8) and (1, F, 4, H/8, W/8), the same in all types."""
        generator = torch.Generator().manual_seed(1)
        picture = (video.height // 8, video.width // 8)
        shapes: dict[str, tuple[int, ...]] = {
            "image_embedding": (1, 1, self._embedding_dim),
            "image_latents": (1, 4, *picture),
            "latents": (1, video.num_frames, 4, *picture),
        }
        return {
            name: torch.randn(shape, generator=generator).to(self._device, self._dtype)
            for name, shape in shapes.items()
        }

"""What our loop costs over diffusers' own at one rank: `python -m svdq.pipeline.bench.overhead --model DIR`.

Both make the same videos in one process and one thread, in turns, so that what else the machine does falls on both.
Measured is each step but the first; ours goes through the stage loop of a real rank, theirs through
StableVideoDiffusionPipeline's `__call__`. Prints lower quartiles and medians of all steps, since what disturbs a step
only makes it longer, and whether the frames are equal. `--without-unet` leaves the UNet out: what is left is the loops.

`--count operations` and `--count calls` count in place of taking the processor time, and no noise gets into that:
torch's operations, which on a GPU are kernels to launch, or all calls of functions that Python makes.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from svdq.pipeline.compare import call_diffusers
from svdq.pipeline.errors import SvdqError
from svdq.pipeline.group import Links, Place, build_stage
from svdq.pipeline.local import exit_when_lost
from svdq.pipeline.models.model import Frames, Part
from svdq.pipeline.models.svd import SvdModel
from svdq.pipeline.models.svd_folder import be_quiet
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Sample
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.message import sample_body
from svdq.pipeline.transport.ports import Report, Request

#: Tells how much was spent so far.
Meter = Callable[[], float]


class _Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            # In inference mode, which is ours, operations arrive whole that without it arrive in parts.
            parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        self.number += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _counting_operations() -> Iterator[Meter]:
    with _Operations() as operations:
        yield lambda: operations.number


@contextmanager
def _counting_calls() -> Iterator[Meter]:
    number = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield lambda: number
    finally:
        sys.setprofile(None)


@contextmanager
def _taking_time() -> Iterator[Meter]:
    yield time.process_time


#: What can be measured of a step: how, the name of the unit, and how many of it the meter's unit is.
METERS: dict[str, tuple[Callable[[], Any], str, float]] = {
    "time": (_taking_time, "ms", 1e3),
    "operations": (_counting_operations, "operations", 1),
    "calls": (_counting_calls, "calls", 1),
}


class _Pairs:
    """The world around a rank: before each of its videos, diffusers makes the same one."""

    def __init__(
        self, pipeline: Any, photo: Image.Image, parameters: VideoParameters, num_pairs: int, meter: Meter
    ) -> None:
        self._pipeline = pipeline
        self._photo = photo
        self._parameters = parameters
        self._left = num_pairs
        self._meter = meter
        self._marks: list[float] = []
        self._expected: Frames | None = None
        #: What each step took but the first of each video, in the meter's unit.
        self.theirs: list[float] = []
        self.ours: list[float] = []
        self.all_equal = True

    # What the stage takes from ...

    def take(self) -> Request | None:
        if not self._left:
            return None
        self._left -= 1
        self._render_with_diffusers()
        self._marks = []
        return Request(job_id=f"video-{self._left}", parameters=self._parameters, photo=self._photo)

    def nearly_free(self) -> None:
        """Everything is ready."""

    def ended(self, report: Report) -> None:
        """Nothing is counted here."""

    # ... tells of its steps ...

    def step(self, sample: Sample, index: int) -> None:
        self._marks.append(self._meter())

    def warm_up(self, sample: Sample) -> None:
        """Say nothing."""

    def idle(self) -> None:
        """Say nothing."""

    def cancelled(self, job_id: str) -> bool:
        return False

    # ... and delivers to.

    def deliver(self, sample: Sample, frames: Frames, report: Callable[[Report], None]) -> None:
        # The stage tells of a sample that it admits, of the begin of each step, and of the decode.
        steps = self._parameters.steps
        assert len(self._marks) >= steps + 1
        self.ours += (end - start for start, end in itertools.pairwise(self._marks[-steps:]))
        self.all_equal = self.all_equal and self._expected is not None and np.array_equal(frames, self._expected)
        report(Report(job_id=sample.job_id, body=sample_body(sample), result={}))

    def release(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        """Nothing is open."""

    def _render_with_diffusers(self) -> None:
        marks: list[float] = []

        def after_step(*arguments: Any) -> dict[str, Any]:
            marks.append(self._meter())
            return {}

        values = self._parameters
        frames = call_diffusers(self._pipeline, self._photo, values, callback_on_step_end=after_step)[0]
        self._expected = np.stack([np.asarray(frame) for frame in frames])
        self.theirs += (end - start for start, end in itertools.pairwise(marks))


def measure(
    model: str, parameters: VideoParameters, num_pairs: int, *, with_unet: bool = True, count: str = "time"
) -> _Pairs:
    """Make `num_pairs` videos each way, after one pair that is not counted.

    Args:
        model: a folder.
        parameters: of all videos.
        num_pairs: how many.
        count: of METERS.
        with_unet: False stands a slice of its input in for what the UNet computes.
    """
    be_quiet()
    from diffusers import StableVideoDiffusionPipeline

    torch.set_num_threads(1)
    device = torch.device("cpu")
    photo = Image.effect_mandelbrot((parameters.width, parameters.height), (-2, -1, 1, 1), 90).convert("RGB")
    ours = SvdModel(model, Part.of_rank(0, 1), device, torch.float32)
    pipeline = StableVideoDiffusionPipeline.from_pretrained(model, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    if not with_unet:
        for unet in (pipeline.unet, ours.pipeline.unet):
            unet.forward = _no_unet
    with METERS[count][0]() as meter:
        pairs = _Pairs(pipeline, photo, parameters, num_pairs + 1, meter)
        build_stage(
            place=Place(rank=0, num_ranks=1, local_rank=0, local_num_ranks=1),
            links=Links(),
            model=ours,
            monitor=pairs,
            tracer=Tracer(0, on=False),
            source=pairs,
            sink=pairs,
            on_lost=exit_when_lost,
        ).run()
    del pairs.theirs[: parameters.steps - 1], pairs.ours[: parameters.steps - 1]
    return pairs


def _no_unet(sample: torch.Tensor, *arguments: Any, **named: Any) -> tuple[torch.Tensor]:
    return (sample[:, :, :4],)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m svdq.pipeline.bench.overhead", description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a StableVideoDiffusionPipeline")
    parser.add_argument("--shape", default="64x64x2", help="WIDTHxHEIGHTxFRAMES")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--without-unet", action="store_true")
    parser.add_argument("--count", choices=METERS, default="time")
    options = parser.parse_args(arguments)
    try:
        parameters = VideoParameters.of_shape(options.shape).model_copy(update={"steps": options.steps})
        pairs = measure(
            options.model, parameters, options.pairs, with_unet=not options.without_unet, count=options.count
        )
    except SvdqError as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    what = "processor time" if options.count == "time" else options.count
    print(f"{options.shape}, {options.steps} steps, {options.pairs} pairs, {what} of a step:")  # noqa: T201
    _, unit, scale = METERS[options.count]
    theirs, ours = (statistics.quantiles(steps, n=4) for steps in (pairs.theirs, pairs.ours))
    for name, index in (("lower quartile", 0), ("median", 1)):
        print(  # noqa: T201
            f"{name:>15}: diffusers {scale * theirs[index]:.6g} {unit}, svdq {scale * ours[index]:.6g} {unit}, "
            f"ratio {ours[index] / theirs[index]:.3f}"
        )
    print(f"frames: {'equal' if pairs.all_equal else 'DIFFERENT'}")  # noqa: T201
    return 0 if pairs.all_equal else 1


if __name__ == "__main__":
    sys.exit(main())

"""The parts of a model that are measured: the cases, and the row of each in the JSON."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from svdq.pipeline.models.families import family_for
from svdq.pipeline.models.family import Facts
from svdq.pipeline.video_parameters import VideoParameters

#: The parts to measure.
PARTS = ("step", "encode", "decode")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one row measures; fields have the names of the JSON."""

    #: One of PARTS.
    part: str
    #: The component that does the step; None: the model has only one.
    component: str | None = None
    #: The video's shape; sides in pixels.
    width: int
    height: int
    frames: int
    #: One of DTYPES.
    dtype: str
    #: What of the UNet or transformer is compiled, approximate or streamed: see ComputeOptions. Steps only.
    compiled: str = "off"
    approximate: tuple[str, ...] = ()
    offload: str = "off"
    #: Whether weights are made at load, or stay stored. Steps only.
    weights: str = "made"
    #: Whether guidance is on, or off: one prediction in place of two. Steps of Wan only.
    guidance: str = "on"
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
    #: Seconds in which the model was opened, in the first row that it was opened for.
    load_s: float = 0.0
    #: Bytes of the loaded weights.
    weight_bytes: int = 0
    #: Peak bytes of tensors on the GPU besides the weights, and bytes that PyTorch's allocator reserved for them; None
    #: on a CPU.
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    #: Largest and mean difference from the result of the first row of the same part, component and size, relative to
    #: the largest value there; None if there is no such row or a result is not finite.
    difference: float | None = None
    mean_difference: float | None = None
    #: Whether the result is finite: a worker fails the video otherwise.
    finite: bool = True

    @property
    def case(self) -> Case:
        """The case that this row measures."""
        return Case(**{each.name: getattr(self, each.name) for each in fields(Case)})

    def sentence(self) -> str:
        """Describe the row with its time, or with the reason why it has none."""
        words = [self.dtype, *[f"compiled {self.compiled}"] * (self.compiled != "off"), *self.approximate]
        words += ["streamed"] * (self.offload != "off") + ["weights stored"] * (self.weights == "stored")
        words += ["unguided"] * (self.guidance != "on")
        if self.decode_chunk_size is not None:
            words.append(f"{self.decode_chunk_size} frames at a time")
        part = f"{self.part} {self.component}" if self.component else self.part
        what = f"{part} at {self.width}x{self.height} ({' '.join(words)})"
        if self.failure:
            return f"{what} cannot be measured: {self.failure}"
        return f"{what}: {self.seconds:.4g} s" + ("" if self.finite else ", not finite")


def cases_of(
    parts: Collection[str],
    videos: Sequence[VideoParameters],
    components: Sequence[str | None],
    *,
    dtypes: Sequence[str],
    compiled: Sequence[str],
    approximate: Sequence[str],
    offload: Sequence[str] = (),
    weights: Sequence[str] = (),
    guidance: Sequence[str] = ("on",),
    chunk_sizes: Sequence[int],
) -> list[Case]:
    """List the cases, each once, ordered so that those with the same loaded model are adjacent.

    The videos have the defaults of the model; `components` are from `denoising_components`. Each value of `compiled`,
    `approximate`, `offload` and `weights` is measured alone.
    """
    ways: list[dict[str, Any]] = [{"compiled": what} for what in compiled]
    ways += [{"approximate": (what,)} for what in approximate]
    ways += [{"offload": what} for what in offload]
    ways += [{"weights": what} for what in weights]

    def chunks(frames: int) -> list[dict[str, Any]]:
        return [{"decode_chunk_size": size} for size in sorted(min(size, frames) for size in chunk_sizes)]

    found = [
        Case(
            part=part,
            component=component,
            dtype=dtype,
            width=video.width,
            height=video.height,
            frames=video.num_frames,
            guidance=guided,
            **way,
            **chunk,
        )
        for part in PARTS
        if part in parts
        for component in (components if part == "step" else [None])
        for dtype in dtypes
        for way in (ways if part == "step" else [{}])
        for video in videos
        for guided in (guidance if part == "step" else ["on"])
        for chunk in (chunks(video.num_frames) if part == "decode" else [{}])
    ]
    return list(dict.fromkeys(found))


def denoising_components(videos: Sequence[VideoParameters], facts: Facts) -> list[str | None]:
    """Return the components of a model that do steps of videos; a model that has only one gives None."""
    found = [segment.component for video in videos for segment in family_for(video).unit_costs(video, facts).segments]
    return list(dict.fromkeys(found)) if len(set(found)) > 1 else [None]

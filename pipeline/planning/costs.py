"""Running estimates of the costs of steps, encodes and decodes, per rank and shape of video. Pure code.

Costs are measured while real samples run. Disturbances (a page fault, another process) only make a measurement longer,
so an estimate is the lower quartile of the last measurements. Ranks with nearly equal speeds count as equal, since
shares that follow noise cost more than they gain.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import not_
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from svdq.pipeline.video_parameters import VideoParameters

WINDOW = 15  # number of measurements per estimate: enough to ignore outliers, few enough to follow a change
MAX_SHAPES = 32  # most shapes whose costs are published; a group rarely renders more
EQUAL_WITHIN = 0.05  # ranks whose step time is within this share of the typical one count as equally fast

Seconds = Annotated[float, Field(ge=0, le=1e9)]
OtherKind = Literal["encode", "decode", "upscale"]  # the parts of a video beside its steps


class Costs(BaseModel):
    """The costs of one video in seconds (or any other unit)."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore", allow_inf_nan=False)

    #: A denoising step of relative cost 1 on each rank; K values above 0.
    step_s: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    #: The other relative costs of steps (`Segment.costs`) of which some were measured, each with the measured one.
    relative: tuple[tuple[Seconds, Seconds], ...] = Field(default=(), exclude_if=not_)
    #: Encoding the photo, and decoding the frames, on a rank of typical speed.
    encode_s: Seconds = 0.0
    decode_s: Seconds = 0.0

    def refined(self, steps: Sequence[float]) -> Sequence[float]:
        """Return relative costs of steps as they were measured, and as they are given where none was."""
        measured = dict(self.relative)
        return [measured.get(cost, cost) for cost in steps] if measured else steps

    def scaled(self, *, step: float = 1.0, encode: float = 1.0, decode: float = 1.0) -> Self:
        """Return the costs with each part multiplied by a factor."""
        return self.model_copy(
            update={
                "step_s": tuple(step_s * step for step_s in self.step_s),
                "encode_s": self.encode_s * encode,
                "decode_s": self.decode_s * decode,
            }
        )


class Shape(NamedTuple):
    """The properties of a video that determine its costs."""

    frames: int  # number of frames
    width: int  # pixels
    height: int
    guided: bool  # whether classifier-free guidance is on
    upscale: str = ""  # `VideoParameters.upscale`

    @classmethod
    def of(cls, parameters: "VideoParameters") -> "Shape":
        """Return the shape of a video with these parameters."""
        return cls(
            frames=parameters.num_frames,
            width=parameters.width,
            height=parameters.height,
            guided=parameters.guided,
            upscale=parameters.upscale,
        )


Whole = Annotated[int, Field(ge=1, lt=2**63)]


class ShapeCosts(Costs):
    """The costs of the videos of one `Shape`, without upscaling, as measured by a group."""

    frames: Whole
    width: Whole
    height: Whole
    guided: bool


class UpscaleCosts(BaseModel):
    """The cost of upscaling the frames of a video, as measured by a group; one upscaler makes all sizes."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore", allow_inf_nan=False)

    #: Of the frames before.
    frames: Whole
    width: Whole
    height: Whole
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class CostPrior:
    """The assumed costs of a shape before anything is measured."""

    encode_steps: float  # encoding a photo, in steps
    decode_steps: float  # decoding the frames, in steps
    step_s: float = 1.0  # seconds of a step


class _Measured:
    """The last measurements of one shape in seconds, by rank."""

    def __init__(self) -> None:
        #: By relative cost.
        self.step_s: dict[float, dict[int, deque[float]]] = defaultdict(
            lambda: defaultdict(lambda: deque(maxlen=WINDOW))
        )
        #: By rank, of the rest.
        self.others_s = {kind: deque[tuple[int, float]](maxlen=WINDOW) for kind in get_args(OtherKind)}


class CostModel:
    """Running estimates of the costs of a group of ranks."""

    def __init__(self, num_ranks: int, prior: CostPrior) -> None:
        self._num_ranks = num_ranks
        self._prior = prior
        #: By shape without upscaling.
        self._measured: dict[Shape, _Measured] = defaultdict(_Measured)

    def record_step(self, shape: Shape, rank: int, seconds: float, cost: float = 1.0) -> None:
        """Add the duration of a step of some relative cost on a rank."""
        self._measured[shape._replace(upscale="")].step_s[cost][rank].append(seconds)

    def record(self, shape: Shape, rank: int, kind: OtherKind, seconds: float) -> None:
        """Add the duration of another part of a video on a rank."""
        self._measured[shape._replace(upscale="")].others_s[kind].append((rank, seconds))

    def is_measured(self, shape: Shape) -> bool:
        """Return whether all costs of a shape are measured."""
        measured = self._measured.get(shape._replace(upscale=""))
        if measured is None or not measured.step_s:
            return False
        return all(measured.others_s[kind] for kind in get_args(OtherKind) if kind != "upscale" or shape.upscale)

    def measured(self) -> list[ShapeCosts]:
        """Return the costs of the last shapes whose costs are all measured, in the order of their first measurement."""
        whole = [shape for shape in list(self._measured) if self.is_measured(shape)]
        return [ShapeCosts(**self.estimate(shape).model_dump(), **shape._asdict()) for shape in whole[-MAX_SHAPES:]]

    def upscales(self) -> list[UpscaleCosts]:
        """Return what was measured of upscaling the last shapes."""
        found = [
            UpscaleCosts(**shape._asdict(), seconds=_lower_quartile([seconds for _, seconds in times]))
            for shape, measured in list(self._measured.items())
            if (times := tuple(measured.others_s["upscale"]))
        ]
        return found[-MAX_SHAPES:]

    def estimate(self, shape: Shape) -> Costs:
        """Estimate the costs of a video; unmeasured ones follow from the other ranks, or else from the prior.

        Upscaling counts with the decode, and as nothing before it is measured.
        """
        measured = self._measured.get(shape._replace(upscale="")) or _Measured()
        prior = self._prior
        step_s, relative = self._steps(measured.step_s)
        typical_s = median(step_s)

        def other_s(kind: OtherKind, guess: float) -> float:
            times = [seconds * typical_s / step_s[rank] for rank, seconds in tuple(measured.others_s[kind])]
            return _lower_quartile(times) if times else guess * typical_s

        return Costs(
            step_s=step_s,
            relative=relative,
            encode_s=other_s("encode", prior.encode_steps),
            decode_s=other_s("decode", prior.decode_steps) + (other_s("upscale", 0.0) if shape.upscale else 0.0),
        )

    def _steps(
        self, measured: Mapping[float, Mapping[int, Sequence[float]]]
    ) -> tuple[tuple[float, ...], tuple[tuple[float, float], ...]]:
        """Estimate a step on each rank, and the other relative costs of steps.

        A rank that is not measured is assumed to be as fast as the others. A relative cost is measured where one rank
        has done steps of it and of cost 1; otherwise it would not be clear whether the rank or the steps are slow.
        """
        # Copies, since the thread that publishes the costs reads them while another adds some.
        quartiles = {
            cost: {rank: _lower_quartile(tuple(times)) for rank, times in list(ranks.items())}
            for cost, ranks in list(measured.items())
        }
        known, relative = quartiles.pop(1.0, {}), dict[float, float]()
        for cost, ranks in quartiles.items():
            ratios = [step_s / known[rank] for rank, step_s in ranks.items() if known.get(rank)]
            if ratios:
                relative[cost] = median(ratios)
        for cost, ranks in quartiles.items():
            for rank, step_s in ranks.items():
                if rank not in known and (ratio := relative.get(cost, cost)):
                    known[rank] = step_s / ratio
        # A measured zero would make a rank infinitely fast.
        typical_s = max(median(known.values()) if known else self._prior.step_s, 1e-9)
        estimated_s = tuple(
            max(1e-9, known[rank]) if rank in known and abs(known[rank] / typical_s - 1) >= EQUAL_WITHIN else typical_s
            for rank in range(self._num_ranks)
        )
        return estimated_s, tuple(relative.items())


def _lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile; of a single measurement that one."""
    # statistics.quantiles takes ten times as long, and rank 0 estimates each sample with one of these for each rank.
    ascending = sorted(times)
    below, part = divmod((len(ascending) - 1) / 4, 1)
    lower = ascending[int(below)]
    return lower + part * (ascending[int(below) + 1] - lower) if part else lower

"""Running estimates of the costs of steps, encodes and decodes, per rank and shape of video. Pure code.

Costs are measured while real samples run. Disturbances (a page fault, another process) only make a measurement longer,
so an estimate is the lower quartile of the last measurements. Ranks with nearly equal speeds count as equal, since
shares that follow noise cost more than they gain.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import not_
from statistics import mean, median
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

from svdq.pipeline.video_parameters import VideoParameters

WINDOW = 15  # number of measurements per estimate: enough to ignore outliers, few enough to follow a change
MAX_SHAPES = 32  # most shapes whose costs are published; a group rarely renders more
EQUAL_WITHIN = 0.05  # ranks whose step time is within this share of the typical one count as equally fast

Seconds = Annotated[float, Field(ge=0, le=1e9)]


class Costs(BaseModel):
    """The costs of one video in seconds (or any other unit)."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

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
    upscale: str = ""  # `VideoParameters.upscale`, which costs time after the decode and counts with it

    @classmethod
    def of(cls, parameters: VideoParameters) -> "Shape":
        """Return the shape of a video with these parameters."""
        return cls(
            frames=parameters.num_frames,
            width=parameters.width,
            height=parameters.height,
            guided=parameters.guided,
            upscale=parameters.upscale,
        )


class ShapeCosts(Costs):
    """The costs of the videos of one `Shape`, as measured by a group."""

    frames: Annotated[int, Field(ge=1, lt=2**63)]
    width: Annotated[int, Field(ge=1, lt=2**63)]
    height: Annotated[int, Field(ge=1, lt=2**63)]
    guided: bool
    upscale: str = Field(default="", exclude_if=not_)
    #: The mean relative cost of a step, by the `step_cache` of videos, where it is not 1.
    mean_steps: dict[str, Seconds] = Field(default={}, exclude_if=not_)


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
        self.ends_s = {kind: deque[tuple[int, float]](maxlen=WINDOW) for kind in ("encode", "decode")}


class CostModel:
    """Running estimates of the costs of a group of ranks."""

    def __init__(self, num_ranks: int, prior: CostPrior) -> None:
        self._num_ranks = num_ranks
        self._prior = prior
        self._measured: dict[Shape, _Measured] = defaultdict(_Measured)
        self._steps_of: dict[Shape, dict[str, Sequence[float]]] = defaultdict(dict)

    def admit(self, parameters: VideoParameters, steps: Sequence[float]) -> None:
        """Note the relative costs of the steps of a video."""
        if set(steps) != {1.0}:
            self._steps_of[Shape.of(parameters)][f"{getattr(parameters, 'step_cache', 0.0):g}"] = steps

    def record(self, shape: Shape, rank: int, kind: str, num_steps: int, seconds: float, *, cost: float = 1.0) -> None:
        """Add the duration of an `encode`, a `decode` or, together, of `num_steps` `steps` of one `cost` on a rank."""
        measured = self._measured[shape]
        if kind in measured.ends_s:
            measured.ends_s[kind].append((rank, seconds))
        elif num_steps:
            measured.step_s[cost][rank].append(seconds / num_steps)

    def is_measured(self, shape: Shape) -> bool:
        """Return whether all costs of a shape are measured."""
        measured = self._measured.get(shape)
        return measured is not None and bool(measured.step_s) and all(measured.ends_s.values())

    def measured(self) -> list[ShapeCosts]:
        """Return the costs of the last shapes of which all was measured, in the order of their first measurement."""
        whole = [shape for shape in list(self._measured) if self.is_measured(shape)]
        found = []
        for shape in whole[-MAX_SHAPES:]:
            costs, steps_of = self.estimate(shape), self._steps_of.get(shape, {})
            means = {key: mean(costs.refined(steps)) for key, steps in list(steps_of.items())}
            found.append(ShapeCosts(**costs.model_dump(), **shape._asdict(), mean_steps=means))
        return found

    def estimate(self, shape: Shape) -> Costs:
        """Estimate the costs of a video; unmeasured ones follow from the other ranks, or else from the prior."""
        measured = self._measured[shape] if shape in self._measured else _Measured()
        prior = self._prior
        step_s, relative = self._steps(measured.step_s)
        typical_s = median(step_s)

        def end_s(kind: str, guess: float) -> float:
            times = [seconds * typical_s / step_s[rank] for rank, seconds in tuple(measured.ends_s[kind])]
            return _lower_quartile(times) if times else guess * typical_s

        return Costs(
            step_s=step_s,
            relative=relative,
            encode_s=end_s("encode", prior.encode_steps),
            decode_s=end_s("decode", prior.decode_steps),
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

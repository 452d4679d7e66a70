"""Running estimates of the costs of steps, encodes and decodes, per rank and shape of video. Pure code.

Costs are measured while real samples run. Disturbances (a page fault, another process) only make a measurement longer,
so an estimate is the lower quartile of the last measurements. Ranks with nearly equal speeds count as equal, since
shares that follow noise cost more than they gain.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from svdq.pipeline.parameters import VideoParameters

#: Number of measurements per estimate: enough to ignore outliers, few enough to follow a change.
WINDOW = 15
#: Ranks whose step time is within this share of the typical one count as equally fast.
EQUAL_WITHIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of one sample in seconds (or any other unit)."""

    #: A denoising step on each rank; K values above 0.
    step_s: tuple[float, ...]
    #: Encoding the photo, on rank 0.
    encode_s: float = 0.0
    #: Decoding the frames, on a rank of typical speed.
    decode_s: float = 0.0
    #: Decoding them on each rank, if the ranks differ; K values or none.
    decode_each_s: tuple[float, ...] = ()

    def decode_on(self, rank: int) -> float:
        """Return the cost of decoding on a rank."""
        return self.decode_each_s[rank] if self.decode_each_s else self.decode_s


class Shape(NamedTuple):
    """The properties of a video that determine the cost of a step."""

    #: Number of frames.
    frames: int
    #: Pixels.
    width: int
    #: Pixels.
    height: int
    #: Whether classifier-free guidance is on.
    guided: bool

    @classmethod
    def of(cls, parameters: VideoParameters) -> "Shape":
        """Return the shape of a video with these parameters."""
        return cls(
            frames=parameters.num_frames, width=parameters.width, height=parameters.height, guided=parameters.guided
        )


@dataclass(frozen=True, kw_only=True)
class CostPrior:
    """What to assume of a shape before anything is measured."""

    #: Encoding a photo, in steps.
    encode_steps: float
    #: Decoding the frames, in steps.
    decode_steps: float
    #: Seconds of a step.
    step_s: float = 1.0


@dataclass
class _Measured:
    step_s: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=WINDOW)))
    encode_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    decode_s: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=WINDOW)))


class CostModel:
    """Running estimates of the costs of a group of ranks."""

    def __init__(self, num_ranks: int, prior: CostPrior) -> None:
        """Begin without measurements: with the prior."""
        self._num_ranks = num_ranks
        self._prior = prior
        self._measured: dict[Shape, _Measured] = defaultdict(_Measured)

    def record(self, shape: Shape, rank: int, kind: str, num_steps: int, seconds: float) -> None:
        """Add the duration of an `encode`, a `decode` or, together, of `num_steps` `steps` on a rank."""
        measured = self._measured[shape]
        if kind == "encode":
            measured.encode_s.append(seconds)
        elif kind == "decode":
            measured.decode_s[rank].append(seconds)
        elif num_steps:
            measured.step_s[rank].append(seconds / num_steps)

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of which encode, steps and decode were measured, in the order of their first measurement."""
        return [shape for shape, one in list(self._measured.items()) if one.encode_s and one.step_s and one.decode_s]

    def estimate(self, shape: Shape) -> Costs:
        """Estimate the costs of a sample; what is not measured follows from the other ranks, or else from the prior."""
        measured = self._measured[shape] if shape in self._measured else _Measured()
        step_s = self._each(measured.step_s, self._prior.step_s)
        typical_s = median(step_s)
        decode_s = self._each(measured.decode_s, self._prior.decode_steps * typical_s)
        encode_s = _lower_quartile(measured.encode_s) if measured.encode_s else self._prior.encode_steps * typical_s
        return Costs(step_s=step_s, encode_s=encode_s, decode_s=median(decode_s), decode_each_s=decode_s)

    def _each(self, measured: Mapping[int, Sequence[float]], guess_s: float) -> tuple[float, ...]:
        """Estimate a time on each rank; one that is not measured is assumed to be as fast as the others."""
        # A copy, since the thread that publishes the costs reads them while the stage loop adds some.
        known = {rank: _lower_quartile(times) for rank, times in list(measured.items())}
        # A measured zero would make a rank infinitely fast.
        typical_s = max(median(known.values()) if known else guess_s, 1e-9)
        return tuple(
            max(1e-9, known[rank]) if rank in known and abs(known[rank] / typical_s - 1) >= EQUAL_WITHIN else typical_s
            for rank in range(self._num_ranks)
        )


def _lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile; of a single measurement that one."""
    # statistics.quantiles takes ten times as long, and rank 0 estimates each sample with two of these for each rank.
    ascending = sorted(times)
    below, part = divmod((len(ascending) - 1) / 4, 1)
    lower = ascending[int(below)]
    return lower + part * (ascending[int(below) + 1] - lower) if part else lower

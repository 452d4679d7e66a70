"""Running estimates of the costs of steps, encodes and decodes, per rank and shape of video. Pure code.

Costs are measured while real samples run. Disturbances (a page fault, another process) only make a measurement longer,
so an estimate is the lower quartile of the last measurements. Ranks with nearly equal speeds count as equal, since
shares that follow noise cost more than they gain.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.partition import Costs

#: Number of measurements per estimate: enough to ignore outliers, few enough to follow a change.
WINDOW = 15
#: Ranks whose step time is within this share of the typical one count as equally fast.
EQUAL_WITHIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Shape:
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
    """What to assume of a shape before anything is measured, in units of one step."""

    #: Encoding a photo, in steps.
    encode_steps: float
    #: Decoding the frames, in steps.
    decode_steps: float


@dataclass
class _Measured:
    step_s: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=WINDOW)))
    encode_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    decode_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))


class CostModel:
    """Running estimates of the costs of a group of ranks."""

    def __init__(self, num_ranks: int, prior: CostPrior) -> None:
        """Begin without measurements.

        Args:
            num_ranks: K.
            prior: of encode and decode, until they are measured.
        """
        self._num_ranks = num_ranks
        self._prior = prior
        self._measured: dict[Shape, _Measured] = defaultdict(_Measured)

    def record(
        self,
        shape: Shape,
        stages: Sequence[tuple[int, int, float]],
        seconds: Mapping[str, float],
    ) -> None:
        """Add the measurements of one finished sample.

        Args:
            shape: shape of the sample.
            stages: (rank, number of steps, seconds of denoising) of each rank that did steps.
            seconds: seconds of `encode` and `decode`, if measured.
        """
        measured = self._measured[shape]
        for rank, num_steps, denoise_s in stages:
            if num_steps and 0 <= rank < self._num_ranks:
                measured.step_s[rank].append(denoise_s / num_steps)
        if "encode" in seconds:
            measured.encode_s.append(seconds["encode"])
        if "decode" in seconds:
            measured.decode_s.append(seconds["decode"])

    @property
    def shapes(self) -> list[Shape]:
        """The measured shapes, in the order of their first measurement."""
        return list(self._measured)

    def estimate(self, shape: Shape) -> Costs:
        """Estimate the costs of a sample, in units of one step while nothing of its shape is measured."""
        measured = self._measured[shape] if shape in self._measured else _Measured()
        known = {rank: _undisturbed(times) for rank, times in measured.step_s.items()}
        # A rank without measured steps of this shape (it only decodes, say) is assumed to be as fast as the others.
        typical = max(median(known.values()), 1e-9) if known else 1.0
        known = {
            rank: typical if abs(step_s / typical - 1) < EQUAL_WITHIN else step_s for rank, step_s in known.items()
        }
        return Costs(
            # A measured zero would make a rank infinitely fast.
            step_s=tuple(max(known.get(rank, typical), 1e-9) for rank in range(self._num_ranks)),
            encode_s=_undisturbed(measured.encode_s) if measured.encode_s else self._prior.encode_steps * typical,
            decode_s=_undisturbed(measured.decode_s) if measured.decode_s else self._prior.decode_steps * typical,
        )


def _undisturbed(times: Sequence[float]) -> float:
    """Return the lower quartile; of a single measurement that one."""
    return times[0] if len(times) == 1 else quantiles(times, n=4, method="inclusive")[0]

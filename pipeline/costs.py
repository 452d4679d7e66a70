"""Running estimates of what steps, encodes and decodes cost, per rank and per shape of video. Pure, no clock.

Measured while real samples run: nothing is benchmarked ahead. What disturbs a measurement (a page fault, another
process) only ever makes it longer, so an estimate is the lower quartile of the last measurements; and ranks whose
speeds are nearly equal count as equal, since shares that follow noise cost more than they gain.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.partition import Costs

#: Measurements that an estimate is made from: enough to shrug off outliers, few enough to follow a change.
WINDOW = 15
#: Ranks whose step time is within this share of the typical one count as equally fast.
EQUAL_WITHIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides the cost of a step: the size of the tensors and whether guidance doubles the batch."""

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
        """Take the shape of a video from its parameters."""
        return cls(
            frames=parameters.num_frames, width=parameters.width, height=parameters.height, guided=parameters.guided
        )


@dataclass(frozen=True, kw_only=True)
class Guess:
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


class CostBook:
    """What is known of the costs of a group of ranks."""

    def __init__(self, num_ranks: int, guess: Guess) -> None:
        """Know nothing yet.

        Args:
            num_ranks: K.
            guess: of encode and decode, until they are measured.
        """
        self._num_ranks = num_ranks
        self._guess = guess
        self._measured: dict[Shape, _Measured] = defaultdict(_Measured)

    def record(
        self,
        shape: Shape,
        stages: Sequence[tuple[int, int, float]],
        seconds: Mapping[str, float],
    ) -> None:
        """Add what one finished sample measured.

        Args:
            shape: the sample's.
            stages: (rank, number of steps, seconds of denoising) of each rank that did steps.
            seconds: those of `encode` and `decode`, where they were measured.
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
        """The shapes of which something is measured, those that were measured first first."""
        return list(self._measured)

    def estimate(self, shape: Shape) -> Costs:
        """Estimate the costs of a sample; in units of one step as long as nothing of its shape is measured."""
        measured = self._measured[shape] if shape in self._measured else _Measured()
        known = {rank: _undisturbed(times) for rank, times in measured.step_s.items()}
        # A rank that has no steps of this shape yet (it only decodes, say) is taken to be as fast as the others.
        typical = max(median(known.values()), 1e-9) if known else 1.0
        known = {
            rank: typical if abs(step_s / typical - 1) < EQUAL_WITHIN else step_s for rank, step_s in known.items()
        }
        return Costs(
            # A measured zero would make a rank infinitely fast.
            step_s=tuple(max(known.get(rank, typical), 1e-9) for rank in range(self._num_ranks)),
            encode_s=_undisturbed(measured.encode_s) if measured.encode_s else self._guess.encode_steps * typical,
            decode_s=_undisturbed(measured.decode_s) if measured.decode_s else self._guess.decode_steps * typical,
        )


def _undisturbed(times: Sequence[float]) -> float:
    """Take the lower quartile; of a single measurement that one."""
    return times[0] if len(times) == 1 else quantiles(times, n=4, method="inclusive")[0]

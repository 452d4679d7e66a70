"""A discrete-event simulation of a chain of ranks that follows a planner's assignments."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from svdq.pipeline.planning.blocks import Row
from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.planning.planner import Planner


@dataclass(kw_only=True)
class Video:
    """A job, and in the end what became of it."""

    costs: Costs
    num_steps: int
    steps: Sequence[float] = ()  # relative costs of its steps; none: 1 each
    bounds: Sequence[tuple[int, int]] | None = None  # the units that each rank may do; None: all
    first_unit: int = 0  # the unit from which it resumes
    queued_s: float = 0.0
    taken_s: float = inf
    begun_s: float = inf
    finished_s: float = inf
    boundaries: tuple[int, ...] | None = None
    unit: int = 0  # the next unit

    def row(self, costs: Costs) -> Row:
        """Return its row of units at these costs."""
        return Row.of(costs, self.steps or [1.0] * self.num_steps)


@dataclass
class _Rank:
    arrived: list[tuple[int, Video]] = field(default_factory=list)
    is_busy: bool = False
    busy_s: float = 0.0


class Chain:
    """Ranks that work on the arrived video of the lowest index; rank 0 admits videos beside its work."""

    def __init__(
        self,
        planner: Planner,
        num_ranks: int,
        *,
        estimate: Callable[[Video], Costs] = lambda video: video.costs,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Begin with idle ranks.

        Args:
            planner: of that many ranks.
            num_ranks: K.
            estimate: what the planner takes a video's costs to be.
            noise: by what factor the next piece of work takes longer.
        """
        self.most_in_flight = 0
        self.ranks = [_Rank() for _ in range(num_ranks)]
        self._planner = planner
        self._estimate = estimate
        self._noise = noise
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._waiting: list[Video] = []
        self._in_flight: set[int] = set()
        self._num_taken = 0
        #: The intake takes no more.
        self._max_in_flight = 3 * num_ranks + 4

    def run(self, videos: Sequence[Video]) -> float:
        """Make all videos; return the seconds until the last is finished."""
        for video in videos:
            self._after(video.queued_s, lambda video=video: self._waiting.append(video))
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            if not self._events or self._events[0][0] > self._now:
                self._admit()
        assert not self._waiting, "a video is never taken"
        assert not self._in_flight, "a video is never finished"
        return self._now

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), happen))

    def _admit(self) -> None:
        """Admit the videos that ranks can start soon."""
        while self._waiting and len(self._in_flight) < self._max_in_flight:
            if (wait_s := self._planner.wait_s(self._now)) > 1e-9:
                self._after(wait_s, lambda: None)
                return
            video = self._waiting.pop(0)
            index, self._num_taken = self._num_taken, self._num_taken + 1
            video.taken_s, video.unit = self._now, video.first_unit
            video.boundaries = self._planner.admit(
                index,
                video.row(self._estimate(video)),
                shape=(id(video.costs), video.num_steps, *video.steps),
                num_waiting=len(self._waiting),
                now=self._now,
                first_unit=video.first_unit,
                bounds=video.bounds,
            )
            self._in_flight.add(index)
            self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
            self._pass_on(-1, index, video)

    def _pass_on(self, number: int, index: int, video: Video) -> None:
        """Bring a video to the next rank with work on it; ranks with nothing to do pass it on at once."""
        assert video.boundaries is not None
        ends = video.boundaries[1:]
        following = next((rank for rank in range(number + 1, len(ends)) if video.unit < ends[rank]), None)
        if following is None:
            video.finished_s = self._now
            self._in_flight.remove(index)
            return
        heapq.heappush(self.ranks[following].arrived, (index, video))
        self._begin(following)

    def _begin(self, number: int) -> None:
        """Begin the arrived video of the lowest index on a rank that is not busy."""
        rank = self.ranks[number]
        if rank.is_busy or not rank.arrived:
            return
        index, video = heapq.heappop(rank.arrived)
        video.begun_s = min(video.begun_s, self._now)
        rank.is_busy = True
        row = video.row(video.costs)
        assert video.unit in row.cuts(0), "a skipped step needs what the step before left on its rank"
        following = (*row.cuts(video.unit + 1), row.num_units)[0]
        seconds = row.seconds(number, video.unit, following) * self._noise()
        rank.busy_s += seconds

        def end() -> None:
            rank.is_busy = False
            video.unit = following
            assert video.boundaries is not None
            if video.unit < video.boundaries[number + 1]:
                heapq.heappush(rank.arrived, (index, video))
            leaves = video.unit == video.boundaries[number + 1] or rank.arrived[0][0] != index
            # A rank reports an encode, successive steps, and a decode.
            if leaves or video.unit in (1, video.num_steps + 1):
                self._planner.finished(index, number, video.unit, self._now)
            if video.unit == video.boundaries[number + 1]:
                self._pass_on(number, index, video)
            self._begin(number)

        self._after(seconds, end)

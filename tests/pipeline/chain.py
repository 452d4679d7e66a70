"""A discrete-event simulation of a chain of ranks that follows a planner's assignments."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.planning.planner import Assignment, Planner


@dataclass(kw_only=True)
class Video:
    """A job, and in the end what became of it."""

    costs: Costs
    num_steps: int
    #: The steps that each rank may do; None: all.
    bounds: Sequence[tuple[int, int]] | None = None
    #: Where it resumes; None: from its photo.
    resumes_at: int | None = None
    queued_s: float = 0.0
    taken_s: float = inf
    begun_s: float = inf
    finished_s: float = inf
    assignment: Assignment | None = None


@dataclass(kw_only=True)
class _Work:
    index: int
    video: Video
    num_steps: int
    decodes: bool


@dataclass
class _Rank:
    arrived: list[tuple[int, Video]] = field(default_factory=list)
    work: _Work | None = None
    is_busy: bool = False
    busy_s: float = 0.0


class Chain:
    """Ranks that work on the arrived sample of the lowest index; rank 0 takes videos between two steps."""

    def __init__(
        self,
        planner: Planner,
        num_ranks: int,
        decoders: Sequence[int] | None = None,
        *,
        estimate: Callable[[Video], Costs] = lambda video: video.costs,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Begin with idle ranks.

        Args:
            planner: of that many ranks.
            num_ranks: K.
            decoders: the ranks that can decode; None: all.
            estimate: what the planner takes a video's costs to be.
            noise: by what factor the next piece of work takes longer.
        """
        self.most_in_flight = 0
        self.ranks = [_Rank() for _ in range(num_ranks)]
        self._planner = planner
        self._decoders = decoders or range(num_ranks)
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
                self._go_on(0)
        assert not self._waiting, "a video is never taken"
        assert not self._in_flight, "a video is never finished"
        return self._now

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), happen))

    def _take(self) -> bool:
        """Take the next video if rank 0 is idle or another rank wants it; return whether rank 0 is busy with it."""
        rank = self.ranks[0]
        work = rank.work
        while self._waiting and len(self._in_flight) < self._max_in_flight:
            is_idle = work is None and not rank.arrived
            decodes = work is not None and not work.num_steps
            if not is_idle and self._planner.wait_for_others_s(self._now, decodes=decodes) > 1e-9:
                return False
            if is_idle and (wait_s := self._planner.wait_for_room_s(self._now)) > 1e-9:
                self._after(wait_s, lambda: self._go_on(0))
                return False
            video = self._waiting.pop(0)
            index, self._num_taken = self._num_taken, self._num_taken + 1
            video.taken_s = self._now
            video.assignment = self._planner.admit(
                index,
                video.resumes_at or 0,
                video.num_steps,
                self._estimate(video),
                self._decoders,
                shape=id(video.costs),
                encoded=video.resumes_at is not None,
                num_waiting=len(self._waiting),
                now=self._now,
                bounds=video.bounds,
            )
            self._in_flight.add(index)
            self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
            if video.resumes_at is None:
                self._spend(0, video.costs.encode_s, partial(self._encoded, index, video))
                return True
            self._arrive(video.assignment.first_rank, index, video)
            if rank.is_busy:
                return True
        return False

    def _arrive(self, number: int, index: int, video: Video) -> None:
        heapq.heappush(self.ranks[number].arrived, (index, video))
        self._go_on(number)

    def _go_on(self, number: int) -> None:
        """Do the next thing on a rank that is not busy."""
        rank = self.ranks[number]
        if rank.is_busy:
            return
        if number == 0 and self._take():
            return
        if rank.work is None and rank.arrived:
            rank.work = self._begin(number, *heapq.heappop(rank.arrived))
        if (work := rank.work) is None:
            return
        costs = work.video.costs
        if work.num_steps:
            # Photos are encoded on rank 0 between two steps.
            num_steps = 1 if number == 0 else work.num_steps
            work.num_steps -= num_steps
            self._spend(number, num_steps * costs.step_s[number], lambda: self._stepped(number, work))
        else:
            assert work.decodes
            self._spend(number, costs.decode_s * costs.slowness(number), lambda: self._decoded(number, work))

    def _begin(self, number: int, index: int, video: Video) -> _Work:
        assert video.assignment is not None
        video.begun_s = min(video.begun_s, self._now)
        boundaries = video.assignment.boundaries
        return _Work(
            index=index,
            video=video,
            num_steps=boundaries[number + 1] - boundaries[number],
            decodes=video.assignment.decoder == number,
        )

    def _encoded(self, index: int, video: Video) -> None:
        assert video.assignment is not None
        self._planner.finished(index, 0, "encode", self._now)
        self._arrive(video.assignment.first_rank, index, video)

    def _stepped(self, number: int, work: _Work) -> None:
        if work.num_steps:
            return
        self._planner.finished(work.index, number, "steps", self._now)
        if not work.decodes:
            self.ranks[number].work = None
            assert work.video.assignment is not None
            boundaries, decoder = work.video.assignment.boundaries, work.video.assignment.decoder
            # Ranks with nothing to do pass it on at once.
            later = range(number + 1, len(self.ranks))
            following = next(rank for rank in later if boundaries[rank] < boundaries[rank + 1] or rank == decoder)
            self._arrive(following, work.index, work.video)

    def _decoded(self, number: int, work: _Work) -> None:
        self.ranks[number].work = None
        work.video.finished_s = self._now
        self._in_flight.remove(work.index)
        self._planner.finished(work.index, number, "decode", self._now)

    def _spend(self, number: int, seconds: float, then: Callable[[], None]) -> None:
        rank = self.ranks[number]
        seconds *= self._noise()
        rank.is_busy = True
        rank.busy_s += seconds

        def end() -> None:
            rank.is_busy = False
            then()
            self._go_on(number)

        self._after(seconds, end)

"""In which order a rank that holds one set of components at a time does the units of many videos. Pure code.

A round is some videos: they are encoded, then the steps of the first expert are done for all of them, then the steps of
the second, and then they are decoded. So each set is loaded once a round, not once a video. A round has so many videos
that loading takes a small share of its time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from svdq.pipeline.planning.binding import Segment
from svdq.pipeline.planning.costs import Seconds

#: The sets of components besides the denoising ones, which have the name of their component.
TEXT_ENCODER, ENCODERS, DECODER = "text encoder", "encoders", "decoder"
REST = "rest of the model"  # outside of rounds, what is there between embeds and encodes
LOAD_SHARE = 0.05  # the largest share of a round's work that loading may take
ROUND_S = 60.0  # least seconds of work of a round, if so many videos wait: short videos end soon anyway
#: Videos of a round, at most; and of a round that begins before costs are measured, so that the first result is soon.
MOST_VIDEOS, FIRST_VIDEOS = 64, 2
GATHER_S = 2.0  # seconds in which the next video of a round must arrive while more wait in the queue


class Leg(NamedTuple):
    """Successive units of a video that need the same set of components."""

    components: str
    #: The first unit, and the one after the last; both 0 where prompts are encoded, which is not a unit.
    start: int
    stop: int


def legs_of(segments: Sequence[Segment], first_unit: int, *, has_text: bool) -> list[Leg]:
    """Divide what is left of a video, from `first_unit` on, by sets of components; `has_text`: first its prompts."""
    stops = {ENCODERS: 1} | {each.component: each.stop + 1 for each in segments} | {DECODER: segments[-1].stop + 2}
    legs = [Leg(TEXT_ENCODER, 0, 0)] if has_text else []
    for components, stop in stops.items():
        if stop > first_unit:
            legs.append(Leg(components, first_unit, stop))
            first_unit = stop
    return legs


@dataclass(kw_only=True)
class _Member:
    """A video that is not finished."""

    round: int
    legs: list[Leg]  # what is left of it, the next leg first
    is_ahead: bool  # whether it continues from a checkpoint behind its first step
    priority: int  # the lowest comes first


class Outlook(BaseModel):
    """The videos and loads before a video of a round."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore", allow_inf_nan=False)

    #: The set that it needs next, and the number of videos before it there.
    components: str
    num_before: int = Field(ge=0, lt=2**63)
    eta_s: Seconds | None  # estimated until it is decoded; None before costs are measured

    def __str__(self) -> str:
        return f"{self.components}, " + (f"{self.num_before} before it" if self.num_before else "next")


class Rounds:
    """Chooses which videos a rank takes, and whose leg it does next."""

    def __init__(self, sets: Sequence[str], most_bytes: float = math.inf, num_groups: int = 1) -> None:
        """Begin with nothing loaded.

        `sets` are in the order of units, `most_bytes` limits all waiting states, `num_groups` share the queue.
        """
        self._num_groups = num_groups
        self._order = {components: place for place, components in enumerate(sets)}
        self._most_bytes = most_bytes
        #: The set that is loaded, and the seconds that each took to load the last time.
        self.held: str | None = None
        self.load_s: dict[str, float] = {}
        #: The seconds of work of a video like the last one; None: not measured yet.
        self.video_s: float | None = None
        #: The bytes of the largest state.
        self.state_bytes = 0
        self._members: dict[int, _Member] = {}  # by priority, then by index
        #: The round that takes videos, whether it still does, and how many it has that did not resume.
        self._round, self._is_open, self._num_new = 0, True, 0
        #: Its share of the jobs that waited at its beginning, so that no group takes what others could begin.
        self._share = MOST_VIDEOS
        #: Whether more jobs waited behind the last one, and when that was taken.
        self._more_wait, self._taken_at = False, 0.0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def size(self) -> int:
        """The number of videos of a round."""
        if self.video_s is None:
            return FIRST_VIDEOS
        work_s = max(sum(self.load_s.values()) / LOAD_SHARE, ROUND_S)
        return min(max(1, math.ceil(work_s / max(self.video_s, 1e-9))), MOST_VIDEOS)

    def wants_more(self) -> bool:
        """Return whether the next video should be taken."""
        if not self._members:
            if not self._is_open:
                self._open_next()
            return True
        num_videos = sum(member.round == self._round for member in self._members.values())
        has_room = num_videos < MOST_VIDEOS and len(self._members) * self.state_bytes < self._most_bytes
        return self._is_open and self._num_new < (min(self.size, self._share) if self._num_new else 1) and has_room

    def admit(self, index: int, legs: Sequence[Leg], *, num_waiting: int, now: float, priority: int = 0) -> None:
        """Add a video to the round that takes videos, or else to the next one; `num_waiting` wait after it."""
        if not self._is_open and not self._members:
            self._open_next()
        start = legs[0].start
        if not self._num_new and self._num_groups > 1:
            self._share = math.ceil((num_waiting + 1) / self._num_groups)
        number = self._round if self._is_open else self._round + 1
        self._members[index] = _Member(round=number, legs=[*legs], is_ahead=start > 1, priority=priority)
        self._members = dict(sorted(self._members.items(), key=lambda each: (each[1].priority, each[0])))
        self._num_new += start == 0
        self._more_wait, self._taken_at = num_waiting > 0, now

    def loaded(self, components: str, seconds: float, now: float) -> None:
        """Learn that a set is loaded now."""
        self.held, self.load_s[components] = components, seconds
        self._taken_at = now  # while the device is busy, no prompt is encoded, and no video is taken

    @property
    def pace_s(self) -> float | None:
        """Seconds from one video to the next, in the long run; None: not measured yet."""
        return None if self.video_s is None else self.video_s + sum(self.load_s.values()) / self.size

    def close(self) -> None:
        """Expect no more videos."""
        self._more_wait = False

    def num_for(self, components: str) -> int:
        """Return how many videos need a set next."""
        return sum(member.legs[0].components == components for member in list(self._members.values()))

    def leg(self, index: int) -> Leg:
        """Return the next leg of a video."""
        return self._members[index].legs[0]

    def advance(self, index: int) -> None:
        """Learn that the leg of a video is done."""
        member = self._members[index]
        del member.legs[0]
        if not member.legs:
            self.end(index)

    def end(self, index: int) -> None:
        """Forget a video."""
        self._members.pop(index, None)

    def choose(self, now: float) -> int | None:
        """Return the video whose leg comes next; None: wait for one more, at most `GATHER_S`.

        While videos need the set that is loaded, they come first. Then, videos that continue from a checkpoint are
        brought to their end, the furthest first, and the others go on together.
        """
        first = min((member.round for member in self._members.values()), default=0)
        waiting = {index: member for index, member in self._members.items() if member.round == first}
        if not waiting:
            return None
        places = {index: self._order[member.legs[0].components] for index, member in waiting.items()}
        held = self._order.get(self.held or "", -1)
        if held in places.values():
            return next(index for index, place in places.items() if place == held)
        ahead = [places[index] for index, member in waiting.items() if member.is_ahead]
        place = max(ahead) if ahead else min(places.values())
        encoders = self._order[ENCODERS]
        if self._is_gathering(now) and (place > encoders or held == self._order.get(TEXT_ENCODER) != place):
            return None
        if place > encoders and not ahead and first == self._round:
            self._is_open = False
            if place == self._order[DECODER]:
                # Jobs are taken and photos prepared while this round is decoded.
                self._open_next()
        return next(index for index, its_place in places.items() if its_place == place)

    def _open_next(self) -> None:
        self._round, self._is_open = self._round + 1, True
        # One may have been waited for when the last round began.
        self._num_new = sum(member.round == self._round for member in self._members.values())

    def _is_gathering(self, now: float) -> bool:
        return self._more_wait and self.wants_more() and now - self._taken_at < GATHER_S

    def outlook(self, seconds: Callable[[int, Leg], float]) -> dict[int, Outlook]:
        """Forecast the rest of all videos, whose legs take so many `seconds`."""
        found: dict[int, Outlook] = {}
        at_s, held = 0.0, self.held
        for number in sorted({member.round for member in self._members.values()}):
            members = {index: member for index, member in self._members.items() if member.round == number}
            for components in self._order:
                legs = {
                    index: leg
                    for index, member in members.items()
                    for leg in member.legs
                    if leg.components == components
                }
                if legs and components != held:
                    at_s, held = at_s + self.load_s.get(components, 0.0), components
                for place, (index, leg) in enumerate(legs.items()):
                    at_s += seconds(index, leg)
                    first = found.get(index) or Outlook(components=components, num_before=place, eta_s=None)
                    found[index] = first.model_copy(update={"eta_s": at_s})
        return found

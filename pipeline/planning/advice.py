"""Says which resource limits a measured run, and what would change that. Pure code."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from svdq.pipeline.planning.capacity import changes
from svdq.pipeline.planning.recordings import Profile

#: Smallest gain that is worth a change.
WORTH = 0.05
#: Smallest gain that is mentioned.
_ANYTHING = 1.01


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change and its gain."""

    #: The problem or improvement, and what to do, in whole sentences.
    text: str
    #: Factor by which the number of videos per hour grows.
    factor: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advice about a profile."""

    #: Where the time goes.
    time: str
    #: The one change that would help most, with its gain; then others.
    best: Remedy
    others: tuple[Remedy, ...]


def advise(profile: Profile) -> Advice:
    """Derive advice from a profile.

    Waste comes first, with the largest one as the best change. Cheaper steps and more GPUs help only if almost nothing
    is wasted.
    """
    wasted = sorted(
        (remedy for remedy in _wastes(profile) if remedy.factor >= 1 + WORTH), key=lambda remedy: -remedy.factor
    )
    bought = [
        Remedy(text=f"{change.what}.", factor=change.factor)
        for change in changes(profile.video, len(profile.busy), 1)
        if change.factor >= _ANYTHING
    ]
    best, *others = [*wasted, *bought]
    return Advice(time=_where(profile), best=best, others=tuple(others))


def _where(profile: Profile) -> str:
    idle = {
        "for want of jobs": profile.no_jobs,
        "because videos waited to be written": profile.writing,
        "for other reasons": 1 - profile.mean_busy - profile.no_jobs - profile.writing,
    }
    text = f"The ranks were busy {profile.mean_busy:.0%} of the time"
    if len(profile.busy) > 1:
        text += f" ({min(profile.busy):.0%} to {max(profile.busy):.0%})"
    reasons = [f"{share:.0%} {why}" for why, share in idle.items() if share >= 0.01]
    return f"{text}, and idle {', '.join(reasons)}." if reasons else f"{text}."


def _wastes(profile: Profile) -> Iterator[Remedy]:
    """Yield remedies for what is wasted, each with its gain."""
    video, num_ranks = profile.video, len(profile.busy)
    yield Remedy(
        text=f"Keep the queue full: ranks were idle {profile.no_jobs:.0%} of the time because fewer videos were in "
        "flight than there are ranks. No GPU and no faster model helps while there is nothing to do.",
        factor=_without(profile.no_jobs),
    )
    yield Remedy(
        text=f"Make writing faster: ranks were idle {profile.writing:.0%} of the time because videos waited to be "
        "written. Write to a local folder, or in fewer formats.",
        factor=_without(profile.writing),
    )
    if num_ranks > video.largest_useful:
        yield Remedy(
            text=f"Use smaller groups (svdq worker --groups 2): rank 0 does nothing but encode, and more than "
            f"{video.largest_useful} ranks wait for it.",
            factor=video.costs.encode_s / (video.video_s(num_ranks) / num_ranks),
        )
    if video.segments is not None and num_ranks > 1:
        first, second = video.division(num_ranks)
        yield Remedy(
            text=f"Let a rank hold both experts, or use another number of ranks: the {video.segments[0]} steps of the "
            f"first expert on {first} ranks and the {video.segments[1]} of the second on {second} are uneven, and some "
            "ranks wait for the others.",
            factor=video.pace_s(num_ranks) / max(video.video_s(num_ranks) / num_ranks, video.costs.encode_s),
        )
    typical_s = median(video.costs.step_s)
    slow = [rank for rank, step_s in enumerate(video.costs.step_s) if step_s > typical_s * (1 + WORTH)]
    if slow and num_ranks > 1:
        slowest = max(video.costs.step_s) / typical_s
        typical_video_s = video.steps * typical_s + video.costs.encode_s + video.costs.decode_s
        yield Remedy(
            text=f"Check the GPU of rank {', '.join(map(str, slow))}: its steps take up to {slowest:.2f} times as "
            "long as those of the others (heat, a power limit, another process, an older card).",
            factor=video.video_s(num_ranks) / typical_video_s,
        )


def _without(share: float) -> float:
    return 1 / max(1 - share, 1e-3)

"""Turns a profile into advice: where the time goes, which ranks idle and why, and what would help most. Pure code."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean, median

from svdq.pipeline.planning.capacity import Limit, VideoCosts, limit
from svdq.pipeline.planning.occupancy import Cause, RankTime
from svdq.pipeline.planning.plan import changes
from svdq.pipeline.planning.recordings import Profile

#: Smallest gain that is worth a change.
WORTH = 0.05
#: Smallest gain that is mentioned.
_ANYTHING = 1.01
#: Ranks that idle less than this count as busy.
_IDLE = 0.05

_BECAUSE = {
    Cause.FILLING: "the first video was still on its way",
    Cause.DRAINING: "the last video had gone on",
    Cause.JOBS: "there was no job to do",
    Cause.TRANSFER: "a video was being handed over",
    Cause.BEFORE: "the rank before was still at work",
    Cause.AFTER: "the rank after had no room",
    Cause.WRITING: "videos waited to be written",
    Cause.UNKNOWN: "of hand-overs, and of shares that are still settling",
}


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
    #: Which ranks idle and why, a sentence for each kind.
    idle: tuple[str, ...]
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
    bought = _purchases(profile)
    best, *others = [*wasted, *bought]
    return Advice(time=_where(profile), idle=tuple(_idling(profile)), best=best, others=tuple(others))


def _where(profile: Profile) -> str:
    ranks = profile.ranks
    causes = {
        "compute steps": fmean(rank.steps for rank in ranks),
        "encode": fmean(rank.encode for rank in ranks),
        "decode": fmean(rank.decode for rank in ranks),
        "warm up": fmean(rank.warm_up for rank in ranks),
        "fill and drain the pipeline": fmean(rank.waited(Cause.FILLING, Cause.DRAINING) for rank in ranks),
        "wait for jobs": fmean(rank.waited(Cause.JOBS) for rank in ranks),
        "hand videos over": fmean(rank.waited(Cause.TRANSFER) for rank in ranks),
        "wait for one another": fmean(rank.waited(Cause.BEFORE, Cause.AFTER) for rank in ranks),
        "wait for videos to be written": fmean(rank.waited(Cause.WRITING) for rank in ranks),
        "idle": fmean(rank.waited(Cause.UNKNOWN) for rank in ranks),
    }
    parts = [f"{share:.1%} to {what}" for what, share in causes.items() if share >= 0.001]
    return f"Of the time of all ranks {', '.join(parts)}."


def _idling(profile: Profile) -> Iterator[str]:
    """Describe why each rank that idles noticeably mostly does so; ranks with the same reason share a sentence."""
    by_reason: dict[str, list[tuple[int, RankTime]]] = {}
    for number, rank in enumerate(profile.ranks):
        if rank.waits and 1 - rank.busy - rank.warm_up >= _IDLE:
            cause = max(rank.waits, key=lambda cause: rank.waits[cause])
            by_reason.setdefault(_reason(profile, number, cause), []).append((number, rank))
    for reason, idle in by_reason.items():
        shares = [1 - rank.busy - rank.warm_up for _, rank in idle]
        numbers = ", ".join(str(number) for number, _ in idle)
        amount = f"{min(shares):.0%}" if max(shares) - min(shares) < 0.01 else f"{min(shares):.0%} to {max(shares):.0%}"
        noun, verb = ("Rank", "idles") if len(idle) == 1 else ("Ranks", "idle")
        yield f"{noun} {numbers} {verb} {amount} of the time, mostly because {reason}."
    if not by_reason:
        yield f"No rank idles more than {_IDLE:.0%} of the time."


def _reason(profile: Profile, rank: int, cause: Cause) -> str:
    num_ranks = len(profile.ranks)
    bound = limit(profile.video, num_ranks)
    if cause in {Cause.UNKNOWN, Cause.BEFORE, Cause.AFTER, Cause.DRAINING, Cause.FILLING}:
        if bound is Limit.DECODE and rank < num_ranks - 1:
            return "the last rank decodes all the time"
        if bound is Limit.ENCODE and rank > 0:
            return "rank 0 encodes all the time"
    return _BECAUSE[cause]


def _wastes(profile: Profile) -> Iterator[Remedy]:
    """Yield remedies for what is wasted, each with its gain."""
    video, ranks, num_ranks = profile.video, profile.ranks, len(profile.ranks)
    jobs = ranks[0].waited(Cause.JOBS)
    yield Remedy(
        text=f"Keep the queue full: rank 0 waited {jobs:.0%} of the time for jobs, and all others for it. No GPU and "
        "no faster model helps while there is nothing to do.",
        factor=_without(jobs),
    )
    writing = ranks[-1].waited(Cause.WRITING)
    yield Remedy(
        text=f"Make writing faster: the last rank waited {writing:.0%} of the time for videos to be written. Write to "
        "a local folder, or in fewer formats.",
        factor=_without(writing),
    )
    if profile.videos:
        way = video.way(num_ranks)
        ends = 1 - profile.videos * way.pace_s / way.time_s(profile.videos)
        yield Remedy(
            text=f"Make longer runs, or use replicas for short ones: filling {num_ranks} ranks takes {ends:.0%} of the "
            f"time of a run of {profile.videos} videos.",
            factor=_without(ends),
        )
    yield from _wastes_of_costs(video, num_ranks)


def _wastes_of_costs(video: VideoCosts, num_ranks: int) -> Iterator[Remedy]:
    pace_s = video.way(num_ranks).pace_s
    bound = limit(video, num_ranks)
    if bound in {Limit.DECODE, Limit.ENCODE}:
        where, what = ("the last rank", "decode") if bound is Limit.DECODE else ("rank 0", "encode")
        sizes = [ranks for ranks in range(1, num_ranks + 1) if num_ranks % ranks == 0]
        ways = [video.way(ranks, num_ranks // ranks) for ranks in sizes]
        # The largest groups that are nearly as good as the best: in small ones GPUs must hold more parts of the model.
        enough = max(way.videos_an_hour for way in ways) / (1 + WORTH)
        groups = max((way for way in ways if way.videos_an_hour >= enough), key=lambda way: way.ranks)
        yield Remedy(
            text=f"Use {groups.name} in place of one of {num_ranks}: {where} does nothing but {what}, and the others "
            f"wait for it. Groups share a queue (svdq worker --groups {groups.groups} --ranks {groups.ranks}).",
            factor=groups.videos_an_hour * pace_s / 3600,
        )
    if num_ranks > 1:
        freely_s = replace(video, transfer_s=0.0, overhead_s=0.0).way(num_ranks).pace_s
        if bound is Limit.TRANSFER:
            text = "Use a faster link: hand-overs take longer than the steps of a rank."
        else:
            text = (
                "Use fewer ranks a group, with longer stages: each video costs every rank "
                f"{video.overhead_s * 1000:.3g} ms besides its steps."
            )
        yield Remedy(text=text, factor=pace_s / freely_s)
    typical_s = median(video.costs.step_s)
    slow = [rank for rank, step_s in enumerate(video.costs.step_s) if step_s > typical_s * (1 + WORTH)]
    if slow and num_ranks > 1:
        even = replace(video.costs, step_s=tuple(min(step_s, typical_s) for step_s in video.costs.step_s))
        slowest = max(video.costs.step_s) / typical_s
        yield Remedy(
            text=f"Check the GPU of rank {', '.join(map(str, slow))}: its steps take up to {slowest:.2f} times as "
            "long as those of the others (heat, a power limit, another process, an older card).",
            factor=pace_s / replace(video, costs=even).way(num_ranks).pace_s,
        )


def _purchases(profile: Profile) -> list[Remedy]:
    """List what cheaper work and another GPU would gain, the most helpful first."""
    num_ranks = len(profile.ranks)
    return [
        Remedy(
            text=f"{change.what} would do as much as {change.as_gpus} GPUs in one group."
            if change.as_gpus is not None and change.as_gpus > num_ranks + 1
            else f"{change.what}.",
            factor=change.factor,
        )
        for change in changes(profile.video, profile.video.way(num_ranks), profile.videos or 1)
        if change.factor >= _ANYTHING
    ]


def _without(share: float) -> float:
    return 1 / max(1 - share, 1e-3)

"""Estimates when jobs will be done, by the capacity law from measured costs; uses neither Redis nor a clock."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean
from typing import Any

from rq.job import JobStatus

from svdq.pipeline.models.model_name import model_stem
from svdq.producer.pauses import Pause, stop_all
from svdq.producer.queue import unable_of
from svdq.producer.status.job_view import JobView
from svdq.producer.status.ranks import SILENT_S, Condition, GroupFinder, GroupStatus, conditions_of
from svdq.producer.status.video_costs import GroupCosts, Parameters, kind_of

NO_WORKER = "No worker is running."
UNKNOWN_WORKERS = "Redis refuses writes, so workers that run cannot say so; jobs go on when it takes writes again."
STARTING = "A worker is starting."
PAUSED = "Jobs are not taken."
STORAGE = "The storage is unavailable."
HELD = "Another program holds the GPU."
DRAINING = "The workers take no more jobs."
UNMEASURED = "No worker has finished a video of such a size yet."
PUBLISHED = "By published times: no worker has finished a video of such a size yet."
NOT_ABLE = "No running worker can make it."
UNUPSCALED = "No worker has upscaled a video of such a size yet."


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """The jobs waiting in the queues, and for other jobs."""

    num_jobs: int = 0
    sample: Sequence[Parameters] = ()  # the parameters of an evenly spaced sample of them; of all if there are few
    num_ahead: Mapping[str, int] = field(default_factory=dict)  # by id of requested jobs
    started: Sequence[JobView] = ()  # the jobs in flight before them, besides requested ones
    end_s: float = 0.0  # seconds until the last of those that wait for others is done, at the earliest


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """When a job, or all jobs, will be done."""

    num_ahead: int | None = None  # number of jobs taken before it; None if it is not in a queue
    eta_s: float | None = None  # seconds until it is done; None if there is nothing to do or the time is unknown
    reason: str = ""  # why the time is unknown, or PUBLISHED, as a sentence; or ""
    condition: Condition | None = None  # what it waits for although a group has it
    #: In a group that works in rounds: "transformer_2, 12 before it"; of a job that some workers cannot make, what they
    #: have not: "an upscaler".
    waits_for: str = ""

    @property
    def by(self) -> str:
        """Words behind the time that say that it is not measured; "" if it is."""
        return " by published times" if self.reason == PUBLISHED else ""

    def as_json(self) -> dict[str, Any]:
        """Return a flat JSON object, to be merged with the JSON of the job."""
        return {
            "num_ahead": self.num_ahead,
            "eta_s": None if self.eta_s is None else round(self.eta_s, 1),
            "eta_reason": self.reason or None,
            "condition": self.condition.as_json() if self.condition else None,
            "waits_for": self.waits_for or None,
        }


def estimate_jobs(
    views: Sequence[JobView],
    waiting: Backlog,
    groups: Sequence[GroupStatus],
    pauses: Sequence[Pause],
    no_group: str = NO_WORKER,
) -> dict[str, Estimate]:
    """Estimate when jobs will be done; those that neither wait in a queue nor are started are left out.

    A job that waits for others among them is included: it takes as long as alone when the last one is done. `pauses`
    says why jobs are not taken, and `no_group` why there may be no group: NO_WORKER or STARTING.
    """
    num_ahead, costs = waiting.num_ahead, _costs_by_group(groups)
    started = {view.id: view for view in (*views, *waiting.started) if view.status == JobStatus.STARTED.value}
    begun = _of_started([*started.values()], groups, costs, no_group)
    # What is in flight may have been read before the end of a job.
    found = {view.id: begun[view.id] for view in views if view.id in begun and not view.ended}
    queued = {view.id: view for view in views if view.id in num_ahead and view.id not in found}
    deferred = {view.id: view for view in views if view.status == JobStatus.DEFERRED.value}
    if not queued and not deferred:
        return found
    sample = waiting.sample or [view.parameters for view in queued.values()]
    finder = GroupFinder(groups)
    rests = [
        (group.name, begun[job_id].eta_s or 0.0)
        for job_id, view in started.items()
        if (group := finder.find(job_id, view.worker)) is not None
    ]

    @cache
    def by(model: str, queue: str = "") -> _Takers:
        return _Takers(_able(queue, _running(model, groups)), costs, pauses, no_group, sample)

    for job_id, view in queued.items():
        taken = by(_model_of(view.parameters), view.queue)
        reason = _what_lacks(view.parameters, groups)
        if groups and not reason and not _able(view.queue, groups):
            reason = NOT_ABLE
        if reason:
            found[job_id] = Estimate(reason=reason, waits_for=view.waits_for)
        else:
            eta_s = taken.end_s(num_ahead[job_id], view.parameters, rests)
            found[job_id] = Estimate(
                num_ahead=num_ahead[job_id],
                eta_s=eta_s,
                reason=taken.why_none if eta_s is None else taken.caveat,
                waits_for=view.waits_for,
            )
    while ready := [view for view in deferred.values() if view.after and found.keys() >= {*view.after}]:
        for view in ready:
            del deferred[view.id]
            taken = by(_model_of(view.parameters))
            before, own_s = [found[job_id] for job_id in view.after], taken.alone_s(view.parameters)
            ends = [each.eta_s for each in before if each.eta_s is not None]
            if own_s is None or len(ends) < len(before):
                unknown = (each.reason for each in before if each.eta_s is None and each.reason)
                found[view.id] = Estimate(reason=next(unknown, taken.why_none))
            else:
                caveats = filter(None, (each.reason for each in before))
                found[view.id] = Estimate(eta_s=max(ends) + own_s, reason=next(caveats, taken.caveat))
    return found


def estimate_all(
    in_flight: Sequence[JobView],
    waiting: Backlog,
    groups: Sequence[GroupStatus],
    pauses: Sequence[Pause],
    no_group: str = NO_WORKER,
) -> Estimate:
    """Estimate when all that waits or is in flight will be done; arguments as of `estimate_jobs`."""
    if not waiting.num_jobs and not in_flight:
        return Estimate()
    finder = GroupFinder(groups)
    taken = [view for view in in_flight if _is_for_next_round(view, finder.find(view.id, view.worker))]
    if taken and waiting.num_jobs:
        waiting = with_more(waiting, [view.parameters for view in taken], len(taken))
        in_flight = [view for view in in_flight if view not in taken]
    costs = _costs_by_group(groups)
    found = _of_started(in_flight, groups, costs, no_group)
    ends = list(found.values())
    reason = next((end.reason for end in ends if end.eta_s is None and end.reason), "")
    caveat = next((end.reason for end in ends if end.reason), "")
    reason = reason or next(filter(None, (_what_lacks(each, groups) for each in waiting.sample)), "")
    if reason or not waiting.num_jobs:
        eta_s = max([_written_s(len(in_flight), groups), *(end.eta_s or 0.0 for end in ends)])
        return Estimate(eta_s=None if reason else eta_s, reason=reason or caveat)
    takers = _Takers(groups, costs, pauses, no_group, waiting.sample)
    if takers.interval_s is None:
        return Estimate(reason=takers.why_none)
    # All ranks work until the end, but the last video takes as long as it does alone (docs/internals/capacity.md).
    in_rounds = {job_id for group in groups for job_id in group.places}
    write_s = fmean(group.write_s for group in takers.groups)
    begun_s = sum(max(0.0, (end.eta_s or 0.0) - write_s) for job_id, end in found.items() if job_id not in in_rounds)
    begun_s = (begun_s + sum(map(_rest_s, groups))) / takers.num_ranks
    # Where writers are slower than ranks, they also have to write what is in flight.
    written_s = _written_s(len(found) + waiting.num_jobs, takers.groups)
    total_s = max(begun_s + waiting.num_jobs * takers.interval_s, written_s) + write_s
    alone_s = takers.alone_s(waiting.sample[-1]) if waiting.sample else None
    eta_s = max(takers.start_s + max(total_s, alone_s or 0.0), waiting.end_s, *(end.eta_s or 0.0 for end in ends))
    return Estimate(eta_s=eta_s, reason=caveat or takers.caveat)


def with_more(waiting: Backlog, more: Sequence[Parameters], num_jobs: int) -> Backlog:
    """Return what would wait after more jobs, of which `more` is an even sample; the sample keeps its proportions."""
    share = len(waiting.sample) / waiting.num_jobs if waiting.num_jobs else len(more) / num_jobs
    num_sampled = min(max(1, round(num_jobs * share)), 1000)  # more would not change a mean
    evenly = [more[number * len(more) // num_sampled] for number in range(num_sampled)]
    return replace(waiting, num_jobs=waiting.num_jobs + num_jobs, sample=[*waiting.sample, *evenly])


def videos_per_s(groups: Sequence[GroupStatus]) -> float:
    """Sum the measured paces of all groups."""
    live = (group.intake for group in groups if group.is_whole)
    return sum(1 / intake.pace_s for intake in live if intake and intake.pace_s)


def _groups_that_take(
    groups: Sequence[GroupStatus], pauses: Sequence[Pause], no_group: str
) -> tuple[list[GroupStatus], str]:
    """Return the measured groups that take jobs, and why there may be none."""
    able = [group for group in groups if not group.waits_for_storage and not group.is_freed]
    whole = [group for group in able if group.is_whole]
    open_ = [group for group in whole if group.intake and not group.intake.draining]
    measured = [
        group
        for group in open_
        if group.intake and (group.intake.costs or group.intake.upscales or group.ranks[0].published_step_s)
    ]
    if stop_all(pauses) or (pauses and all(group.is_freed for group in groups)):
        return [], PAUSED
    if groups and not able:
        return [], HELD if any(group.is_held for group in groups) else STORAGE
    if not whole:
        return [], _missing(able[0]) if able else no_group
    if not open_:  # the first record of a rank says nothing about jobs
        return [], DRAINING if any(group.intake for group in whole) else STARTING
    return measured, UNMEASURED


class _Takers:
    """The groups that may take jobs, and how soon they make what waits."""

    def __init__(
        self,
        groups: Sequence[GroupStatus],
        costs: Mapping[str, GroupCosts],
        pauses: Sequence[Pause],
        no_group: str,
        sample: Sequence[Parameters],
    ) -> None:
        """Look at groups that run the model of the jobs, of which `sample` waits."""
        self.groups, self.why_none = _groups_that_take(groups, pauses, no_group)
        self._costs = [costs[group.name] for group in self.groups]
        self.num_ranks = sum(len(group.ranks) for group in self.groups)
        #: Mean seconds between two finished videos; None if too few costs are known.
        self.interval_s = _mean_interval_s(sample, self._costs)
        #: PUBLISHED if that is by published times; else "".
        self.caveat = PUBLISHED if any(each.is_published(one) for each in self._costs for one in sample) else ""
        if self._costs and self.interval_s is None:
            self.why_none = _what_is_unmeasured(sample, self._costs)
        self._at_once = max((group.round_size for group in self.groups), default=0)
        self._num_taken = sum(_num_for_next_round(group) for group in self.groups if group.round_size)
        self._round_s = min(map(_rest_s, self.groups), default=0.0)
        #: Seconds until one of them can begin a job, if their ranks have ended until there is one.
        self.start_s = min((group.start_s for group in self.groups), default=0.0)

    def alone_s(self, parameters: Parameters) -> float | None:
        """Return the seconds that a video takes alone; None if they are not known."""
        return min(
            (
                video.video_s(len(each.group.ranks)) + each.group.write_s
                for each in self._costs
                if (video := each.of(parameters)) is not None
            ),
            default=None,
        )

    def end_s(self, num_before: int, parameters: Parameters, rests: Sequence[tuple[str, float]]) -> float | None:
        """Return the seconds until a video is done before which others wait; None if they are not known.

        `rests` are the seconds that jobs in flight need, by group.
        """
        own_s = self.alone_s(parameters)
        if own_s is None or self.interval_s is None:
            return None
        if self._at_once:  # the jobs of a round end together
            num_rounds = (self._num_taken + num_before) // self._at_once + 1
            return self.start_s + self._round_s + (num_rounds * self._at_once - 1) * self.interval_s + own_s
        # max(W, N W/K), with the jobs in flight.
        names = {group.name for group in self.groups}
        begun_s = sum(rest_s for name, rest_s in rests if name in names) / self.num_ranks
        return self.start_s + max(own_s, begun_s + (num_before + 1) * self.interval_s)


def _costs_by_group(groups: Sequence[GroupStatus]) -> dict[str, GroupCosts]:
    return {group.name: GroupCosts(group) for group in groups}


def _model_of(parameters: Parameters) -> str:
    return str(parameters.get("model") or "")


def _running(model: str, groups: Sequence[GroupStatus]) -> list[GroupStatus]:
    """Return the groups that may make jobs for a model; of jobs for any, all."""
    return [group for group in groups if not model or model_stem(group.ranks[0].model) == model]


def _able(queue: str, groups: Sequence[GroupStatus]) -> list[GroupStatus]:
    """Return the groups that take the jobs of a queue that some leave to others; of other queues, all."""
    unable = unable_of(queue)
    return [group for group in groups if not (group.intake and group.intake.ability in unable)]


def _what_lacks(parameters: Parameters, groups: Sequence[GroupStatus]) -> str:
    """Say that workers run, but not with the model or the LoRAs that a job is for; else ""."""
    name = _model_of(parameters)
    if not groups:
        return ""
    if not (able := _running(name, groups)):
        return f"No worker runs the model {name}."
    # A video that is not submitted yet has names only.
    wanted = {lora["digest"]: lora["name"] for lora in parameters.get("loras", ()) if "digest" in lora}
    there = [{*group.intake.loras.values()} for group in able if group.intake]
    if not wanted or not there or any(digests >= wanted.keys() for digests in there):
        return ""
    missing = next((name for digest, name in wanted.items() if not any(digest in each for each in there)), "")
    if missing:
        return f"No running worker has the LoRA {missing}; put it into their folder SVDQ_LORAS."
    return f"No running worker has all of the LoRAs {', '.join(wanted.values())}."


def _written_s(num_videos: int, groups: Sequence[GroupStatus]) -> float:
    """Return the seconds in which the writers of groups write so many videos; 0 while one has written none."""
    paces_s = [group.writes_pace_s for group in groups]
    return num_videos / sum(1 / pace_s for pace_s in paces_s) if paces_s and all(paces_s) else 0.0


def _rest_s(group: GroupStatus) -> float:
    """Return the seconds until a group that works in rounds has finished what it has."""
    return max((place.eta_s or 0.0 for place in group.places.values()), default=0.0)


def _num_for_next_round(group: GroupStatus) -> int:
    return max(0, len(group.in_flight) - len(group.places))


def _missing(group: GroupStatus) -> str:
    return f"Not all ranks of the group on {group.ranks[0].host} have reported in the last {SILENT_S:.0f} s."


def _of_started(
    views: Sequence[JobView], groups: Sequence[GroupStatus], costs: Mapping[str, GroupCosts], no_group: str
) -> dict[str, Estimate]:
    conditions = {job_id: condition for _, condition in conditions_of(groups) for job_id in condition.job_ids}
    finder = GroupFinder(groups)
    found = {}
    for view in views:
        group, condition = finder.find(view.id, view.worker), conditions.get(view.id)
        if condition is not None:
            found[view.id] = Estimate(condition=condition, reason=STORAGE)
        elif group is None or not group.is_whole:
            found[view.id] = Estimate(reason=no_group if group is None else _missing(group))
        else:
            found[view.id] = _of_started_in(group, costs[group.name], view)
    return found


def _is_for_next_round(view: JobView, group: GroupStatus | None) -> bool:
    """Whether a group that works in rounds has taken a job, and waits with it for the next one."""
    if group is None or not group.is_whole or not group.round_size:
        return False
    return view.id not in group.places and not 0 < view.steps <= view.step  # else it is being written


def _of_started_in(group: GroupStatus, costs: GroupCosts, view: JobView) -> Estimate:
    video = costs.of(view.parameters)
    caveat = PUBLISHED if costs.is_published(view.parameters) else ""
    if _is_for_next_round(view, group):
        if video is None:
            return Estimate(reason=UNMEASURED)
        others_s = max(0, _num_for_next_round(group) - 1) * video.rounds_pace_s(1)
        return Estimate(eta_s=_rest_s(group) + others_s + video.video_s() + group.write_s, reason=caveat)
    if group.round_size:
        if (place := group.places.get(view.id)) is None:
            return Estimate(eta_s=group.write_s)
        if place.eta_s is None and caveat and video is not None:  # those of a round end together
            place = place.model_copy(update={"eta_s": len(group.places) * video.rounds_pace_s(1)})
        else:
            caveat = ""
        is_here = any(rank.job_id == view.id for rank in group.ranks)
        reason = UNMEASURED if place.eta_s is None else caveat
        return Estimate(eta_s=place.eta_s, waits_for="" if is_here else str(place), reason=reason)
    if video is None:  # its first step may have taken far longer than the others, and its decode is not known
        return Estimate(reason=UNMEASURED)
    steps_left = video.work() - video.work(view.step)
    eta_s = steps_left * video.step_s(len(group.ranks)) + video.costs.decode_s + group.write_s
    return Estimate(eta_s=eta_s, reason=caveat)


def _what_is_unmeasured(sample: Sequence[Parameters], groups: Sequence[GroupCosts]) -> str:
    """Say what no group has measured of the first video whose costs are not known."""
    unknown = [each for each in sample if all(group.of(each) is None for group in groups)]
    is_known_plain = any(group.of({**each, "upscale": ""}) for each in unknown[:1] for group in groups)
    return UNUPSCALED if is_known_plain else UNMEASURED


def _mean_interval_s(sample: Sequence[Parameters], groups: Sequence[GroupCosts]) -> float | None:
    """Estimate the mean seconds between two finished videos while all groups run; None if too few costs are known."""
    numbers = Counter(map(kind_of, sample))  # thousands of jobs are of a few kinds
    of_kind = {kind_of(each): each for each in sample}
    rate = 0.0
    for each in groups:
        group = each.group
        known = {kind: video for kind in numbers if (video := each.of(of_kind[kind])) is not None}
        paces = {
            kind: video.rounds_pace_s(1) if group.round_size else video.pace_s(len(group.ranks))
            for kind, video in known.items()
        }
        total_s = sum(numbers[kind] * max(pace_s, group.writes_pace_s) for kind, pace_s in paces.items())
        num_known = sum(numbers[kind] for kind in known)
        if total_s > 0 and num_known >= 0.9 * numbers.total():
            rate += num_known / total_s
    return 1 / rate if rate else None

"""Estimates when jobs will be done, by the capacity law from measured costs; uses neither Redis nor a clock."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple, Self

from rq.job import JobStatus

from svdq.pipeline.models.families import PARAMETERS, class_for
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import ShapeCosts
from svdq.producer.job import model_stem
from svdq.producer.status.job_view import JobView
from svdq.producer.status.ranks import SILENT_S, Condition, GroupFinder, GroupStatus, conditions_of

Parameters = Mapping[str, Any]

MAX_SCALE = 2.0  # largest factor by which costs are scaled to a shape of another size, as they do not grow evenly

NO_WORKER = "No worker is running."
STARTING = "A worker is starting."
PAUSED = "Jobs are not taken."
STORAGE = "The storage is unavailable."
DRAINING = "The workers take no more jobs."
UNMEASURED = "No worker has finished a video of such a size yet."


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """The jobs waiting in the queues, and for other jobs."""

    num_jobs: int = 0
    sample: Sequence[Parameters] = ()  # the parameters of an evenly spaced sample of them; of all if there are few
    num_ahead: Mapping[str, int] = field(default_factory=dict)  # by id of requested jobs
    end_s: float = 0.0  # seconds until the last of those that wait for others is done, at the earliest


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """When a job, or all jobs, will be done."""

    num_ahead: int | None = None  # number of jobs taken before it; None if it is not in a queue
    eta_s: float | None = None  # seconds until it is done; None if there is nothing to do or the time is unknown
    reason: str = ""  # why the time is unknown, as a sentence, or ""
    condition: Condition | None = None  # what it waits for although a group has it
    waits_for: str = ""  # in a group that works in rounds: "transformer_2, 12 before it"

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
    pauses: Sequence[str],
    no_group: str = NO_WORKER,
) -> dict[str, Estimate]:
    """Estimate when jobs will be done; those that neither wait in a queue nor are started are left out.

    A job that waits for others among them is included: it takes as long as alone when the last one is done. `pauses`
    says why jobs are not taken, and `no_group` why there may be no group: NO_WORKER or STARTING.
    """
    num_ahead = waiting.num_ahead
    found = _of_started([view for view in views if view.status == JobStatus.STARTED.value], groups, no_group)
    queued = {view.id: _shape_of(view.parameters) for view in views if view.id in num_ahead and view.id not in found}
    deferred = {view.id: view for view in views if view.status == JobStatus.DEFERRED.value}
    if not queued and not deferred:
        return found
    sample = [_shape_of(each) for each in waiting.sample] or [*queued.values()]

    @cache
    def by(model: str) -> _Taken:
        return _Taken.by(_running(model, groups), pauses, no_group, sample)

    @cache
    def alone(model: str, shape: _Shape) -> float | None:
        return _alone_s(shape, by(model).groups)

    wanted = {view.id: view.parameters for view in views}
    for job_id, shape in queued.items():
        number, model = num_ahead[job_id], _model_of(wanted[job_id])
        taken, own_s = by(model), alone(model, shape)
        if reason := _what_lacks(wanted[job_id], groups):
            found[job_id] = Estimate(reason=reason)
        elif own_s is None or taken.interval_s is None:
            found[job_id] = Estimate(num_ahead=number, reason=taken.why_none)
        else:
            num_before = (number // taken.at_once + 1) * taken.at_once - 1  # the jobs of a round end together
            found[job_id] = Estimate(num_ahead=number, eta_s=taken.rest_s + num_before * taken.interval_s + own_s)
    while ready := [view for view in deferred.values() if view.after and found.keys() >= {*view.after}]:
        for view in ready:
            del deferred[view.id]
            model = _model_of(view.parameters)
            before, own_s = [found[job_id] for job_id in view.after], alone(model, _shape_of(view.parameters))
            ends = [each.eta_s for each in before if each.eta_s is not None]
            if own_s is None or len(ends) < len(before):
                found[view.id] = Estimate(
                    reason=next((each.reason for each in before if each.reason), by(model).why_none)
                )
            else:
                found[view.id] = Estimate(eta_s=max(ends) + own_s)
    return found


def estimate_all(
    in_flight: Sequence[JobView],
    waiting: Backlog,
    groups: Sequence[GroupStatus],
    pauses: Sequence[str],
    no_group: str = NO_WORKER,
) -> Estimate:
    """Estimate when all that waits or is in flight will be done; arguments as of `estimate_jobs`."""
    if not waiting.num_jobs and not in_flight:
        return Estimate()
    found = _of_started(in_flight, groups, no_group)
    ends = list(found.values())
    reason = next((end.reason for end in ends if end.reason), "")
    reason = reason or next(filter(None, (_what_lacks(each, groups) for each in waiting.sample)), "")
    if reason or not waiting.num_jobs:
        eta_s = max([_written_s(len(in_flight), groups), *(end.eta_s or 0.0 for end in ends)])
        return Estimate(eta_s=None if reason else eta_s, reason=reason)
    takers, why_none = _takers(groups, pauses, no_group)
    interval_s = _mean_interval_s(map(_shape_of, waiting.sample), takers)
    alone_s = _alone_s(_shape_of(waiting.sample[-1]), takers) if waiting.sample else None
    if interval_s is None:
        return Estimate(reason=why_none)
    # All ranks work until the end, but the last video takes as long as it does alone (docs/internals/capacity.md).
    num_ranks = sum(len(group.ranks) for group in takers)
    in_rounds = {job_id for group in groups if group.intake for job_id in group.intake.places}
    write_s = fmean(group.write_s for group in takers)
    begun_s = sum(max(0.0, (end.eta_s or 0.0) - write_s) for job_id, end in found.items() if job_id not in in_rounds)
    begun_s = (begun_s + sum(map(_rest_s, groups))) / num_ranks
    # Where writers are slower than ranks, they also have to write what is in flight.
    written_s = _written_s(len(found) + waiting.num_jobs, takers)
    total_s = max(begun_s + waiting.num_jobs * interval_s, written_s) + write_s
    return Estimate(eta_s=max(total_s, alone_s or 0.0, waiting.end_s, *(end.eta_s or 0.0 for end in ends)))


def with_more(waiting: Backlog, parameters: Parameters, num_jobs: int) -> Backlog:
    """Return what would wait after more jobs with the same parameters; the sample keeps its proportions."""
    share = len(waiting.sample) / waiting.num_jobs if waiting.num_jobs else 0.0
    num_sampled = min(max(1, round(num_jobs * share)), 1000)  # more would not change a mean
    sample = [*waiting.sample, *[parameters] * num_sampled]
    return replace(waiting, num_jobs=waiting.num_jobs + num_jobs, sample=sample)


def videos_per_s(groups: Sequence[GroupStatus]) -> float:
    """Sum the measured paces of all groups."""
    live = (group.intake for group in groups if group.is_whole)
    return sum(1 / intake.pace_s for intake in live if intake and intake.pace_s)


def _takers(groups: Sequence[GroupStatus], pauses: Sequence[str], no_group: str) -> tuple[list[GroupStatus], str]:
    """Return the measured groups that take jobs, and why there may be none."""
    able = [group for group in groups if not group.waits_for_storage]
    whole = [group for group in able if group.is_whole]
    open_ = [group for group in whole if group.intake and not group.intake.draining]
    measured = [group for group in open_ if group.intake and group.intake.costs]
    if pauses:
        return [], PAUSED
    if groups and not able:
        return [], STORAGE
    if not whole:
        return [], _missing(able[0]) if able else no_group
    if not open_:  # the first record of a rank says nothing about jobs
        return [], DRAINING if any(group.intake for group in whole) else STARTING
    return measured, UNMEASURED


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """How soon groups take and make jobs that wait."""

    groups: Sequence[GroupStatus]  # those that take jobs, and have measured costs
    why_none: str
    interval_s: float | None  # mean seconds between two finished videos; None if it is not known
    at_once: int  # videos of a round
    rest_s: float  # seconds until the first group that works in rounds takes more

    @classmethod
    def by(
        cls, groups: Sequence[GroupStatus], pauses: Sequence[str], no_group: str, sample: Sequence["_Shape"]
    ) -> Self:
        takers, why_none = _takers(groups, pauses, no_group)
        rounds = [group.intake for group in takers if group.intake and group.intake.round_size]
        return cls(
            groups=takers,
            why_none=why_none,
            interval_s=_mean_interval_s(sample, takers),
            at_once=max((intake.round_size for intake in rounds), default=1),
            rest_s=min((_rest_s(group) for group in takers), default=0.0),
        )


def _model_of(parameters: Parameters) -> str:
    return str(parameters.get("model") or "")


def _running(model: str, groups: Sequence[GroupStatus]) -> list[GroupStatus]:
    """Return the groups that may make jobs for a model; of jobs for any, all."""
    return [group for group in groups if not model or model_stem(group.ranks[0].model) == model]


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
    places = group.intake.places.values() if group.intake else ()
    return max((place.eta_s or 0.0 for place in places), default=0.0)


def _missing(group: GroupStatus) -> str:
    return f"Not all ranks of the group on {group.ranks[0].host} have reported in the last {SILENT_S:.0f} s."


def _of_started(views: Sequence[JobView], groups: Sequence[GroupStatus], no_group: str) -> dict[str, Estimate]:
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
            found[view.id] = _of_started_in(group, view)
    return found


def _of_started_in(group: GroupStatus, view: JobView) -> Estimate:
    if group.intake and group.intake.round_size:
        place = group.intake.places.get(view.id)
        if place is None:  # it is being written, or it was taken just now
            return Estimate(eta_s=group.write_s) if 0 < view.steps <= view.step else Estimate(reason=UNMEASURED)
        is_here = any(rank.job_id == view.id for rank in group.ranks)
        reason = UNMEASURED if place.eta_s is None else ""
        return Estimate(eta_s=place.eta_s, waits_for="" if is_here else str(place), reason=reason)
    shape = _shape_of(view.parameters)
    steps_left = max(0, shape.steps - view.step)
    video = _costs_of(shape, group)
    if video is None:  # its first step may have taken far longer than the others, and its decode is not known
        return Estimate(reason=UNMEASURED)
    return Estimate(eta_s=steps_left * video.step_s(len(group.ranks)) + video.costs.decode_s + group.write_s)


class _Shape(NamedTuple):
    """The properties that decide the costs of a video; None where the job leaves a size open."""

    frames: float | None
    width: float | None
    height: float | None
    guided: bool
    steps: int
    step_cache: float
    upscale: str


def _shape_of(parameters: Parameters) -> _Shape:
    names = ("frames", "width", "height", "steps", "step_cache")
    frames, width, height, steps, step_cache = (_positive(parameters.get(name)) for name in names)
    if parameters.get("finishes"):
        steps = 0.0  # its video is denoised already
    elif parameters.get("steps") is None:
        steps = _default_steps(str(parameters.get("family")))
    return _Shape(
        frames=frames,
        width=width,
        height=height,
        guided=_is_guided(parameters),
        steps=int(1 if steps is None else steps),
        step_cache=step_cache or 0.0,
        upscale=str(parameters.get("upscale") or ""),
    )


def _alone_s(shape: _Shape, groups: Sequence[GroupStatus]) -> float | None:
    return min(
        (video.video_s(len(group.ranks)) + group.write_s for group in groups if (video := _costs_of(shape, group))),
        default=None,
    )


def _mean_interval_s(sample: Iterable[_Shape], groups: Sequence[GroupStatus]) -> float | None:
    """Estimate the mean seconds between two finished videos while all groups run; None if too few costs are known."""
    shapes = Counter(sample)  # thousands of jobs have a few shapes
    rate = 0.0
    for group in groups:
        known = {shape: video for shape in shapes if (video := _costs_of(shape, group))}
        num_known = sum(shapes[shape] for shape in known)
        in_rounds = group.intake is not None and group.intake.round_size > 0
        paces = {
            shape: video.rounds_pace_s(1) if in_rounds else video.pace_s(len(group.ranks))
            for shape, video in known.items()
        }
        total_s = sum(shapes[shape] * max(pace_s, group.writes_pace_s) for shape, pace_s in paces.items())
        if total_s > 0 and num_known >= 0.9 * shapes.total():
            rate += num_known / total_s
    return 1 / rate if rate else None


def _costs_of(shape: _Shape, group: GroupStatus) -> VideoCosts | None:
    """Return a group's measured costs of a shape, scaled from a similar one; None if there is none."""
    measured = [costs for costs in (group.intake.costs if group.intake else ()) if costs.upscale == shape.upscale]
    if not measured:
        return None

    def scale(costs: ShapeCosts) -> float:
        pixels = (shape.width or costs.width) * (shape.height or costs.height) * (shape.frames or costs.frames)
        return pixels / (costs.width * costs.height * costs.frames)

    nearest = min(reversed(measured), key=lambda costs: (costs.guided != shape.guided, abs(math.log(scale(costs)))))
    factor = scale(nearest)
    if not 1 / MAX_SCALE <= factor <= MAX_SCALE:
        return None
    # Guidance doubles the batch of a step.
    step_factor = factor * {(True, False): 2.0, (False, True): 0.5}.get((shape.guided, nearest.guided), 1.0)
    # Steps count by their mean: which of them are skipped is known to workers.
    step_factor *= nearest.mean_steps.get(f"{shape.step_cache:g}", 1.0)
    costs = nearest.scaled(step=step_factor, encode=factor, decode=factor)
    return VideoCosts(steps=shape.steps, costs=costs)


def _is_guided(parameters: Parameters) -> bool:
    try:
        cls = class_for(parameters, PARAMETERS)
        return cls.model_validate(
            {"seed": 0} | {name: parameters[name] for name in cls.model_fields if name in parameters}
        ).guided
    except ValueError:  # anyone can write to Redis
        return False


@cache
def _default_steps(family: str) -> int:
    from svdq.pipeline.models.families import FAMILIES

    found = next((each for each in FAMILIES if each.name == family), FAMILIES[0])
    return found.complete(found.parameters.model_validate({"seed": 0}), found.published).steps


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value < 1e9 else None

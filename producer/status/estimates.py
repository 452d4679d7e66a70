"""Estimates when jobs will be done from the costs that groups measured, or says why it cannot.

A group of K ranks with step times t_r finishes a video of T steps every T / sum(1 / t_r) + (E + D) / K seconds. Pure
code, without Redis or a clock.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from rq.job import JobStatus

from svdq.pipeline.models.registry import FAMILIES, PARAMETERS, class_for
from svdq.producer.status.ranks import SILENT_S, Condition, GroupStatus, ShapeCosts
from svdq.producer.status.status import JobView

Parameters = Mapping[str, Any]

#: Largest number of jobs in the sample for those that are asked about; more would not change a mean.
MAX_ADDED = 1000

NO_WORKER = "No worker is running."
STARTING = "A worker is starting."
PAUSED = "Jobs are not taken."
STORAGE = "The storage is unavailable."
DRAINING = "The workers take no more jobs."
UNMEASURED = "No worker has finished a video yet."


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The jobs waiting in the queues."""

    #: Number of jobs.
    num_jobs: int = 0
    #: The parameters of an evenly spaced sample of them; of all if there are few.
    sample: Sequence[Parameters] = ()
    #: The number of jobs taken before each requested job, by job id.
    num_ahead: Mapping[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """When a job, or all jobs, will be done."""

    #: Number of jobs taken before it; None if it is not in a queue.
    num_ahead: int | None = None
    #: Seconds until it is done; None if there is nothing to do or the time is unknown.
    eta_s: float | None = None
    #: Why the time is unknown, as a sentence, or "".
    reason: str = ""
    #: What it waits for although a group has it.
    condition: Condition | None = None

    def as_json(self) -> dict[str, Any]:
        """Return a flat JSON object, to be merged with that of the job."""
        return {
            "num_ahead": self.num_ahead,
            "eta_s": None if self.eta_s is None else round(self.eta_s, 1),
            "eta_reason": self.reason or None,
            "condition": self.condition.as_json() if self.condition else None,
        }


def estimate_jobs(
    views: Sequence[JobView],
    waiting: Waiting,
    groups: Sequence[GroupStatus],
    pauses: Sequence[str],
    no_group: str = NO_WORKER,
) -> dict[str, Estimate]:
    """Estimate when single jobs will be done; only those that wait in a queue or are started are in the result.

    Args:
        views: the jobs.
        waiting: the jobs that wait.
        groups: that have written records lately.
        pauses: why jobs are not taken.
        no_group: why there is no group, as a sentence: NO_WORKER or STARTING.
    """
    takers, why_none = _takers(groups, pauses, no_group)
    found = {}
    for view in views:
        if view.status == JobStatus.STARTED.value:
            found[view.id] = _of_started(view, groups, no_group)
        elif view.id in (waiting.num_ahead or {}):
            number = (waiting.num_ahead or {})[view.id]
            found[view.id] = Estimate(num_ahead=number, reason=why_none)
            own_s = _alone_s(view.parameters, takers)
            interval_s = _mean_interval_s(waiting.sample or [view.parameters], takers)
            if own_s is not None and interval_s is not None:
                found[view.id] = Estimate(num_ahead=number, eta_s=number * interval_s + own_s)
    return found


def estimate_all(
    in_flight: Sequence[JobView],
    waiting: Waiting,
    groups: Sequence[GroupStatus],
    pauses: Sequence[str],
    no_group: str = NO_WORKER,
) -> Estimate:
    """Estimate when all that waits and all that is in flight will be done; arguments as of `estimate_jobs`."""
    if not waiting.num_jobs and not in_flight:
        return Estimate()
    ends = [_of_started(view, groups, no_group) for view in in_flight]
    reason = next((end.reason for end in ends if end.reason), "")
    if reason or not waiting.num_jobs:
        return Estimate(eta_s=None if reason else max((end.eta_s or 0.0 for end in ends), default=0.0), reason=reason)
    takers, why_none = _takers(groups, pauses, no_group)
    interval_s = _mean_interval_s(waiting.sample, takers)
    alone_s = _alone_s(waiting.sample[-1], takers) if waiting.sample else None
    if interval_s is None or alone_s is None:
        return Estimate(reason=why_none)
    # All ranks work until the end, but the last video takes as long as it does alone (docs/internals/capacity.md).
    num_ranks = sum(len(group.ranks) for group in takers)
    begun_s = sum(end.eta_s or 0.0 for end in ends) / num_ranks
    total_s = begun_s + waiting.num_jobs * interval_s
    return Estimate(eta_s=max(total_s, alone_s, *(end.eta_s or 0.0 for end in ends)))


def with_more(waiting: Waiting, parameters: Parameters, num_jobs: int) -> Waiting:
    """Return what would wait after more jobs with the same parameters; the sample keeps its proportions."""
    share = len(waiting.sample) / waiting.num_jobs if waiting.num_jobs else 0.0
    num_sampled = min(max(1, round(num_jobs * share)), MAX_ADDED)
    return Waiting(num_jobs=waiting.num_jobs + num_jobs, sample=[*waiting.sample, *[parameters] * num_sampled])


def videos_per_s(groups: Sequence[GroupStatus]) -> float:
    """Sum the measured paces of all groups."""
    live = (group.intake for group in groups if group.is_whole)
    return sum(1 / intake.pace_s for intake in live if intake and intake.pace_s)


def condition_of(job_id: str, groups: Sequence[GroupStatus]) -> Condition | None:
    """Find what a job waits for, if anything keeps it waiting."""
    return next((condition for group in groups for condition in group.conditions if job_id in condition.job_ids), None)


def _takers(groups: Sequence[GroupStatus], pauses: Sequence[str], no_group: str) -> tuple[list[GroupStatus], str]:
    """Find the groups that take what waits and have measured something; when there are none, say why."""
    whole = [group for group in groups if group.is_whole]
    open_ = [group for group in whole if group.intake and not group.intake.draining]
    measured = [group for group in open_ if group.intake and group.intake.costs]
    if pauses:
        return [], PAUSED
    if any(group.conditions for group in groups):
        return [], STORAGE
    if not whole:
        return [], _missing(groups[0]) if groups else no_group
    if not open_:
        return [], DRAINING
    return measured, UNMEASURED


def _missing(group: GroupStatus) -> str:
    return f"Not all ranks of the group on {group.ranks[0].host} have reported in the last {SILENT_S:.0f} s."


def _of_started(view: JobView, groups: Sequence[GroupStatus], no_group: str) -> Estimate:
    condition = condition_of(view.id, groups)
    if condition is not None:
        return Estimate(condition=condition, reason=STORAGE)
    group = next((group for group in groups if group.has(view.id, view.worker)), None)
    if group is None or not group.is_whole:
        return Estimate(reason=no_group if group is None else _missing(group))
    steps_left = max(0, view.steps - view.step)
    costs = _costs_of(view.parameters, group)
    if costs is not None:
        return Estimate(eta_s=steps_left * fmean(costs.step_s) + costs.decode_s)
    # In the first video ever, the time of the last step is known, and that of the decode is not.
    step_s = next((rank.step_s for rank in group.ranks if rank.job_id == view.id and rank.step_s is not None), None)
    return Estimate(reason=UNMEASURED) if step_s is None else Estimate(eta_s=steps_left * step_s)


def _alone_s(parameters: Parameters, groups: Sequence[GroupStatus]) -> float | None:
    """Estimate the seconds from encode to end of one video on the fastest group."""
    found = []
    for group in groups:
        costs = _costs_of(parameters, group)
        if costs is not None:
            found.append(costs.encode_s + _steps(parameters) * fmean(costs.step_s) + costs.decode_s)
    return min(found, default=None)


def _mean_interval_s(sample: Sequence[Parameters], groups: Sequence[GroupStatus]) -> float | None:
    """Estimate the mean seconds between two finished videos while all groups run."""
    rate = 0.0
    for group in groups:
        intervals = [_interval_s(parameters, costs) for parameters in sample if (costs := _costs_of(parameters, group))]
        if intervals and (mean_s := fmean(intervals)) > 0:
            rate += 1 / mean_s
    return 1 / rate if rate else None


def _interval_s(parameters: Parameters, costs: ShapeCosts) -> float:
    num_ranks = len(costs.step_s)
    step_s = 1 / sum(1 / max(step_s, 1e-9) for step_s in costs.step_s)
    return _steps(parameters) * step_s + (costs.encode_s + costs.decode_s) / num_ranks


def _costs_of(parameters: Parameters, group: GroupStatus) -> ShapeCosts | None:
    """Return a group's measured costs of a shape, or scale those of the most similar shape."""
    measured = group.intake.costs if group.intake else ()
    if not measured:
        return None
    frames, width, height = (parameters.get(name) for name in ("frames", "width", "height"))
    guided = _is_guided(parameters)

    def scale(costs: ShapeCosts) -> float:
        """Return the relative size of the shape; without a frame count, that of the measured shape is used."""
        pixels = _positive(width, costs.width) * _positive(height, costs.height) * _positive(frames, costs.frames)
        return pixels / (costs.width * costs.height * costs.frames)

    nearest = min(reversed(measured), key=lambda costs: (costs.guided != guided, abs(math.log(scale(costs)))))
    factor = scale(nearest)
    # Guidance doubles the batch of a step.
    step_factor = factor * {(True, False): 2.0, (False, True): 0.5}.get((guided, nearest.guided), 1.0)
    return nearest.model_copy(
        update={
            "step_s": tuple(step_s * step_factor for step_s in nearest.step_s),
            "encode_s": nearest.encode_s * factor,
            "decode_s": nearest.decode_s * factor,
        }
    )


def _is_guided(parameters: Parameters) -> bool:
    try:
        cls = class_for(parameters, PARAMETERS)
        return cls.model_validate(
            {"seed": 0} | {name: parameters[name] for name in cls.model_fields if name in parameters}
        ).guided
    except ValueError:  # anyone can write to Redis
        return False


def _steps(parameters: Parameters) -> int:
    steps = parameters.get("steps")
    return int(_positive(_default_steps(str(parameters.get("family"))) if steps is None else steps, 1))


@cache
def _default_steps(family: str) -> int:
    """Return the steps of a published model, for a job that leaves them to its model."""
    found = next((each for each in FAMILIES if each.name == family), FAMILIES[0])
    return found.complete(found.parameters.model_validate({"seed": 0}), {}).steps


def _positive(value: object, default: int) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 1e9 else float(default)

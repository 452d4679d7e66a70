"""When jobs will be done, going by what groups have measured. Pure arithmetic: no Redis, no clock.

Times are estimates: they follow what the last videos cost, and know nothing of the shapes of the jobs that still wait.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from svdq.producer.status.ranks import GroupStatus, RankStatus, ShapeCosts, Trouble


def queue_eta_s(num_queued: int, groups: Sequence[GroupStatus]) -> float | None:
    """Estimate in how many seconds all that waits and all that is in flight will be done.

    Args:
        num_queued: jobs that wait.
        groups: that share them.

    Returns:
        None while no group has finished a video, or none takes jobs.
    """
    rate = videos_a_second(groups)
    if rate == 0:
        return None
    return (num_queued + sum(len(group.intake.in_flight) for group in groups if group.intake)) / rate


def job_eta_s(
    job_id: str, parameters: Mapping[str, Any], step: int, num_ahead: int | None, groups: Sequence[GroupStatus]
) -> float | None:
    """Estimate in how many seconds a job will be done.

    Args:
        job_id: its id.
        parameters: its parameters, as used where a worker has it.
        step: denoising steps done.
        num_ahead: jobs that wait before it; None when it is in flight.
        groups: the groups there are.

    Returns:
        None while nobody has measured what such a video costs, and while it waits for the storage.
    """
    if trouble_of(job_id, groups) is not None:
        return None
    steps_left = int(parameters.get("steps", 0)) - step
    if num_ahead is None:
        own = [group for group in groups if group.intake and job_id in group.intake.in_flight]
        costs = _costs_of(parameters, own)
        if costs is not None:
            return steps_left * fmean(costs.step_s) + costs.decode_s
        # The first video of its shape: its last step is all that is known, and the decode is not.
        at_it = [rank for group in own for rank in group.ranks if _has_measured(rank, job_id)]
        return steps_left * float(at_it[0].step_s or 0.0) if at_it else None
    rate = videos_a_second(groups)
    costs = _costs_of(parameters, groups)
    if rate == 0 or costs is None:
        return None
    return num_ahead / rate + costs.encode_s + steps_left * fmean(costs.step_s) + costs.decode_s


def trouble_of(job_id: str, groups: Sequence[GroupStatus]) -> Trouble | None:
    """Find what a job waits for, if anything keeps it waiting."""
    return next((trouble for group in groups for trouble in group.troubles if job_id in trouble.job_ids), None)


def videos_a_second(groups: Sequence[GroupStatus]) -> float:
    """Add up the paces of the groups that take jobs."""
    return sum(1 / group.intake.pace_s for group in groups if group.intake and group.intake.pace_s)


def _costs_of(parameters: Mapping[str, Any], groups: Sequence[GroupStatus]) -> ShapeCosts | None:
    """Find what was measured of a shape; a job that leaves its frames to the model is like any of its size."""
    frames, width, height = (parameters.get(name) for name in ("frames", "width", "height"))
    guided = parameters.get("max_guidance_scale", 0) > 1
    for group in groups:
        for costs in reversed(group.intake.costs if group.intake else ()):
            if (costs.width, costs.height, costs.guided) == (width, height, guided) and frames in (None, costs.frames):
                return costs
    return None


def _has_measured(rank: RankStatus, job_id: str) -> bool:
    return rank.job_id == job_id and rank.step_s is not None

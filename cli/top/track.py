"""Computes the position of a sample in flight in the ranks of its group. Pure code, without terminal or Redis."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from svdq.producer.status.ranks import GroupStatus
    from svdq.producer.status.status import JobView


@dataclass(frozen=True, kw_only=True)
class PipelinePosition:
    """Position of a sample in the pipeline of its group."""

    #: Number of ranks that the sample has passed, including a fraction of the present one: 0 to K.
    ranks_done: float
    #: What is being done with the sample, in a few words.
    doing: str


def position_of(job: "JobView", group: "GroupStatus") -> PipelinePosition:
    """Return the position of a sample.

    The job's own record of its step is the most recent; the rank's record has the range of steps of that rank.
    """
    num_ranks = group.ranks[0].num_ranks
    if any(job.id in condition.job_ids for condition in group.conditions):
        return PipelinePosition(
            ranks_done=num_ranks if _is_denoised(job) else _so_far(job, group), doing="waits for storage"
        )
    if job.rank is None:
        return PipelinePosition(ranks_done=0.0, doing="begins")
    if _is_denoised(job) and job.rank == num_ranks - 1:
        is_decoding = any(rank.job_id == job.id and rank.activity == "decoding" for rank in group.ranks)
        return PipelinePosition(ranks_done=num_ranks, doing="decoding" if is_decoding else "being written")
    return PipelinePosition(ranks_done=_so_far(job, group), doing=f"step {job.step} of {job.steps}")


def _so_far(job: "JobView", group: "GroupStatus") -> float:
    """Count the ranks that a sample has passed, including a fraction of the present one."""
    if job.rank is None:
        return 0.0
    rank = next((rank for rank in group.ranks if rank.rank == job.rank), None)
    first, end = (rank.step_range if rank else None) or (0, 0)
    # The job's record names the step about to run, so on a rank's last step it is the end less one.
    if rank is not None and rank.job_id != job.id and job.step >= end - 1:
        return job.rank + 1.0  # all steps of the rank are done: on its way to the next rank
    # If the rank's record is older than the job's, the range is that of the previous sample: off by one at most.
    return job.rank + (min(1.0, max(0.0, (job.step - first) / (end - first))) if end > first else 0.0)


def _is_denoised(job: "JobView") -> bool:
    return job.steps > 0 and job.step >= job.steps

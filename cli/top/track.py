"""Where a sample in flight is on its way through the ranks of its group. Pure: knows no terminal and no Redis."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from svdq.producer.status.ranks import GroupStatus
    from svdq.producer.status.status import JobView


@dataclass(frozen=True, kw_only=True)
class Place:
    """A sample's place in the pipeline of its group."""

    #: Ranks that it has behind it, with a fraction of the one that has it: 0 to K.
    ranks_done: float
    #: What is done with it, in a few words.
    doing: str


def place_of(job: "JobView", group: "GroupStatus") -> Place:
    """Tell where a sample is.

    A job's own note of its step is the freshest; a rank's record says which steps are that rank's.
    """
    num_ranks = group.ranks[0].num_ranks
    if any(job.id in condition.job_ids for condition in group.conditions):
        return Place(ranks_done=num_ranks if _is_denoised(job) else _so_far(job, group), doing="waits for storage")
    if job.rank is None:
        return Place(ranks_done=0.0, doing="begins")
    if _is_denoised(job) and job.rank == num_ranks - 1:
        is_decoding = any(rank.job_id == job.id and rank.activity == "decoding" for rank in group.ranks)
        return Place(ranks_done=num_ranks, doing="decoding" if is_decoding else "being written")
    return Place(ranks_done=_so_far(job, group), doing=f"step {job.step} of {job.steps}")


def _so_far(job: "JobView", group: "GroupStatus") -> float:
    """Count the ranks behind a sample, the part of the present one included."""
    if job.rank is None:
        return 0.0
    rank = next((rank for rank in group.ranks if rank.rank == job.rank), None)
    first, end = (rank.step_range if rank else None) or (0, 0)
    # The note names the step that is about to be done, so a rank's last one is the end less one.
    if rank is not None and rank.job_id != job.id and job.step >= end - 1:
        return job.rank + 1.0  # through, and on its way to the next rank
    # Where the record is older than the note, the range is that of the sample before: off by one at most.
    return job.rank + (min(1.0, max(0.0, (job.step - first) / (end - first))) if end > first else 0.0)


def _is_denoised(job: "JobView") -> bool:
    return job.steps > 0 and job.step >= job.steps

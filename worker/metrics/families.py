"""Every metric that a launcher serves: its name, its kind, its labels and what it means. Pure data.

Labels are few and bounded: a queue, a state, the number of a group in its launcher, a rank. Never a job.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram", "info"]

_GROUP = ("group",)
_RANK = ("group", "rank")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One metric."""

    #: Its name as it is asked for in Prometheus; of a histogram without _bucket, _sum and _count.
    name: str
    #: Its kind.
    kind: Kind
    #: What it means, as a sentence without its full stop.
    help: str
    #: Names of its labels; of an info those besides are in the record.
    labels: tuple[str, ...] = ()
    #: Whether it is told of while Redis is away.
    always: bool = False


LAUNCHER = (
    Family(name="svdq_build_info", kind="info", help="Version of svdq", always=True),
    Family(name="svdq_start_time_seconds", kind="gauge", help="When the launcher was started", always=True),
    Family(name="svdq_redis_up", kind="gauge", help="Whether Redis answered this scrape", always=True),
    Family(name="svdq_group_up", kind="gauge", help="Whether the torchrun of a group runs", labels=_GROUP, always=True),
    Family(
        name="svdq_group_ranks", kind="gauge", help="Ranks that a group was started with", labels=_GROUP, always=True
    ),
    Family(
        name="svdq_group_ranks_up",
        kind="gauge",
        help="Ranks of a group whose process runs",
        labels=_GROUP,
        always=True,
    ),
    Family(
        name="svdq_group_restarts_total",
        kind="counter",
        help="Times that the ranks of a group were started again because one had died",
        labels=_GROUP,
        always=True,
    ),
)

QUEUES = (
    Family(
        name="svdq_jobs",
        kind="gauge",
        help="Jobs by queue and state; those in state queued are the length of the queue",
        labels=("queue", "state"),
    ),
    Family(
        name="svdq_queue_oldest_job_age_seconds",
        kind="gauge",
        help="For how long the oldest job at the front of a queue has waited; 0 when none waits",
        labels=("queue",),
    ),
    Family(name="svdq_queue_eta_seconds", kind="gauge", help="Until all that waits and is in flight will be done"),
    Family(name="svdq_pauses", kind="gauge", help="Reasons for which no jobs are taken"),
)

GROUPS = (
    Family(
        name="svdq_samples_in_flight", kind="gauge", help="Jobs that a group has taken and not ended", labels=_GROUP
    ),
    Family(
        name="svdq_videos_finished_total",
        kind="counter",
        help="Videos finished since the launcher was started",
        labels=_GROUP,
    ),
    Family(
        name="svdq_videos_failed_total",
        kind="counter",
        help="Jobs failed since the launcher was started",
        labels=_GROUP,
    ),
    Family(
        name="svdq_jobs_taken_back_total",
        kind="counter",
        help="Jobs of dead groups given back to their queues since the launcher was started",
        labels=_GROUP,
    ),
    Family(
        name="svdq_videos_resumed_total",
        kind="counter",
        help="Videos taken up again from a checkpoint since the launcher was started",
        labels=_GROUP,
    ),
)

RANKS = (
    Family(name="svdq_rank_info", kind="info", help="What a rank is", labels=_RANK),
    Family(
        name="svdq_rank_record_age_seconds", kind="gauge", help="For how long a rank has told nothing", labels=_RANK
    ),
    Family(
        name="svdq_rank_busy_ratio",
        kind="gauge",
        help="Part of the last ten seconds in which a rank computed",
        labels=_RANK,
    ),
    Family(
        name="svdq_rank_storage_wait_seconds",
        kind="gauge",
        help="For how long a rank has waited for the storage; 0 when it does not",
        labels=_RANK,
    ),
    Family(
        name="svdq_rank_resident_memory_bytes", kind="gauge", help="Resident memory of a rank's process", labels=_RANK
    ),
    Family(
        name="svdq_rank_gpu_memory_bytes", kind="gauge", help="GPU memory that PyTorch holds for a rank", labels=_RANK
    ),
    Family(
        name="svdq_rank_gpu_memory_size_bytes", kind="gauge", help="Memory that the GPU of a rank has", labels=_RANK
    ),
    Family(name="svdq_step_seconds", kind="histogram", help="Seconds of a denoising step", labels=_RANK),
    Family(name="svdq_encode_seconds", kind="histogram", help="Seconds of encoding a photo", labels=_RANK),
    Family(name="svdq_decode_seconds", kind="histogram", help="Seconds of decoding a video", labels=_RANK),
    Family(
        name="svdq_write_seconds",
        kind="histogram",
        help="Seconds of writing the files of a video, waiting for the storage included",
        labels=_RANK,
    ),
    Family(name="svdq_checkpoints_total", kind="counter", help="Checkpoints written", labels=_RANK),
    Family(name="svdq_checkpoint_bytes_total", kind="counter", help="Bytes of checkpoints written", labels=_RANK),
)

FAMILIES = {family.name: family for family in (*LAUNCHER, *QUEUES, *GROUPS, *RANKS)}

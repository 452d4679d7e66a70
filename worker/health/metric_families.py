"""The table of all metrics that a launcher serves: name, kind, labels and meaning.

Labels have few values: a queue, a state, the number of a group in its launcher, a rank. None is a job.
"""

from typing import Any, Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

Kind = Literal["gauge", "counter", "histogram", "info"]

_CLASSES = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
    "info": InfoMetricFamily,
}


class Family(NamedTuple):
    """One metric."""

    #: Its name in Prometheus; of a histogram without _bucket, _sum and _count.
    name: str
    #: Its kind.
    kind: Kind
    #: Its meaning, as a sentence without a full stop.
    help: str
    #: Names of its labels; an info has further ones.
    labels: tuple[str, ...] = ()
    #: Whether it has samples while Redis is unavailable.
    always: bool = False


_GROUP = ("group",)
_RANK = ("group", "rank")
_TABLE = (
    # The launcher and its processes.
    Family("svdq_build_info", "info", "Version of svdq", always=True),
    Family("svdq_start_time_seconds", "gauge", "When the launcher started", always=True),
    Family("svdq_redis_up", "gauge", "Whether Redis answered this scrape", always=True),
    Family("svdq_group_up", "gauge", "Whether the torchrun of a group runs", _GROUP, always=True),
    Family("svdq_group_ranks", "gauge", "Number of ranks that a group was started with", _GROUP, always=True),
    Family("svdq_group_ranks_up", "gauge", "Number of ranks of a group whose process runs", _GROUP, always=True),
    Family(
        "svdq_group_restarts_total",
        "counter",
        "Number of times that the ranks of a group were restarted because one died",
        _GROUP,
        always=True,
    ),
    # Queues.
    Family("svdq_jobs", "gauge", "Number of jobs by queue and state; state queued is the queue", ("queue", "state")),
    Family(
        "svdq_queue_oldest_job_age_seconds",
        "gauge",
        "How long the oldest job at the front of a queue has waited; 0 for an empty queue",
        ("queue",),
    ),
    Family("svdq_queue_eta_seconds", "gauge", "Time until all jobs that wait or are in flight will be done"),
    Family("svdq_pauses", "gauge", "Number of reasons for which no jobs are taken"),
    # Groups.
    Family("svdq_samples_in_flight", "gauge", "Number of jobs that a group has taken and not ended", _GROUP),
    Family("svdq_videos_finished_total", "counter", "Videos finished since the launcher started", _GROUP),
    Family("svdq_videos_failed_total", "counter", "Jobs failed since the launcher started", _GROUP),
    Family(
        "svdq_jobs_taken_back_total",
        "counter",
        "Jobs of dead groups returned to their queues since the launcher started",
        _GROUP,
    ),
    Family(
        "svdq_videos_resumed_total", "counter", "Videos resumed from a checkpoint since the launcher started", _GROUP
    ),
    # Ranks.
    Family("svdq_rank_info", "info", "Host, device and model of a rank", _RANK),
    Family("svdq_rank_record_age_seconds", "gauge", "Age of a rank's last record", _RANK),
    Family("svdq_rank_busy_ratio", "gauge", "Share of the last ten seconds in which a rank computed", _RANK),
    Family("svdq_rank_storage_wait_seconds", "gauge", "How long a rank has waited for the storage", _RANK),
    Family("svdq_rank_resident_memory_bytes", "gauge", "Resident memory of a rank's process", _RANK),
    Family("svdq_rank_gpu_memory_bytes", "gauge", "GPU memory that PyTorch holds for a rank", _RANK),
    Family("svdq_rank_gpu_memory_size_bytes", "gauge", "Memory of a rank's GPU", _RANK),
    Family("svdq_step_seconds", "histogram", "Seconds of a denoising step", _RANK),
    Family("svdq_encode_seconds", "histogram", "Seconds of encoding a photo", _RANK),
    Family("svdq_decode_seconds", "histogram", "Seconds of decoding a video", _RANK),
    Family(
        "svdq_write_seconds",
        "histogram",
        "Seconds of writing the files of a video, including waits for the storage",
        _RANK,
    ),
    Family("svdq_checkpoints_total", "counter", "Checkpoints written", _RANK),
    Family("svdq_checkpoint_bytes_total", "counter", "Bytes of checkpoints written", _RANK),
)
FAMILIES = {family.name: family for family in _TABLE}


def empty_metrics() -> dict[str, Any]:
    """Return prometheus_client's object of each metric by its name, without samples."""
    return {
        # The library adds _info itself.
        name: _CLASSES[family.kind](name.removesuffix("_info"), f"{family.help}.", labels=family.labels)
        for name, family in FAMILIES.items()
    }

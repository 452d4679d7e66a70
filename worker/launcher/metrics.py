"""Serves metrics to Prometheus from a thread of the launcher: its groups, and what Redis holds of queues and ranks.

Ranks do no work for a scrape. Each launcher reports only its own ranks, so that several launchers count none twice;
queues are shared, and every launcher reports the same. While Redis is unavailable, the launcher reports its processes.
"""

import logging
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import redis
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq.job import Job
from rq.utils import as_text, utcparse

from svdq.pipeline.errors import InputError
from svdq.producer.queue import queues
from svdq.producer.status.ranks import BOUNDS_S, RankStatus, Timings
from svdq.producer.status.snapshot import Snapshot, take

if TYPE_CHECKING:
    from svdq.worker.launcher.torchrun import GroupProcess

logger = logging.getLogger(__name__)

#: Seconds after which Redis counts as unavailable; Prometheus gives up after ten.
ANSWER_TIMEOUT_S = 2.0
#: Number of jobs at the front of a queue whose age is read: some may have been moved there, before older ones.
FRONT = 10


class Family(NamedTuple):
    """One metric."""

    #: Its name in Prometheus; of a histogram without _bucket, _sum and _count.
    name: str
    kind: Literal["gauge", "counter", "histogram", "info"]
    #: Its meaning, as a sentence without a full stop.
    help: str
    #: Names of its labels, which have few values: none is a job. An info has further ones.
    labels: tuple[str, ...] = ()


_CLASSES = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
    "info": InfoMetricFamily,
}
_GROUP = ("group",)
_RANK = ("group", "rank")
FAMILIES = (
    # The launcher and its processes.
    Family("svdq_build_info", "info", "Version of svdq"),
    Family("svdq_start_time_seconds", "gauge", "When the launcher started"),
    Family("svdq_redis_up", "gauge", "Whether Redis answered this scrape"),
    Family("svdq_group_up", "gauge", "Whether the torchrun of a group runs", _GROUP),
    Family("svdq_group_ranks", "gauge", "Number of ranks that a group was started with", _GROUP),
    Family("svdq_group_ranks_up", "gauge", "Number of ranks of a group whose process runs", _GROUP),
    Family("svdq_group_failed_gpus", "gauge", "Number of GPUs that a group leaves out because they failed", _GROUP),
    # Queues.
    Family("svdq_redis_memory_ratio", "gauge", "Memory that Redis uses, as a share of its maxmemory"),
    Family("svdq_jobs", "gauge", "Number of jobs by queue and state; state queued is the queue", ("queue", "state")),
    Family("svdq_queue_oldest_job_age_seconds", "gauge", "Wait of the oldest job in front of a queue", ("queue",)),
    Family("svdq_queue_eta_seconds", "gauge", "Time until all jobs that wait or are in flight will be done"),
    Family("svdq_pauses", "gauge", "Number of reasons for which no jobs are taken"),
    # Groups.
    Family("svdq_group_restarts_total", "counter", "Restarts of the ranks of a group because one died", _GROUP),
    Family("svdq_samples_in_flight", "gauge", "Number of jobs that a group has taken and not ended", _GROUP),
    Family("svdq_videos_finished_total", "counter", "Videos finished", _GROUP),
    Family("svdq_videos_failed_total", "counter", "Jobs failed", _GROUP),
    Family("svdq_jobs_taken_back_total", "counter", "Jobs of dead groups returned to their queues", _GROUP),
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
    Family("svdq_write_seconds", "histogram", "Seconds of writing a video, with waits for the storage", _RANK),
)


class LauncherCollector(Collector):
    """Makes the metrics of one launcher at each scrape."""

    def __init__(self, connection: redis.Redis, groups: Sequence["GroupProcess"]) -> None:
        """Make it, without contacting Redis; the label of a group is its index."""
        self._connection = connection
        self._groups = groups
        self._started_at = time.time()
        self._was_refused = False

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        # The library adds _info itself.
        metrics: dict[str, Any] = {
            family.name: _CLASSES[family.kind](
                family.name.removesuffix("_info"), f"{family.help}.", labels=family.labels
            )
            for family in FAMILIES
        }
        is_redis_up = False
        try:
            snapshot = take(self._connection)
            _add_queues(metrics, snapshot, _oldest_s(self._connection, snapshot.at))
            memory: Any = self._connection.info("memory")
            if memory["maxmemory"]:
                metrics["svdq_redis_memory_ratio"].add_metric([], memory["used_memory"] / memory["maxmemory"])
            for group, rank in self._own_ranks(snapshot):
                _add_rank(metrics, group, rank, snapshot.at)
            is_redis_up, self._was_refused = True, False
        except redis.RedisError:
            pass  # svdq_redis_up reports it
        except Exception as error:  # noqa: BLE001 - anyone can write to Redis; the endpoint answers nevertheless
            if not self._was_refused:
                logger.warning("Cannot make metrics of the data in Redis: %s: %s", type(error).__name__, error)
            self._was_refused = True
        self._add_launcher(metrics, is_redis_up=is_redis_up)
        return metrics.values()

    def _own_ranks(self, snapshot: Snapshot) -> list[tuple[str, RankStatus]]:
        """Return the ranks that are processes of this launcher, each with the label of its group."""
        host = socket.gethostname()
        labels = {
            process: str(index) for index, group in enumerate(self._groups) for process in group.running_pids().items()
        }
        return [
            (labels[rank.rank, rank.pid], rank)
            for group in snapshot.groups
            for rank in group.ranks
            if rank.host == host and (rank.rank, rank.pid) in labels
        ]

    def _add_launcher(self, metrics: dict[str, Any], *, is_redis_up: bool) -> None:
        metrics["svdq_build_info"].add_metric([], {"version": version("svdq")})
        metrics["svdq_start_time_seconds"].add_metric([], self._started_at)
        metrics["svdq_redis_up"].add_metric([], is_redis_up)
        for index, group in enumerate(self._groups):
            label = [str(index)]
            num_up = len(group.running_pids()) if group.is_running else 0
            metrics["svdq_group_up"].add_metric(label, group.is_running)
            metrics["svdq_group_ranks"].add_metric(label, group.num_ranks)
            metrics["svdq_group_ranks_up"].add_metric(label, num_up)
            metrics["svdq_group_failed_gpus"].add_metric(label, group.num_failed_gpus)


def _add_queues(metrics: dict[str, Any], snapshot: Snapshot, oldest_s: Mapping[str, float]) -> None:
    for name, counts in snapshot.queues.items():
        for status, number in counts.items():
            metrics["svdq_jobs"].add_metric([name, status], number)
    for name, age_s in oldest_s.items():
        metrics["svdq_queue_oldest_job_age_seconds"].add_metric([name], age_s)
    if snapshot.estimate.eta_s is not None:
        metrics["svdq_queue_eta_seconds"].add_metric([], snapshot.estimate.eta_s)
    metrics["svdq_pauses"].add_metric([], len(snapshot.pauses))


def _add_rank(metrics: dict[str, Any], group: str, rank: RankStatus, now: float) -> None:
    label = [group, str(rank.rank)]
    if rank.intake is not None:
        of_group = {
            "svdq_group_restarts_total": rank.restart_count,
            "svdq_samples_in_flight": len(rank.intake.in_flight),
            "svdq_videos_finished_total": rank.intake.finished,
            "svdq_videos_failed_total": rank.intake.failed,
            "svdq_jobs_taken_back_total": rank.intake.taken_back,
        }
        for name, number in of_group.items():
            metrics[name].add_metric([group], number)
    info = {name: str(getattr(rank, name)) for name in ("host", "device", "device_name", "model")}
    metrics["svdq_rank_info"].add_metric(label, {"name": rank.group} | info)
    values = {
        "svdq_rank_record_age_seconds": max(0.0, now - rank.at),
        "svdq_rank_busy_ratio": rank.busy_share,
        "svdq_rank_storage_wait_seconds": max(0.0, *(now - condition.since for condition in rank.conditions), 0.0),
        "svdq_rank_resident_memory_bytes": rank.rss_bytes,
        "svdq_rank_gpu_memory_bytes": rank.gpu_bytes,
        "svdq_rank_gpu_memory_size_bytes": rank.gpu_total_bytes,
    }
    for name, value in values.items():
        if value is not None:
            metrics[name].add_metric(label, value)
    is_last = rank.rank == rank.num_ranks - 1
    # A rank reports only the kinds of work that it does, those with 0 that it has not done yet.
    decodes = is_last or "decode" in rank.timings
    for kind, is_done_here in (("step", True), ("encode", rank.rank == 0), ("decode", decodes), ("write", is_last)):
        timings = rank.timings.get(kind) or Timings(counts=(0,) * (len(BOUNDS_S) + 1), sum_s=0.0)
        if is_done_here and len(timings.counts) == len(BOUNDS_S) + 1:  # else of another version
            buckets = list(zip([*map(str, BOUNDS_S), "+Inf"], accumulate(timings.counts), strict=True))
            metrics[f"svdq_{kind}_seconds"].add_metric(label, buckets, timings.sum_s)


def _oldest_s(connection: redis.Redis, now: float) -> dict[str, float]:
    """Return for how many seconds the oldest job at the front of each queue has waited; 0 for an empty queue."""
    with connection.pipeline(transaction=False) as pipeline:
        for queue in queues(connection):
            pipeline.lrange(queue.key, 0, FRONT - 1)
        fronts = pipeline.execute()
        for job_id in [job_id for front in fronts for job_id in front]:
            pipeline.hget(Job.key_for(as_text(job_id)), "enqueued_at")
        # A record that is not a job's is an error in its place, and the others are read.
        times = iter(pipeline.execute(raise_on_error=False))
    return {
        queue.name: max((_age_s(next(times), now) for _ in front), default=0.0)
        for queue, front in zip(queues(connection), fronts, strict=True)
    }


def _age_s(enqueued_at: object, now: float) -> float:
    try:
        return max(0.0, now - utcparse(enqueued_at.decode()).timestamp()) if isinstance(enqueued_at, bytes) else 0.0
    except ValueError:  # anyone can write to Redis
        return 0.0


class MetricsEndpoint:
    """The HTTP server of one launcher, as a context manager."""

    def __init__(self, address: str, port: int, redis_url: str, groups: Sequence["GroupProcess"]) -> None:
        """Serve the metrics of a launcher's groups, the latest of which may be added later; port 0 takes a free one.

        Raises:
            InputError: it cannot listen there.
        """
        self._connection = redis.Redis.from_url(
            redis_url,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=ANSWER_TIMEOUT_S,
            socket_timeout=ANSWER_TIMEOUT_S,
        )
        registry = CollectorRegistry()
        registry.register(LauncherCollector(self._connection, groups))
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except (OSError, OverflowError, UnicodeError) as error:
            self._connection.close()
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"Metrics cannot be served at port {port} of {address!r} ({reason}); choose another --metrics-port or "
                "--metrics-address."
            ) from error
        host = f"[{address}]" if self._server.address_family is socket.AF_INET6 else address
        logger.info("Metrics are at http://%s:%d/metrics.", host, self._server.server_port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._connection.close()

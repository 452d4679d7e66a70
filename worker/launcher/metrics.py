"""Serves metrics to Prometheus from a thread of the launcher: queues, and its own groups, also without Redis."""

import contextlib
import logging
import socket
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import redis
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector
from redis.backoff import NoBackoff
from redis.retry import Retry

from svdq.pipeline.errors import InputError
from svdq.producer.status.ranks import RankStatus
from svdq.producer.status.snapshot import Snapshot, take

if TYPE_CHECKING:
    from svdq.worker.launcher.group_process import GroupProcess

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0  # seconds after which Redis counts as unavailable; Prometheus gives up after ten


class MetricSpec(NamedTuple):
    """A metric of Prometheus."""

    name: str  # of a summary without _sum and _count
    kind: Literal["gauge", "counter", "summary"]
    help: str
    labels: tuple[str, ...] = ()  # none is a job: each has few values


_CLASSES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "summary": SummaryMetricFamily}
_GROUP = ("group",)
_RANK = ("group", "rank")
_VERSIONS_OF = ("svdq", "torch", "diffusers")
#: Each is used by an alert or the dashboard in deploy/.
FAMILIES = (
    MetricSpec("svdq_build_info", "gauge", "Versions of the launcher and its ranks; the value is 1", _VERSIONS_OF),
    MetricSpec("svdq_redis_up", "gauge", "Whether Redis answered this scrape"),
    MetricSpec("svdq_group_ranks", "gauge", "Number of ranks that a group was started with", _GROUP),
    MetricSpec("svdq_group_ranks_up", "gauge", "Number of ranks of a group whose process runs", _GROUP),
    MetricSpec(
        "svdq_group_asleep",
        "gauge",
        "Whether a group's ranks have ended until there is a job, or `svdq resume`",
        _GROUP,
    ),
    MetricSpec("svdq_group_failed_gpus", "gauge", "Number of GPUs that a group leaves out because they failed", _GROUP),
    MetricSpec("svdq_redis_memory_ratio", "gauge", "Memory that Redis uses, as a share of its maxmemory"),
    MetricSpec("svdq_jobs", "gauge", "Number of jobs by queue and state", ("queue", "state")),
    MetricSpec("svdq_queue_eta_seconds", "gauge", "Time until all jobs that wait or are in flight will be done"),
    MetricSpec("svdq_pauses", "gauge", "Number of reasons for which no jobs are taken"),
    MetricSpec("svdq_webhook_wait_seconds", "gauge", "How long the oldest webhook has waited until it is accepted"),
    MetricSpec("svdq_group_restarts_total", "counter", "Restarts of the ranks of a group because one died", _GROUP),
    MetricSpec("svdq_jobs_in_flight", "gauge", "Number of jobs that a group has taken and not ended", _GROUP),
    MetricSpec("svdq_videos_finished_total", "counter", "Videos finished", _GROUP),
    MetricSpec("svdq_videos_failed_total", "counter", "Jobs failed", _GROUP),
    MetricSpec("svdq_rank_busy_ratio", "gauge", "Share of the last ten seconds in which a rank computed", _RANK),
    MetricSpec("svdq_rank_storage_wait_seconds", "gauge", "How long a rank has waited for the storage", _RANK),
    MetricSpec("svdq_rank_resident_bytes", "gauge", "Resident memory of a rank's process", _RANK),
    MetricSpec("svdq_rank_gpu_bytes", "gauge", "GPU memory that a rank has reserved", _RANK),
    MetricSpec("svdq_rank_gpu_total_bytes", "gauge", "Memory of a rank's GPU", _RANK),
    MetricSpec("svdq_step_seconds", "summary", "Seconds of a denoising step", _RANK),
)

#: Name of a family, values of its labels, and its value (of a summary: count and sum).
Measurement = tuple[str, tuple[str, ...], tuple[float, ...]]


class LauncherCollector(Collector):
    """Makes the metrics of one launcher at each scrape."""

    def __init__(self, connection: redis.Redis, groups: Sequence["GroupProcess"]) -> None:
        self._connection = connection
        self._groups = groups

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        metrics: dict[str, Any] = {
            family.name: _CLASSES[family.kind](family.name, f"{family.help}.", labels=family.labels)
            for family in FAMILIES
        }
        measured: list[Measurement] = []
        is_redis_up = True
        try:
            snapshot = take(self._connection)
            measured += self._of_queues(snapshot)
            for group, rank in self._own_ranks(snapshot):
                measured += _of_rank(group, rank, snapshot.at)
        except redis.RedisError:
            is_redis_up = False
        for name, labels, values in [*measured, *self._of_launcher(is_redis_up=is_redis_up)]:
            metrics[name].add_metric(labels, *values)
        return metrics.values()

    def _own_ranks(self, snapshot: Snapshot) -> list[tuple[str, RankStatus]]:
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

    def _of_launcher(self, *, is_redis_up: bool) -> Iterator[Measurement]:
        yield "svdq_build_info", tuple(map(version, _VERSIONS_OF)), (1,)
        yield "svdq_redis_up", (), (is_redis_up,)
        for index, group in enumerate(self._groups):
            label = (str(index),)
            yield "svdq_group_ranks", label, (group.num_ranks,)
            yield "svdq_group_ranks_up", label, (len(group.running_pids()) if group.is_running else 0,)
            yield "svdq_group_asleep", label, (group.is_resting,)
            yield "svdq_group_failed_gpus", label, (group.num_failed_gpus,)

    def _of_queues(self, snapshot: Snapshot) -> Iterator[Measurement]:
        for name, counts in snapshot.queues.items():
            for status, number in counts.items():
                yield "svdq_jobs", (name, status), (number,)
        if snapshot.estimate.eta_s is not None:
            yield "svdq_queue_eta_seconds", (), (snapshot.estimate.eta_s,)
        yield "svdq_pauses", (), (len(snapshot.pauses),)
        oldest_at = snapshot.outbox.oldest_at
        yield "svdq_webhook_wait_seconds", (), (0.0 if oldest_at is None else max(0.0, snapshot.at - oldest_at),)
        memory: Any = self._connection.info("memory")
        if memory["maxmemory"]:
            yield "svdq_redis_memory_ratio", (), (memory["used_memory"] / memory["maxmemory"],)


def _of_rank(group: str, rank: RankStatus, now: float) -> Iterator[Measurement]:
    label = (group, str(rank.rank))
    if rank.intake is not None:
        yield "svdq_group_restarts_total", (group,), (rank.restart_count,)
        yield "svdq_jobs_in_flight", (group,), (len(rank.intake.in_flight),)
        yield "svdq_videos_finished_total", (group,), (rank.intake.finished,)
        yield "svdq_videos_failed_total", (group,), (rank.intake.failed,)
    yield "svdq_rank_busy_ratio", label, (rank.busy_share,)
    wait_s = max((now - condition.since for condition in rank.conditions), default=0.0)
    yield "svdq_rank_storage_wait_seconds", label, (max(0.0, wait_s),)
    yield "svdq_rank_resident_bytes", label, (rank.rss_bytes,)
    if rank.gpu_bytes is not None:
        yield "svdq_rank_gpu_bytes", label, (rank.gpu_bytes,)
    if rank.gpu_total_bytes is not None:
        yield "svdq_rank_gpu_total_bytes", label, (rank.gpu_total_bytes,)
    yield "svdq_step_seconds", label, (rank.num_steps, rank.steps_s)


@contextlib.contextmanager
def serve_metrics(address: str, port: int, redis_url: str, groups: Sequence["GroupProcess"]) -> Iterator[None]:
    """Serve the metrics of `groups`, which may grow, during a block; raise an InputError if it cannot listen there."""
    connection = redis.Redis.from_url(
        redis_url, retry=Retry(NoBackoff(), 0), socket_connect_timeout=ANSWER_TIMEOUT_S, socket_timeout=ANSWER_TIMEOUT_S
    )
    registry = CollectorRegistry()
    registry.register(LauncherCollector(connection, groups))
    try:
        server, thread = start_http_server(port, address, registry)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"Metrics cannot be served at port {port} of {address!r} ({reason}); choose another --metrics-port or "
            "SVDQ_METRICS_ADDRESS."
        ) from error
    host = f"[{address}]" if server.address_family is socket.AF_INET6 else address
    logger.info("Metrics are at http://%s:%d/metrics.", host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        connection.close()

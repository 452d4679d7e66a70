"""Serves metrics to Prometheus from a thread of the launcher: its groups, and what Redis holds of queues and ranks.

Ranks do no work for a scrape. Each launcher reports only its own ranks, so that several launchers count none twice;
queues are shared, and every launcher reports the same. While Redis is unavailable, the launcher reports its processes.
"""

import logging
import socket
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

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
    from svdq.worker.launcher.torchrun import GroupProcess

logger = logging.getLogger(__name__)

#: Seconds after which Redis counts as unavailable; Prometheus gives up after ten.
ANSWER_TIMEOUT_S = 2.0


class Family(NamedTuple):
    """One metric."""

    #: Its name in Prometheus; of a summary without _sum and _count.
    name: str
    kind: Literal["gauge", "counter", "summary"]
    #: Its meaning, as a sentence without a full stop.
    help: str
    #: Names of its labels, which have few values: none is a job.
    labels: tuple[str, ...] = ()


_CLASSES = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "summary": SummaryMetricFamily,
}
_GROUP = ("group",)
_RANK = ("group", "rank")
FAMILIES = (
    # The launcher and its processes.
    Family("svdq_redis_up", "gauge", "Whether Redis answered this scrape"),
    Family("svdq_group_ranks", "gauge", "Number of ranks that a group was started with", _GROUP),
    Family("svdq_group_ranks_up", "gauge", "Number of ranks of a group whose process runs", _GROUP),
    Family("svdq_group_failed_gpus", "gauge", "Number of GPUs that a group leaves out because they failed", _GROUP),
    # Queues.
    Family("svdq_redis_memory_ratio", "gauge", "Memory that Redis uses, as a share of its maxmemory"),
    Family("svdq_jobs", "gauge", "Number of jobs by queue and state; state queued is the queue", ("queue", "state")),
    Family("svdq_queue_eta_seconds", "gauge", "Time until all jobs that wait or are in flight will be done"),
    Family("svdq_pauses", "gauge", "Number of reasons for which no jobs are taken"),
    # Groups.
    Family("svdq_group_restarts_total", "counter", "Restarts of the ranks of a group because one died", _GROUP),
    Family("svdq_samples_in_flight", "gauge", "Number of jobs that a group has taken and not ended", _GROUP),
    Family("svdq_videos_finished_total", "counter", "Videos finished", _GROUP),
    Family("svdq_videos_failed_total", "counter", "Jobs failed", _GROUP),
    # Ranks.
    Family("svdq_rank_busy_ratio", "gauge", "Share of the last ten seconds in which a rank computed", _RANK),
    Family("svdq_rank_storage_wait_seconds", "gauge", "How long a rank has waited for the storage", _RANK),
    Family("svdq_step_seconds", "summary", "Seconds of a denoising step", _RANK),
)


class LauncherCollector(Collector):
    """Makes the metrics of one launcher at each scrape."""

    def __init__(self, connection: redis.Redis, groups: Sequence["GroupProcess"]) -> None:
        """Make it, without contacting Redis; the label of a group is its index."""
        self._connection = connection
        self._groups = groups
        self._was_refused = False

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        metrics: dict[str, Any] = {
            family.name: _CLASSES[family.kind](family.name, f"{family.help}.", labels=family.labels)
            for family in FAMILIES
        }
        is_redis_up = False
        try:
            snapshot = take(self._connection)
            _add_queues(metrics, snapshot)
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
        metrics["svdq_redis_up"].add_metric([], is_redis_up)
        for index, group in enumerate(self._groups):
            label = [str(index)]
            num_up = len(group.running_pids()) if group.is_running else 0
            metrics["svdq_group_ranks"].add_metric(label, group.num_ranks)
            metrics["svdq_group_ranks_up"].add_metric(label, num_up)
            metrics["svdq_group_failed_gpus"].add_metric(label, group.num_failed_gpus)


def _add_queues(metrics: dict[str, Any], snapshot: Snapshot) -> None:
    for name, counts in snapshot.queues.items():
        for status, number in counts.items():
            metrics["svdq_jobs"].add_metric([name, status], number)
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
        }
        for name, number in of_group.items():
            metrics[name].add_metric([group], number)
    wait_s = max(0.0, *(now - condition.since for condition in rank.conditions), 0.0)
    metrics["svdq_rank_busy_ratio"].add_metric(label, rank.busy_share)
    metrics["svdq_rank_storage_wait_seconds"].add_metric(label, wait_s)
    metrics["svdq_step_seconds"].add_metric(label, rank.num_steps, rank.steps_s)


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

"""Serves metrics to Prometheus from a thread of the launcher: its groups, and what Redis holds of queues and ranks.

Ranks do no work for a scrape. Each launcher reports only its own ranks, so that several launchers count none twice;
queues are shared, and every launcher reports the same. While Redis is unavailable, the launcher reports its processes.
"""

import logging
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from types import TracebackType
from typing import Any, Protocol, Self

import redis
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq.job import Job
from rq.utils import as_text, utcparse

from svdq.pipeline.errors import InputError
from svdq.producer.queue import queues
from svdq.producer.status.ranks import BOUNDS_S, RankStatus, Timings
from svdq.producer.status.snapshot import Snapshot, take
from svdq.worker.health.metric_families import empty_metrics

logger = logging.getLogger(__name__)

#: Seconds for which an answer of Redis is reused: more scrapes cause no more requests.
FRESH_S = 1.0
#: Seconds after which Redis counts as unavailable; Prometheus gives up after ten.
ANSWER_TIMEOUT_S = 2.0
#: Number of jobs at the front of a queue whose age is read: some may have been moved there, before older ones.
FRONT = 10


class OwnGroup(Protocol):
    """A group of the launcher."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that it was started with."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether its torchrun runs."""
        ...

    def pids(self) -> Mapping[int, int]:
        """Return the process ids of its ranks that have started, by rank."""
        ...

    def running_pids(self) -> Mapping[int, int]:
        """Return the process ids of its ranks that run, by rank."""
        ...


class LauncherCollector(Collector):
    """Makes the metrics of one launcher at each scrape."""

    def __init__(self, connection: redis.Redis, groups: Sequence[OwnGroup]) -> None:
        """Make it, without contacting Redis.

        Args:
            connection: used by this collector alone; gives up soon.
            groups: the launcher's; the label of a group is its index.
        """
        self._connection = connection
        self._groups = groups
        self._started_at = time.time()
        #: One scrape at a time.
        self._lock = threading.Lock()
        self._read_at = -FRESH_S
        #: The last answer of Redis: a snapshot, and the age of the oldest job of each queue in seconds.
        self._answer: tuple[Snapshot, dict[str, float]] | None = None
        self._was_refused = False
        #: The restarts of each group; kept while Redis is unavailable.
        self._restart_counts: dict[str, int] = {}
        #: By metric and group, what each process that was rank 0 has counted. A new process begins at 0 and may count
        #: more than the last one before its first scrape, so only their sum never decreases.
        self._counted: dict[tuple[str, str], dict[int, int]] = {}

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        with self._lock:
            metrics = empty_metrics()
            answer = self._read_redis()
            own = self._own_ranks(answer[0]) if answer is not None else []
            for group, rank in own:
                self._remember(group, rank)
            for (name, group), counted in self._counted.items():
                metrics[name].add_metric([group], sum(counted.values()))
            self._add_launcher(metrics, is_redis_up=answer is not None)
            if answer is not None:
                _add_queues(metrics, *answer)
                for group, rank in own:
                    _add_rank(metrics, group, rank, answer[0].at)
            return list(metrics.values())

    def _read_redis(self) -> tuple[Snapshot, dict[str, float]] | None:
        if time.monotonic() < self._read_at + FRESH_S:
            return self._answer
        self._answer = None
        try:
            snapshot = take(self._connection)
            self._answer = snapshot, _oldest_s(self._connection, snapshot.at)
            self._was_refused = False
        except redis.RedisError:
            pass  # svdq_redis_up reports it
        except Exception as error:  # noqa: BLE001 - anyone can write to Redis; the endpoint answers nevertheless
            if not self._was_refused:
                logger.warning("Cannot make metrics of the data in Redis: %s: %s", type(error).__name__, error)
            self._was_refused = True
        self._read_at = time.monotonic()
        return self._answer

    def _remember(self, group: str, rank: RankStatus) -> None:
        """Keep what must outlive the process that reported it."""
        self._restart_counts[group] = max(self._restart_counts.get(group, 0), rank.restart_count)
        if rank.intake is not None:
            for name, number in (
                ("svdq_videos_finished_total", rank.intake.finished),
                ("svdq_videos_failed_total", rank.intake.failed),
                ("svdq_jobs_taken_back_total", rank.intake.taken_back),
                ("svdq_videos_resumed_total", rank.resumed),
            ):
                self._counted.setdefault((name, group), {})[rank.pid] = number

    def _own_ranks(self, snapshot: Snapshot) -> list[tuple[str, RankStatus]]:
        """Return the ranks that are processes of this launcher, each with the label of its group."""
        host = socket.gethostname()
        labels = {
            (rank, pid): str(index) for index, group in enumerate(self._groups) for rank, pid in group.pids().items()
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
            metrics["svdq_group_restarts_total"].add_metric(label, self._restart_counts.get(label[0], 0))


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
        metrics["svdq_samples_in_flight"].add_metric([group], len(rank.intake.in_flight))
    info = {name: str(getattr(rank, name)) for name in ("host", "device", "device_name", "model")}
    metrics["svdq_rank_info"].add_metric(label, {"name": rank.group} | info)
    values = {
        "svdq_rank_record_age_seconds": max(0.0, now - rank.at),
        "svdq_rank_busy_ratio": rank.busy_share,
        "svdq_rank_storage_wait_seconds": max(0.0, *(now - condition.since for condition in rank.conditions), 0.0),
        "svdq_rank_resident_memory_bytes": rank.rss_bytes,
        "svdq_rank_gpu_memory_bytes": rank.gpu_bytes,
        "svdq_rank_gpu_memory_size_bytes": rank.gpu_total_bytes,
        "svdq_checkpoints_total": rank.checkpoints,
        "svdq_checkpoint_bytes_total": rank.checkpoint_bytes,
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

    def __init__(self, address: str, port: int, redis_url: str) -> None:
        """Listen, and answer with an empty page until `serve`.

        Args:
            address: of this machine, to listen at.
            port: to listen at; 0 takes a free one.
            redis_url: of queues and ranks.

        Raises:
            InputError: it cannot listen there.
        """
        self._connection = redis.Redis.from_url(
            redis_url,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=ANSWER_TIMEOUT_S,
            socket_timeout=ANSWER_TIMEOUT_S,
        )
        self._address = address
        self._registry = CollectorRegistry()
        try:
            self._server, self._thread = start_http_server(port, address, self._registry)
        except (OSError, OverflowError) as error:
            self._connection.close()
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"Metrics cannot be served at port {port} of {address!r} ({reason}); choose another --metrics-port or "
                "--metrics-address."
            ) from error

    def serve(self, groups: Sequence[OwnGroup]) -> None:
        """Serve the metrics of the launcher's groups, all of which have been started, and log the address."""
        self._registry.register(LauncherCollector(self._connection, groups))
        host = f"[{self._address}]" if self._server.address_family is socket.AF_INET6 else self._address
        logger.info("Metrics are at http://%s:%d/metrics.", host, self._server.server_port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._connection.close()

"""Answers a scrape: what the launcher knows of its groups, and what Redis says of the queues and of their ranks.

Of ranks only the launcher's own are told, so that no rank is counted twice where several launchers are scraped; queues
are everybody's, and every launcher says the same of them. Nothing here ever raises: while Redis is away, the launcher
answers with what it knows by itself.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from typing import Protocol

import redis
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from svdq.producer.status.ranks import BOUNDS_S, RankStatus, Timings
from svdq.worker.metrics.families import FAMILIES
from svdq.worker.metrics.readings import Readings, read

logger = logging.getLogger(__name__)

#: Seconds for which one look counts: however many ask, Redis is asked no more often.
FRESH_S = 1.0


class OwnGroup(Protocol):
    """A group of the launcher's, as the launcher sees it."""

    @property
    def num_ranks(self) -> int:
        """Ranks that it was started with."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether its torchrun runs."""
        ...

    def pids(self) -> Mapping[int, int]:
        """Give the process ids of its ranks that have begun, by rank."""
        ...

    def running_pids(self) -> Mapping[int, int]:
        """Give the process ids of its ranks that run, by rank."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Own:
    """A rank of one of the launcher's groups, as it has told of itself."""

    #: The group's number.
    group: str
    #: Its record.
    status: RankStatus


class LauncherCollector(Collector):
    """Makes the metrics of one launcher, anew for every scrape."""

    def __init__(self, connection: redis.Redis, groups: Sequence[OwnGroup]) -> None:
        """Make it; nothing is asked yet.

        Args:
            connection: of its own, which gives up soon.
            groups: the launcher's; their numbers are their places in it.
        """
        self._connection = connection
        self._groups = groups
        self._started_at = time.time()
        #: One scrape at a time.
        self._lock = threading.Lock()
        self._looked_at = -FRESH_S
        self._readings: Readings | None = None
        self._was_refused = False
        #: How often each group was restarted, as far as it was ever heard; it stays while Redis is away.
        self._restart_counts: dict[str, int] = {}
        #: What each process that was rank 0 of a group has counted, by metric and group. A new one begins at nothing,
        #: and may count much before it is first heard: added up here, no restart is taken for a standstill.
        self._counted: dict[tuple[str, str], dict[int, int]] = {}

    def describe(self) -> Iterable[Metric]:
        """Tell the names before the first scrape."""
        return _Families().all()

    def collect(self) -> Iterable[Metric]:
        """Make all metrics."""
        with self._lock:
            return self._collect()

    def _collect(self) -> list[Metric]:
        families = _Families()
        readings = self._read_redis()
        own = self._own(readings.ranks if readings is not None else ())
        for rank in own:
            self._remember(rank)
        for (name, group), counted in self._counted.items():
            families.add(name, [group], sum(counted.values()))
        self._add_launcher_metrics(families, is_redis_up=readings is not None)
        if readings is not None:
            _add_queue_metrics(families, readings)
            for rank in own:
                _add_rank_metrics(families, rank, readings.at)
        return families.all()

    def _read_redis(self) -> Readings | None:
        if time.monotonic() < self._looked_at + FRESH_S:
            return self._readings
        self._readings = None
        try:
            self._readings = read(self._connection)
            self._was_refused = False
        except redis.RedisError:
            pass  # that it is away is what is told
        except Exception as error:  # noqa: BLE001 - whatever stands in Redis, the endpoint answers
            if not self._was_refused:
                logger.warning("What stands in Redis makes no metrics: %s: %s", type(error).__name__, error)
            self._was_refused = True
        self._looked_at = time.monotonic()
        return self._readings

    def _remember(self, own: "_Own") -> None:
        """Keep what must outlive the process that told it."""
        status = own.status
        self._restart_counts[own.group] = max(self._restart_counts.get(own.group, 0), status.restart_count)
        if status.intake is not None:
            for name, number in (
                ("svdq_videos_finished_total", status.intake.finished),
                ("svdq_videos_failed_total", status.intake.failed),
                ("svdq_jobs_taken_back_total", status.intake.taken_back),
                ("svdq_videos_resumed_total", status.resumed),
            ):
                self._counted.setdefault((name, own.group), {})[status.pid] = number

    def _own(self, ranks: Sequence[RankStatus]) -> list[_Own]:
        """Pick the ranks that are processes of ours; their groups' names in Redis are nothing the launcher knows."""
        host = socket.gethostname()
        places = {
            (rank, pid): str(number) for number, group in enumerate(self._groups) for rank, pid in group.pids().items()
        }
        return [
            _Own(group=places[rank.rank, rank.pid], status=rank)
            for rank in ranks
            if rank.host == host and (rank.rank, rank.pid) in places
        ]

    def _add_launcher_metrics(self, families: "_Families", *, is_redis_up: bool) -> None:
        families.info("svdq_build_info", [], {"version": version("svdq")})
        families.add("svdq_start_time_seconds", [], self._started_at)
        families.add("svdq_redis_up", [], is_redis_up)
        for number, group in enumerate(self._groups):
            label = [str(number)]
            num_up = len(group.running_pids()) if group.is_running else 0
            families.add("svdq_group_up", label, group.is_running)
            families.add("svdq_group_ranks", label, group.num_ranks)
            families.add("svdq_group_ranks_up", label, num_up)
            families.add("svdq_group_restarts_total", label, self._restart_counts.get(label[0], 0))


def _add_queue_metrics(families: "_Families", readings: Readings) -> None:
    for queue, states in readings.counts.items():
        for state, number in states.items():
            families.add("svdq_jobs", [queue, state], number)
    for queue, oldest_s in readings.oldest_s.items():
        families.add("svdq_queue_oldest_job_age_seconds", [queue], oldest_s)
    if readings.eta_s is not None:
        families.add("svdq_queue_eta_seconds", [], readings.eta_s)
    families.add("svdq_pauses", [], readings.num_pauses)


def _add_rank_metrics(families: "_Families", own: _Own, now: float) -> None:
    status = own.status
    label = [own.group, str(status.rank)]
    if status.intake is not None:
        families.add("svdq_samples_in_flight", label[:1], len(status.intake.in_flight))
    who = {name: str(getattr(status, name)) for name in ("host", "device", "device_name", "model")}
    families.info("svdq_rank_info", label, {"name": status.group} | who)
    families.add("svdq_rank_record_age_seconds", label, max(0.0, now - status.at))
    families.add("svdq_rank_busy_ratio", label, status.busy_share)
    waits_s = [now - condition.since for condition in status.conditions]
    families.add("svdq_rank_storage_wait_seconds", label, max(0.0, *waits_s, 0.0))
    families.add("svdq_rank_resident_memory_bytes", label, status.rss_bytes)
    if status.gpu_bytes is not None:
        families.add("svdq_rank_gpu_memory_bytes", label, status.gpu_bytes)
    if status.gpu_total_bytes is not None:
        families.add("svdq_rank_gpu_memory_size_bytes", label, status.gpu_total_bytes)
    families.add("svdq_checkpoints_total", label, status.checkpoints)
    families.add("svdq_checkpoint_bytes_total", label, status.checkpoint_bytes)
    is_last = status.rank == status.num_ranks - 1
    # What a rank never does is not told, and what it has not done yet is told as nothing.
    for kind, is_done_here in (("step", True), ("encode", status.rank == 0), ("decode", is_last), ("write", is_last)):
        timings = status.timings.get(kind) or Timings(counts=(0,) * (len(BOUNDS_S) + 1), sum_s=0.0)
        if is_done_here and len(timings.counts) == len(BOUNDS_S) + 1:  # else of another version
            families.histogram(f"svdq_{kind}_seconds", label, timings)


class _Families:
    """The metrics of one scrape while they are made, every family of the table, with samples or without."""

    def __init__(self) -> None:
        self._made: dict[str, Metric] = {}
        for family in FAMILIES.values():
            makers: dict[str, Callable[..., Metric]] = {
                "gauge": GaugeMetricFamily,
                "counter": CounterMetricFamily,
                "histogram": HistogramMetricFamily,
                "info": InfoMetricFamily,
            }
            # The library puts the ends of counters and infos on again.
            name = family.name.removesuffix("_info") if family.kind == "info" else family.name
            self._made[family.name] = makers[family.kind](name, f"{family.help}.", labels=family.labels)

    def all(self) -> list[Metric]:
        """Give all."""
        return list(self._made.values())

    def add(self, name: str, labels: list[str], value: float) -> None:
        """Add a sample of a gauge or a counter."""
        made = self._made[name]
        assert isinstance(made, GaugeMetricFamily | CounterMetricFamily)
        made.add_metric(labels, float(value))

    def info(self, name: str, labels: list[str], values: dict[str, str]) -> None:
        """Add a sample of an info."""
        made = self._made[name]
        assert isinstance(made, InfoMetricFamily)
        made.add_metric(labels, values)

    def histogram(self, name: str, labels: list[str], timings: Timings) -> None:
        """Add a sample of a histogram."""
        made = self._made[name]
        assert isinstance(made, HistogramMetricFamily)
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        made.add_metric(labels, list(zip(bounds, accumulate(timings.counts), strict=True)), timings.sum_s)

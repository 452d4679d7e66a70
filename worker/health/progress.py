"""Writes the progress of a rank to Redis and reads which jobs are canceled, beside the step loop.

The step loop only replaces a tuple. A thread contacts Redis two to four times a second while there is work, and every
few seconds otherwise. The crash marker is written at once, since the step may kill the process.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
from redis.client import Pipeline
from torch import Tensor

from svdq.pipeline.loop.protocols import Monitor
from svdq.pipeline.loop.sample import Sample
from svdq.producer import keys
from svdq.producer.job_log import append_log
from svdq.producer.records import JobMeta
from svdq.worker.active_job import SampleJob
from svdq.worker.health.pictures import Pictures
from svdq.worker.health.rank_log import JobLogHandler
from svdq.worker.health.rank_status import RankReporter
from svdq.worker.queue import scripts
from svdq.worker.queue.crashes import CrashMarker, phase_of

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25  # seconds between two contacts with Redis; a progress bar needs no more
FRESH_S = 1.0  # seconds for which the list of canceled jobs is valid: a job may be stopped and retried soon after
RECORD_S, IDLE_RECORD_S = 1.0, 5.0  # seconds between two records of this rank while it computes, and while it is idle


def meta_of(sample: Sample, index: int, rank: int, notice: str) -> JobMeta:
    """Return the `meta` of a job in flight: its progress, and the parameters that a job may leave open, as used."""
    parameters = sample.parameters
    fields = type(parameters).model_fields.items()
    ranks = range(len(sample.boundaries) - 2)
    return JobMeta(
        step=index,
        rank=rank,
        boundaries=(sample.steps_of(0)[0], *(sample.steps_of(each)[1] for each in ranks), parameters.steps),
        decoder=sample.decoder,
        notice=notice,
        computed=sample.num_computed,
        used={name: getattr(parameters, name) for name, field in fields if field.default is None},
    )


class ProgressMonitor(Monitor):
    """The monitor of one rank."""

    def __init__(
        self,
        connection: redis.Redis,
        rank_reporter: RankReporter,
        log: JobLogHandler,
        marker: CrashMarker,
        pictures: Pictures,
    ) -> None:
        """Start the thread; this monitor alone uses `connection`."""
        self._connection = connection
        self._rank_reporter = rank_reporter
        self._log = log
        self._marker = marker
        self._pictures = pictures
        self._note: tuple[Sample, int] | None = None
        self._written: tuple[Sample, int] | None = None  # the note that is in Redis
        #: This rank's steps of the present or last sample; the start of its last step; the duration of the one before.
        self._step_range: tuple[int, int] | None = None
        self._step_at = 0.0
        self._step_s: float | None = None
        #: When this rank began with the steps of the present sample, and the first of them.
        self._stage_at = 0.0
        self._stage_from = 0
        self._canceled: frozenset[str] = frozenset()  # ids of canceled jobs that are in flight in any group
        self._canceled_at = -FRESH_S  # when that was read
        #: The job of the present sample if its execution has ended: canceled by RQ, or taken by another group.
        self._lost: object = None
        #: When this rank's record was last written, and whether it was idle.
        self._record_at = -IDLE_RECORD_S
        self._is_recorded_idle = False
        self._news = threading.Event()
        self._closed = threading.Event()
        log.current_job = lambda: note[0].job_id if (note := self._note) is not None else None
        log.on_line = self._news.set
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    # The monitor, in the step loop.

    def step(self, sample: Sample, index: int) -> None:
        self._marker.begin(phase_of(sample, index), sample.job_id, index)
        now = time.perf_counter()
        note = self._note
        if note is None:
            self._rank_reporter.meter.begin()
            self._stage_at, self._stage_from = now, index
        elif note[0] is not sample:  # it was encoded, or this rank has done its steps
            self._count_steps(index - self._stage_from, now)
            self._stage_at, self._stage_from = now, index
        elif note[1] < index:
            self._step_s = now - self._step_at
        self._step_at = now
        self._note = (sample, index)
        self._step_range = sample.steps_of(self._rank_reporter.who.rank)
        self._news.set()

    def picture(self, sample: Sample, step: int, draw: Callable[[], Tensor | None]) -> None:
        self._pictures.offer(sample, step, draw)

    def warm_up(self, sample: Sample) -> None:
        self._marker.begin("warm-up", sample.job_id)

    def loading(self, components: str, expected_s: float | None) -> None:
        self._rank_reporter.loading = (components, expected_s)
        self._news.set()

    def idle(self) -> None:
        self._rank_reporter.loading = None
        note = self._note
        if note is not None:
            sample, index = note
            # Not after an encode or a decode.
            if sample.step >= 0 and index < sample.steps_of(self._rank_reporter.who.rank)[1]:
                self._count_steps(index + 1 - self._stage_from, time.perf_counter())
        self._note = None
        self._rank_reporter.meter.end()
        self._marker.idle()

    def _count_steps(self, number: int, now: float) -> None:
        """Count the steps of a stage at its end: a single step on a GPU returns before it is done."""
        if number > 0:
            num_steps, steps_s = self._rank_reporter.steps_done
            self._rank_reporter.steps_done = (num_steps + number, steps_s + now - self._stage_at)

    def canceled(self, job_id: str) -> bool:
        note = self._note
        # Only the present sample: the same job, taken again, may come right after it.
        is_lost = note is not None and note[0].job_id == job_id and note[0].job is self._lost
        return is_lost or (job_id in self._canceled and time.monotonic() - self._canceled_at < FRESH_S)

    # The thread that contacts Redis.

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the last log lines, remove the record of this rank and end."""
        self._closed.set()
        self._news.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            every_s = IDLE_RECORD_S if self._is_recorded_idle else RECORD_S
            due_s = max(0.0, self._record_at + every_s - time.monotonic())
            self._news.wait(due_s if self._note is None else min(due_s, INTERVAL_S))
            self._news.clear()
            try:
                self._update(self._note)
            except redis.RedisError:
                pass  # progress is optional: steps go on while the server is unavailable
            except Exception:
                # An error of this program must not end the thread: nobody would notice a canceled job any more.
                logger.exception("The status of this rank cannot be written; it is tried again.")
            self._closed.wait(INTERVAL_S)
        with contextlib.suppress(redis.RedisError), self._connection.pipeline(transaction=False) as pipeline:
            self._rank_reporter.who.remove(pipeline)
            self._execute(pipeline)

    def _update(self, note: tuple[Sample, int] | None) -> None:
        with self._connection.pipeline(transaction=False) as pipeline:
            if note is not None:
                pipeline.smembers(keys.CANCELED)
                pipeline.zscore(*SampleJob.model_validate(note[0].job).execution)
                if note is not self._written:
                    meta = meta_of(*note, self._rank_reporter.who.rank, self._rank_reporter.who.notice)
                    scripts.set_field(pipeline, note[0].job_id, "meta", meta.model_dump_json())
            if time.monotonic() >= self._record_at + RECORD_S:
                self._record_at = time.monotonic()
                record = self._rank_reporter.gather(note, self._step_range, self._step_s)
                # A first rank without intake is about to take jobs.
                is_busy = record.intake.in_flight if record.intake else record.rank == 0
                self._is_recorded_idle = record.activity == "idle" and not is_busy
                record.save(pipeline)
            answers = self._execute(pipeline)
        self._written = note
        if note is not None and isinstance(answers[0], set):
            self._canceled_at = time.monotonic()
            self._canceled = frozenset(job_id.decode(errors="replace") for job_id in answers[0])
            if answers[1] is None:
                self._lost = note[0].job

    def _execute(self, pipeline: Pipeline) -> list[Any]:
        """Send the commands, and the log lines, which stay if redis.RedisError is raised; answers may be errors."""
        lines = self._log.take()
        for job_id, entries in lines.items():
            append_log(pipeline, job_id, entries)
        try:
            return pipeline.execute(raise_on_error=False)
        except redis.RedisError:
            self._log.restore(lines)
            raise

"""Tells Redis what a rank is doing and hears what is canceled, beside the step loop.

The step loop only leaves a note; a thread of its own talks to Redis a few times a second while there is work, and every
few seconds otherwise. The crash marker is written at once: it must be there when the step kills the process.
"""

import contextlib
import json
import threading
import time
from typing import Any

import redis
from redis.client import Pipeline
from rq.job import Job

from svdq.pipeline.sample import Sample
from svdq.producer import keys
from svdq.producer.status import job_log
from svdq.worker.health.crash_marker import CrashMarker
from svdq.worker.health.job_log_handler import JobLogHandler
from svdq.worker.health.rank_status import RankReporter
from svdq.worker.output.fence import execution_of

#: Seconds between two talks with Redis: what a person watching a bar can tell apart.
INTERVAL_S = 0.25
#: Seconds for which it counts what Redis said of canceled jobs: one may be stopped, and tried again soon after.
FRESH_S = 1.0
#: Seconds between two records of this rank while something is computed, and while nothing is.
RECORD_S, IDLE_RECORD_S = 1.0, 5.0

#: Writes meta only into a job that still exists: HSET alone would make a job out of nothing after it was deleted.
_SAVE_META = "if redis.call('exists', KEYS[1]) == 1 then redis.call('hset', KEYS[1], 'meta', ARGV[1]) end"


def meta_of(sample: Sample, index: int, rank: int, notice: str) -> dict[str, object]:
    """Make the `meta` of a job in flight: how far it is, and its parameters as used."""
    parameters = sample.parameters
    return {
        "step": index,
        "rank": rank,
        "notice": notice,
        "used": {"frames": parameters.frames, "decode_chunk_size": parameters.decode_chunk_size},
    }


class ProgressMonitor:
    """The monitor of one rank."""

    def __init__(
        self,
        connection: redis.Redis,
        notice: str,
        rank_reporter: RankReporter,
        log: JobLogHandler,
        marker: CrashMarker | None = None,
    ) -> None:
        """Begin to tell.

        Args:
            connection: of this monitor's own.
            notice: what is to be said wherever the work is shown.
            rank_reporter: gathers the record of this rank.
            log: collects what is logged about jobs.
            marker: where each phase of a job is recorded before it begins.
        """
        self._connection = connection
        self._notice = notice
        self._rank_reporter = rank_reporter
        self._log = log
        self._marker = marker
        self._note: tuple[Sample, int] | None = None
        #: The sample that was computed last, or is; when its last step began, and how long the one before took.
        self._last: Sample | None = None
        self._step_at = 0.0
        self._step_s: float | None = None
        #: When this rank began with the steps of the sample that is here, and with which.
        self._stage_at = 0.0
        self._stage_from = 0
        #: Ids of jobs that the user has canceled, in flight anywhere.
        self._canceled: frozenset[str] = frozenset()
        #: When that was heard.
        self._heard_at = -FRESH_S
        #: The metadata of the sample here whose execution is not ours any more: canceled in RQ's way, or taken over.
        self._lost: object = None
        #: When this rank's record was written last, and whether that said that there is nothing to do.
        self._record_at = -IDLE_RECORD_S
        self._is_idle_told = False
        self._news = threading.Event()
        self._closed = threading.Event()
        log.current_job = self._current_job
        log.on_line = self._news.set
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    # The monitor, in the step loop.

    def step(self, sample: Sample, index: int) -> None:
        """Note that a step is about to be done."""
        if self._marker is not None:
            if index == sample.parameters.steps:
                self._marker.begin("decode", sample.job_id)
            elif sample.tensors:
                self._marker.begin("step", sample.job_id, index)
            else:  # before its photo is encoded a sample has no tensors
                self._marker.begin("encode", sample.job_id)
        now = time.perf_counter()
        note = self._note
        if note is None:
            self._rank_reporter.meter.begin()
            self._stage_at, self._stage_from = now, index
            if sample.resumed and self._rank_reporter.who.rank == 0:
                self._rank_reporter.metrics.num_resumed += 1
        elif note[0] is not sample:  # encoded by now, or with all steps done that are done here
            self._tally_steps(index - self._stage_from, now)
            self._stage_at, self._stage_from = now, index
        elif note[1] < index:
            self._step_s = now - self._step_at
        self._step_at = now
        self._note = (sample, index)
        self._last = sample
        self._news.set()

    def warm_up(self, sample: Sample) -> None:
        """Record that this rank warms up for a sample that will come; until `idle`."""
        if self._marker is not None:
            self._marker.begin("warm-up", sample.job_id)

    def idle(self) -> None:
        """Note that nothing is being done."""
        note = self._note
        if note is not None:
            sample, index = note
            # No step: an encode that failed, a decode, or a sample of which this rank has no steps.
            if sample.tensors and index < sample.boundaries[self._rank_reporter.who.rank + 1]:
                self._tally_steps(index + 1 - self._stage_from, time.perf_counter())
        self._note = None
        self._rank_reporter.meter.end()
        if self._marker is not None:
            self._marker.idle()

    def _tally_steps(self, number: int, now: float) -> None:
        """Count the steps of a stage by what they took on average: on a GPU, single ones only seem to take no time."""
        if number > 0:
            self._rank_reporter.metrics.step.add((now - self._stage_at) / number, number)

    def canceled(self, job_id: str) -> bool:
        """Whether there is no use in going on with a job, as far as it is known by now."""
        note = self._note
        # Of the sample here alone: the same job, taken anew, may be right behind it.
        is_lost = note is not None and note[0].job_id == job_id and note[0].metadata is self._lost
        return is_lost or (job_id in self._canceled and time.monotonic() - self._heard_at < FRESH_S)

    def _current_job(self) -> str | None:
        note = self._note
        return note[0].job_id if note is not None else None

    # The thread that talks to Redis.

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what was logged last, remove the record of this rank and end."""
        self._closed.set()
        self._news.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            if self._note is None:
                every_s = IDLE_RECORD_S if self._is_idle_told else RECORD_S
                self._news.wait(max(0.0, self._record_at + every_s - time.monotonic()))
            self._news.clear()
            # Progress is a courtesy: a server that is away costs nobody a step.
            with contextlib.suppress(redis.RedisError):
                self._talk(self._note)
            self._closed.wait(INTERVAL_S)
        with contextlib.suppress(redis.RedisError), self._connection.pipeline(transaction=False) as pipeline:
            self._rank_reporter.who.remove(pipeline)
            self._execute(pipeline)

    def _talk(self, note: tuple[Sample, int] | None) -> None:
        execution = execution_of(note[0].metadata) if note is not None else None
        with self._connection.pipeline(transaction=False) as pipeline:
            if note is not None:
                meta = json.dumps(meta_of(*note, self._rank_reporter.who.rank, self._notice))
                pipeline.eval(_SAVE_META, 1, Job.key_for(note[0].job_id), meta)
                pipeline.smembers(keys.CANCELED)
                if execution is not None:
                    pipeline.zscore(*execution)
            if time.monotonic() >= self._record_at + RECORD_S:
                self._record_at = time.monotonic()
                record = self._rank_reporter.gather(note, self._last, self._step_s)
                self._is_idle_told = record.activity == "idle" and not (record.intake and record.intake.in_flight)
                record.save(pipeline)
            answers = self._execute(pipeline)
        if note is not None and isinstance(answers[1], set):
            self._heard_at = time.monotonic()
            self._canceled = frozenset(job_id.decode(errors="replace") for job_id in answers[1])
            if execution is not None and answers[2] is None:
                self._lost = note[0].metadata

    def _execute(self, pipeline: Pipeline) -> list[Any]:
        """Add what was logged, and send all; what cannot be sent is kept for the next time.

        Raises:
            redis.RedisError: the server does not answer; what it refuses stands in the answers.
        """
        lines = self._log.take()
        for job_id, entries in lines.items():
            job_log.append(pipeline, job_id, entries)
        try:
            return pipeline.execute(raise_on_error=False)
        except redis.RedisError:
            self._log.restore(lines)
            raise

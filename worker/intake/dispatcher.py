"""Takes jobs off the queue when the stage wants them, and gives it what it needs of them. Bookkeeping thread only.

What a job needs (its photo, or how far it came before) is prepared by another thread, ahead of need.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.pipeline.protocols import Report, Request
from svdq.producer.queue import read_job
from svdq.worker.checkpoint.reader import CheckpointReader, resumed
from svdq.worker.health.crash_marker import CrashSuspect
from svdq.worker.intake.memory import MemoryPlan
from svdq.worker.intake.prefetcher import Prefetcher, Prepared
from svdq.worker.intake.reporter import Reporter
from svdq.worker.intake.until import is_too_late
from svdq.worker.output.fence import execution_metadata
from svdq.worker.queue.crash_count import must_run_alone
from svdq.worker.queue.job_completion import ActiveJob
from svdq.worker.queue.rq_adapter import GroupWorker
from svdq.worker.storage_retry import NoLongerWantedError

logger = logging.getLogger(__name__)

#: Videos by whose latency is judged whether another one can be done in time.
NUM_LATENCIES = 9


@dataclass(frozen=True, kw_only=True)
class IntakeOptions:
    """How a group takes jobs."""

    #: End when the queue is empty.
    burst: bool = False
    #: Photos with more pixels are refused.
    max_pixels: int = 100_000_000
    #: Seconds since the epoch at which the group will be stopped: no video is begun that would not be done by then.
    until_s: float | None = None
    #: Says which videos fit into memory; None lets all through.
    memory: MemoryPlan | None = None
    #: Times that a job may end its rank before it is set aside.
    max_attempts: int = 2
    #: Jobs in flight at once, at most. What waits between ranks is bounded in bytes, by sockets; small samples would
    #: let one group take the whole queue while its last rank waits for a slow disk.
    max_in_flight: int = 25
    #: What ranks of this host were working on when this group died before.
    suspects: Sequence[CrashSuspect] = ()
    #: Marks in the block that it guards that the photo of a job, by its id, is being prepared.
    mark_prepare: Callable[[str], AbstractContextManager[object]] = nullcontext


class Dispatcher:
    """Hands jobs from the queue to the stage, one at a time."""

    def __init__(
        self,
        worker: GroupWorker,
        reporter: Reporter,
        prefetcher: Prefetcher,
        options: IntakeOptions,
        checkpoint_reader: CheckpointReader | None,
        wake: threading.Event,
        take_back_unknown: Callable[[], None],
    ) -> None:
        """Make it.

        Args:
            worker: takes jobs.
            reporter: knows what is in flight.
            prefetcher: prepares what jobs need.
            options: how jobs are taken.
            checkpoint_reader: where checkpoints are found; None where there are none.
            wake: set when there is something to do.
            take_back_unknown: queues again what Redis has given us and could not say.
        """
        self._worker = worker
        self._reporter = reporter
        self._prefetcher = prefetcher
        self._options = options
        self._checkpoint_reader = checkpoint_reader
        self._wake = wake
        self._take_back_unknown = take_back_unknown
        #: What the stage takes next; None when no more will come.
        self.ready: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        #: Set when no more jobs are to be taken.
        self.draining = threading.Event()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        #: What is prepared for the job that will probably come next.
        self._ahead: tuple[str, Future[Prepared]] | None = None
        #: How many requests were given.
        self._num_given = 0
        #: The job that is taken and not begun yet, and the one that waits for what is prepared for it.
        self._taken: ActiveJob | None = None
        self._next: tuple[ActiveJob, Future[Prepared]] | None = None
        #: Id of the last job that had to run alone.
        self._alone = ""
        #: When videos in flight were begun, and how long the last ones took, in seconds.
        self._begun_at: dict[str, float] = {}
        self._latencies_s: deque[float] = deque(maxlen=NUM_LATENCIES)
        #: Whether the stage was told that no more will come.
        self._ended = False
        self._was_paused = False

    def fill(self, num_wanted: int) -> None:
        """Take the next job when the stage wants one, and look ahead for what it needs when not."""
        if self._taken is None and self._next is None and not self.draining.is_set():
            full = len(self._reporter.active_jobs) >= self._options.max_in_flight or self._is_alone()
            if full or self._num_given >= num_wanted:
                self._prefetch()
            elif is_too_late(time.time(), self._options.until_s, self._latencies_s):
                self.draining.set()
            elif (active := self._worker.pop()) is not None:
                self._reporter.active_jobs[active.rq_job.id] = active
                self._taken = active
            elif self._options.burst and not self._reporter.active_jobs and not self._more_will_come():
                self.draining.set()
            self._log_pause()
        if self._taken is not None and self._may_begin(self._taken):
            self._next, self._taken = (self._taken, self._prepared(self._taken)), None
        if self._next is not None:
            self._give_next(*self._next)
        elif self._taken is None and self.draining.is_set() and not self._ended:
            self._ended = True
            self.ready.put(None)

    def ended(self, active: ActiveJob, finished: bool) -> None:
        """Learn from a job that has ended how long a video takes; one that failed or was stopped took less."""
        begun_at = self._begun_at.pop(active.rq_job.id, None)
        if begun_at is not None and finished:
            self._latencies_s.append(time.monotonic() - begun_at)

    def close(self) -> None:
        """Prepare nothing more."""
        self._prefetcher.stop()
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _more_will_come(self) -> bool:
        """Whether a burst goes on because a job is about to be queued; says what is left when not."""
        self._take_back_unknown()
        due, later = self._worker.num_scheduled()
        if due:
            return True
        # Taken back just now, or queued by another group as the last that was due.
        if not self._worker.paused and self._worker.peek() is not None:
            return True
        if later:
            logger.info("The queue is empty; scheduled for later: %d.", later)
        return False

    def _log_pause(self) -> None:
        if self._worker.paused != self._was_paused:
            self._was_paused = self._worker.paused
            logger.info("Intake is paused; `svdq resume` goes on." if self._was_paused else "Intake goes on.")

    def _give_next(self, active: ActiveJob, prepared_ahead: Future[Prepared]) -> None:
        """Give the stage the job that was taken, once all is there that it needs."""
        job_id = active.rq_job.id
        if not prepared_ahead.done():
            if self._prefetcher.condition is not None and self._is_unwanted(active):
                self._prefetcher.abandon(job_id)
            return
        self._next = None
        try:
            prepared = prepared_ahead.result()
            request = self._request(active, prepared) if prepared.result is None else None
        except UnavailableError:
            # Looking ahead is done once; now that the job is ours, its storage is waited for.
            self._next = (active, self._submit(active))
            return
        except NoLongerWantedError:
            self._reporter.add(Report(job_id=job_id, body={}, result={}, canceled=True))
            self._wake.set()
            return
        except Exception as error:  # noqa: BLE001 - one bad job harms nobody else
            self._reporter.add(Report(job_id=job_id, body={}, result={}, failure=_sentence(error)))
            self._wake.set()
            return
        if request is None:
            logger.info("The files of job %s are there already; nothing is rendered again.", job_id)
            self._reporter.add(Report(job_id=job_id, body={}, result=prepared.result or {}))
            self._wake.set()
            return
        if self._checkpoint_reader is not None:
            self._checkpoint_reader.open(job_id)
        if prepared.resume is None:
            self._begun_at[job_id] = time.monotonic()
        self._num_given += 1
        self.ready.put(request)

    def _may_begin(self, active: ActiveJob) -> bool:
        """Whether a job that was taken can be begun; a suspect of a crash only when nothing else is in flight."""
        if not must_run_alone(self._worker.connection, active.rq_job.id):
            return True
        if self._alone != active.rq_job.id:
            self._alone = active.rq_job.id
            logger.info("Job %s was being worked on when a rank died; it runs alone now.", self._alone)
        return len(self._reporter.active_jobs) == 1

    def _is_alone(self) -> bool:
        """Whether a job is in flight that runs alone."""
        return self._alone in self._reporter.active_jobs

    def _prefetch(self) -> None:
        if self._is_alone():
            return
        rq_job = self._worker.peek()
        if rq_job is not None and (self._ahead is None or self._ahead[0] != rq_job.id):
            job = read_job(rq_job)
            if job is not None and not must_run_alone(self._worker.connection, rq_job.id):
                self._ahead = (rq_job.id, self._loader.submit(self._prefetcher.prepare_ahead, rq_job.id, job))

    def _prepared(self, active: ActiveJob) -> Future[Prepared]:
        """Give what a job that was taken needs, prepared ahead or to be prepared now."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != active.rq_job.id:
            return self._submit(active)
        ahead[1].add_done_callback(lambda _: self._wake.set())
        return ahead[1]

    def _submit(self, active: ActiveJob) -> Future[Prepared]:
        prepared = self._loader.submit(self._prefetcher.prepare, active.rq_job.id, active.job)
        prepared.add_done_callback(lambda _: self._wake.set())
        return prepared

    def _is_unwanted(self, active: ActiveJob) -> bool:
        """Whether a job that waits for the storage was canceled or taken over."""
        return self._worker.was_canceled(active.rq_job.id) or not self._worker.holds_lease(active)

    def _request(self, active: ActiveJob, prepared: Prepared) -> Request:
        job_id, job = active.rq_job.id, active.job
        resume = prepared.resume
        if resume is not None:
            resume = resumed(resume, _step_seen(active.rq_job.meta))
            logger.info("Job %s goes on from step %d of %d.", job_id, resume.step, job.steps)
        metadata = job.model_dump(mode="json", include={"image", "name", "formats", "fit", "folder"})
        return Request(
            job_id=job_id,
            parameters=prepared.parameters,
            photo=prepared.photo,
            resume=resume,
            chunk_chosen=job.decode_chunk_size is None,
            metadata=metadata
            | execution_metadata(active.queue.started_job_registry.key, active.execution.composite_key),
        )


def _step_seen(meta: Any) -> int:
    """Read from a job's `meta`, which anyone may write, the step at which it was seen last; 0 for none."""
    step = meta.get("step") if isinstance(meta, dict) else None
    return step if isinstance(step, int) else 0


def _sentence(error: Exception) -> str:
    """Say why a job cannot be begun; what is not ours is logged with its traceback."""
    if isinstance(error, SvdqError):
        return str(error)
    logger.error("A photo could not be loaded.", exc_info=error)
    return f"Its photo could not be loaded: {type(error).__name__}: {error}"

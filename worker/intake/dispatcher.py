"""Takes jobs off the queue when the stage wants them, and makes requests of them. Bookkeeping thread only.

Another thread prepares the photo or the checkpoint of a job in advance.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.pipeline.loop.protocols import Report, Request
from svdq.producer.queue import read_job, replaced_of, source_of
from svdq.worker.checkpoint.checkpoints import Checkpoints, resumed
from svdq.worker.intake.policy import IntakeOptions, is_too_late
from svdq.worker.intake.prefetcher import Prefetcher, Prepared, RefusedError
from svdq.worker.outages import NoLongerWantedError
from svdq.worker.output.fence import TakenJob
from svdq.worker.queue.crashes import must_run_alone
from svdq.worker.queue.group_worker import GroupWorker, refusal_of
from svdq.worker.queue.rq_worker import ActiveJob

logger = logging.getLogger(__name__)

#: Latest videos whose latency decides whether another one can be done in time.
NUM_LATENCIES = 9


class Dispatcher:
    """Hands jobs from the queue to the stage, one at a time."""

    def __init__(
        self,
        worker: GroupWorker,
        active_jobs: Mapping[str, ActiveJob],
        prefetcher: Prefetcher,
        options: IntakeOptions,
        checkpoints: Checkpoints | None,
        *,
        wake: threading.Event,
        on_taken: Callable[[ActiveJob], None],
        on_report: Callable[[Report], None],
        take_back_unknown: Callable[[], None],
    ) -> None:
        """Make it; it never changes `active_jobs`.

        It calls `on_taken` as soon as a job is taken, `on_report` for a job that never reaches the stage, and
        `take_back_unknown` to queue jobs again that Redis gave this worker in an answer that was lost.
        """
        self._worker = worker
        self._active_jobs = active_jobs
        self._on_taken = on_taken
        self._on_report = on_report
        self._prefetcher = prefetcher
        self._options = options
        self._checkpoints = checkpoints
        self._wake = wake
        self._take_back_unknown = take_back_unknown
        #: Requests for the stage; None when no more will come.
        self.ready: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        #: Set when the group takes no more jobs.
        self.draining = threading.Event()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        #: What is being prepared for the job that is probably next.
        self._ahead: tuple[str, Future[Prepared]] | None = None
        #: Number of requests so far.
        self._num_given = 0
        #: Jobs that were queued when the last one was taken.
        self._num_waiting = 0
        #: The job that is taken and not started yet, and the one that waits for its preparation.
        self._taken: ActiveJob | None = None
        self._next: tuple[ActiveJob, Future[Prepared]] | None = None
        #: Id of the last job that had to run alone.
        self._alone = ""
        #: When videos in flight were started, and how long the last ones took, in seconds.
        self._started_at: dict[str, float] = {}
        self._latencies_s: deque[float] = deque(maxlen=NUM_LATENCIES)
        #: Whether the end of all requests is queued for the stage.
        self._ended = False
        self._was_paused = False

    def is_waiting(self, num_wanted: int) -> bool:
        """Return whether the stage wants a job and there is none, or a taken one cannot be started yet."""
        return not self._ended and (self._num_given < num_wanted or self._taken is not None or self._next is not None)

    def fill(self, num_wanted: int) -> None:
        """Take the next job if the stage wants one, else prepare it in advance."""
        if self._taken is None and self._next is None and not self.draining.is_set():
            full = len(self._active_jobs) >= self._options.max_in_flight or self._is_alone()
            if full or self._num_given >= num_wanted:
                self._prefetch()
            elif is_too_late(time.time(), self._options.until_s, self._latencies_s):
                self.draining.set()
            elif (active := self._worker.pop()) is not None:
                self._on_taken(active)
                self._taken = active
                self._num_waiting = self._worker.num_queued()
            else:
                self._drop_ahead()  # another group has that job, and may leave a checkpoint
                if self._options.burst and not self._active_jobs and not self._more_will_come():
                    self.draining.set()
            self._log_pause()
        if self._taken is not None and self._may_start(self._taken):
            self._next, self._taken = (self._taken, self._prepared(self._taken)), None
        if self._next is not None:
            self._give_next(*self._next)
        elif self._taken is None and self.draining.is_set() and not self._ended:
            self._ended = True
            self.ready.put(None)

    def ended(self, active: ActiveJob, finished: bool) -> None:
        """Learn from a finished job how long a video takes; one that failed or was stopped took less."""
        started_at = self._started_at.pop(active.rq_job.id, None)
        if started_at is not None and finished:
            self._latencies_s.append(time.monotonic() - started_at)

    def close(self) -> None:
        """Stop preparing jobs."""
        self._prefetcher.stop()
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _more_will_come(self) -> bool:
        """Whether a burst continues because a job is about to be queued; log how many remain for later if not."""
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
            logger.info("Intake is paused; `svdq resume` ends that." if self._was_paused else "Intake is resumed.")

    def _give_next(self, active: ActiveJob, prepared_ahead: Future[Prepared]) -> None:
        """Queue the request of a taken job for the stage, once the job is prepared."""
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
            # Preparing in advance tries once; now that the job is taken, wait for the storage.
            self._next = (active, self._submit(active))
            return
        except NoLongerWantedError:
            self._on_report(Report(job_id=job_id, body={}, result={}, canceled=True))
            return
        except Exception as error:  # noqa: BLE001 - one bad job must not affect others
            is_refused = isinstance(error, RefusedError)
            self._on_report(Report(job_id=job_id, body={}, result={}, failure=_sentence(error), refused=is_refused))
            return
        if request is None:
            logger.info("The files of job %s exist already; nothing is rendered again.", job_id)
            self._on_report(Report(job_id=job_id, body={}, result=prepared.result or {}))
            return
        if self._checkpoints is not None:
            self._checkpoints.open(job_id)
        if prepared.resume is None:
            self._started_at[job_id] = time.monotonic()
        self._num_given += 1
        self.ready.put(request)
        # The next round prepares the job that is next while the stage encodes this one.
        self._wake.set()

    def _may_start(self, active: ActiveJob) -> bool:
        """Whether a taken job can be started; a suspect of a crash only while nothing else is in flight."""
        if not must_run_alone(self._worker.connection, active.rq_job.id):
            return True
        if self._alone != active.rq_job.id:
            self._alone = active.rq_job.id
            logger.info("Job %s was in work when a rank died; it runs alone now.", self._alone)
        return len(self._active_jobs) == 1

    def _is_alone(self) -> bool:
        """Whether a job is in flight that runs alone."""
        return self._alone in self._active_jobs

    def _prefetch(self) -> None:
        if self._is_alone():
            return
        job_id = self._worker.peek()
        if self._ahead is not None and self._ahead[0].encode() == job_id:
            return
        self._drop_ahead()  # another group has that job, or it waits for a more urgent one
        rq_job = self._worker.fetch(job_id) if job_id is not None else None
        if rq_job is not None and refusal_of(rq_job) is None:
            job = read_job(rq_job)
            if job is not None and not must_run_alone(self._worker.connection, rq_job.id):
                prepare, replaced = self._prefetcher.prepare_ahead, replaced_of(rq_job)
                self._ahead = (rq_job.id, self._loader.submit(prepare, rq_job.id, job, replaced))

    def _prepared(self, active: ActiveJob) -> Future[Prepared]:
        """Return the preparation of a taken job: the one begun in advance, else a new one."""
        if self._ahead is None or self._ahead[0] != active.rq_job.id:
            self._drop_ahead()
            return self._submit(active)
        (_, prepared), self._ahead = self._ahead, None
        prepared.add_done_callback(lambda _: self._wake.set())
        return prepared

    def _drop_ahead(self) -> None:
        """Drop what is prepared in advance: where the queue moves fast, jobs that others take must not pile up."""
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None

    def _submit(self, active: ActiveJob) -> Future[Prepared]:
        rq_job = active.rq_job
        prepared = self._loader.submit(self._prefetcher.prepare, rq_job.id, active.job, replaced_of(rq_job))
        prepared.add_done_callback(lambda _: self._wake.set())
        return prepared

    def _is_unwanted(self, active: ActiveJob) -> bool:
        """Whether a job that waits for the storage was canceled or taken over."""
        return self._worker.was_canceled(active.rq_job.id) or not self._worker.holds_lease(active)

    def _request(self, active: ActiveJob, prepared: Prepared) -> Request:
        job_id, parameters = active.rq_job.id, prepared.job.parameters
        resume, memory = prepared.resume, self._options.memory
        if resume is not None:
            resume = resumed(resume, _step_seen(active.rq_job.meta))
            logger.info("Job %s continues from step %d of %d.", job_id, resume.step, parameters.steps)
        taken = TakenJob(
            job=prepared.job,
            source=source_of(active.rq_job),
            execution=(active.queue.started_job_registry.key, active.execution.composite_key),
        )
        return Request(
            job_id=job_id,
            parameters=parameters,
            job=taken.model_dump(mode="json"),
            photo=prepared.photo,
            resume=resume,
            num_waiting=self._num_waiting,
            decoders=memory.decoders(parameters) if memory is not None else None,
            chunk_chosen=active.job.decode_chunk_size is None,
        )


def _step_seen(meta: Any) -> int:
    """Read the last step of a job from its `meta`, which anyone may write; 0 if there is none."""
    step = meta.get("step") if isinstance(meta, dict) else None
    return step if isinstance(step, int) else 0


def _sentence(error: Exception) -> str:
    """Say why a job cannot be started; log the traceback of an unexpected error."""
    if isinstance(error, SvdqError):
        return str(error)
    logger.error("A photo could not be loaded.", exc_info=error)
    return f"Its photo could not be loaded: {type(error).__name__}: {error}"

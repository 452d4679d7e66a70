"""Takes jobs off the queue when the stage wants them, and makes requests of them. Bookkeeping thread only."""

import logging
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.pipeline.loop.protocols import Report, Request
from svdq.producer import keys
from svdq.producer.queue import priority_of, read_arguments
from svdq.producer.records import JobArguments, JobMeta
from svdq.worker.checkpoint.checkpoints import Checkpoints, resumed
from svdq.worker.intake.prefetcher import IntakeOptions, Prefetcher, Prepared, RefusedError
from svdq.worker.intake.reporter import Reporter
from svdq.worker.outages import NoLongerWantedError
from svdq.worker.queue.crashes import must_run_alone
from svdq.worker.queue.group_worker import GroupWorker, refusal_of
from svdq.worker.queue.recovery import Recovery
from svdq.worker.queue.rq_worker import ActiveJob

logger = logging.getLogger(__name__)


class Dispatcher:
    """Hands jobs from the queue to the stage, one at a time."""

    def __init__(
        self,
        worker: GroupWorker,
        reporter: Reporter,
        recovery: Recovery,
        prefetcher: Prefetcher,
        options: IntakeOptions,
        checkpoints: Checkpoints | None,
        wake: threading.Event,
    ) -> None:
        """Take no job yet; `wake` is set when a job is prepared."""
        self._worker = worker
        self._reporter = reporter
        self._recovery = recovery
        self._prefetcher = prefetcher
        self._options = options
        self._checkpoints = checkpoints
        self._wake = wake
        #: Requests for the stage; None when no more will come.
        self.ready: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self.draining = threading.Event()  # set when the group takes no more jobs
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        #: What is being prepared for the job that is probably next.
        self._ahead: tuple[str, Future[Prepared]] | None = None
        self._num_given = 0
        self._num_waiting = 0  # jobs that were queued when the last one was taken
        #: The job that is taken and not given to the stage yet, and its preparation, once it may start.
        self._taken: ActiveJob | None = None
        self._preparing: Future[Prepared] | None = None
        self._alone = ""  # id of the last job that had to run alone
        self._ended = False  # whether the end of all requests is queued for the stage
        self._was_paused = False

    def is_waiting(self, num_wanted: int) -> bool:
        """Return whether the stage wants a job and there is none, or a taken one cannot be started yet."""
        return not self._ended and (self._num_given < num_wanted or self._taken is not None)

    def fill(self, num_wanted: int) -> None:
        """Take the next job if the stage wants one, else prepare it in advance."""
        if self._taken is None and not self.draining.is_set():
            full = len(self._reporter.active) >= self._options.max_in_flight or self._is_alone()
            if full or self._num_given >= num_wanted:
                self._prefetch()
            elif (active := self._worker.pop()) is not None:
                self._reporter.take(active)
                self._taken = active
                self._num_waiting = self._worker.num_queued()
            else:
                self._drop_ahead()  # another group has that job, and may leave a checkpoint
                if self._options.burst and not self._reporter.active and not self._more_will_come():
                    self.draining.set()
            if self._worker.paused != self._was_paused:
                self._was_paused = self._worker.paused
                logger.info("Intake is paused; `svdq resume` ends that." if self._was_paused else "Intake is resumed.")
        if self._taken is not None:
            if self._preparing is None and self._may_start(self._taken.rq_job.id):
                self._preparing = self._prepared(self._taken)
            if self._preparing is not None:
                self._give(self._taken, self._preparing)
        elif self.draining.is_set() and not self._ended:
            self._ended = True
            self.ready.put(None)

    def close(self) -> None:
        """Stop preparing jobs."""
        self._prefetcher.stop()
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _more_will_come(self) -> bool:
        """Whether a burst continues because a job is about to be queued; log how many remain for later if not."""
        self._recovery.unknown(self._reporter.execution_ids, is_last=True)
        due, later = self._worker.num_scheduled()
        if due:
            return True
        # Taken back just now, or queued by another group as the last that was due.
        if not self._worker.paused and self._worker.peek() is not None:
            return True
        if later:
            logger.info("The queue is empty; scheduled for later: %d.", later)
        return False

    def _give(self, active: ActiveJob, preparing: Future[Prepared]) -> None:
        job_id = active.rq_job.id
        if not preparing.done():
            waits = self._prefetcher.condition is not None
            if waits and (self._worker.was_canceled(job_id) or not self._worker.holds_lease(active)):
                self._prefetcher.abandon(job_id)
            return
        try:
            prepared = preparing.result()
            request = self._request(active, prepared) if prepared.result is None else None
        except UnavailableError:
            # Preparing in advance tries once; now that the job is taken, wait for the storage.
            self._preparing = self._load(active.rq_job.id, active.arguments)
            return
        except NoLongerWantedError:
            self._drop_taken(Report(job_id=job_id, body={}, canceled=True))
            return
        except Exception as error:  # noqa: BLE001 - one bad job must not affect others
            is_refused = isinstance(error, RefusedError)
            self._drop_taken(Report(job_id=job_id, body={}, failure=_sentence(error), refused=is_refused))
            return
        if request is None:
            logger.info("The files of job %s exist already; nothing is rendered again.", job_id)
            self._drop_taken(Report(job_id=job_id, body={}, result=prepared.result or {}))
            return
        self._taken = self._preparing = None
        if self._checkpoints is not None:
            self._checkpoints.open(job_id)
        self._num_given += 1
        self.ready.put(request)
        # The next round prepares the job that is next while the stage encodes this one.
        self._wake.set()

    def _drop_taken(self, report: Report) -> None:
        self._taken = self._preparing = None
        self._reporter.add(report)

    def _may_start(self, job_id: str) -> bool:
        """Whether a taken job can be started; a suspect of a crash only while nothing else is in flight."""
        if not must_run_alone(self._worker.connection, job_id):
            return True
        if self._alone != job_id:
            self._alone = job_id
            logger.info("Job %s was in work when a rank died; it runs alone now.", job_id)
        return len(self._reporter.active) == 1

    def _is_alone(self) -> bool:
        return self._alone in self._reporter.active

    def _prefetch(self) -> None:
        if self._is_alone():
            return
        job_id = self._worker.peek()
        if self._ahead is not None and self._ahead[0].encode() == job_id:
            return
        self._drop_ahead()  # another group has that job, or it waits for a more urgent one
        rq_job = self._worker.fetch(job_id) if job_id is not None else None
        if rq_job is not None and refusal_of(rq_job) is None:
            arguments = read_arguments(rq_job)
            if arguments is not None and not must_run_alone(self._worker.connection, rq_job.id):
                self._ahead = (rq_job.id, self._load(rq_job.id, arguments, once=True))

    def _prepared(self, active: ActiveJob) -> Future[Prepared]:
        if self._ahead is None or self._ahead[0] != active.rq_job.id:
            self._drop_ahead()
            return self._load(active.rq_job.id, active.arguments)
        (_, prepared), self._ahead = self._ahead, None
        return prepared

    def _drop_ahead(self) -> None:
        """Drop what is prepared in advance: where the queue moves fast, jobs that others take must not pile up."""
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None

    def _load(self, job_id: str, asked: JobArguments, *, once: bool = False) -> Future[Prepared]:
        prepared = self._loader.submit(self._prefetcher.prepare, job_id, asked.job, asked.replaced, once=once)
        prepared.add_done_callback(lambda _: self._wake.set())
        return prepared

    def _request(self, active: ActiveJob, prepared: Prepared) -> Request:
        job_id, parameters = active.rq_job.id, prepared.job.parameters
        photo, last_photo = (*prepared.photos, None, None)[:2]
        resume = prepared.resume
        if resume is not None:
            resume = resumed(resume, JobMeta.model_validate(active.rq_job.meta).step)
            logger.info("Job %s continues from step %d of %d.", job_id, resume.step, parameters.steps)
        return Request(
            job_id=job_id,
            parameters=parameters,
            job=active.taken(prepared.job, prepared.first_frame).model_dump(mode="json"),
            photo=photo,
            last_photo=last_photo,
            resume=resume,
            num_waiting=self._num_waiting,
            priority=keys.PRIORITIES.index(priority_of(active.rq_job.origin)),
            encoders=self._options.memory.able("encode", parameters),
            decoders=self._options.memory.able("decode", parameters),
            chunk_chosen=active.job.decode_chunk_size is None,
        )


def _sentence(error: Exception) -> str:
    if isinstance(error, SvdqError):
        return str(error)
    logger.error("A photo could not be loaded.", exc_info=error)
    return f"Its photo could not be loaded: {type(error).__name__}: {error}"

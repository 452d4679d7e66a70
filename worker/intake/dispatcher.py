"""Takes jobs off the queue when the stage wants them, and makes requests of them. Bookkeeping thread only."""

import logging
import queue
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean

from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.pipeline.loop.protocols import Report, Request
from svdq.producer import keys
from svdq.producer.queue import priority_of, read_arguments
from svdq.producer.records import JobArguments, JobMeta
from svdq.producer.untrusted_job import UntrustedJob, restored
from svdq.worker.checkpoint.checkpoints import Checkpoints, resumed
from svdq.worker.intake.prefetcher import IntakeOptions, Prefetcher, Prepared, RefusedError
from svdq.worker.intake.reporter import Reporter
from svdq.worker.outages import GIVE_BACK_S, NoLongerWantedError
from svdq.worker.queue.group_worker import GroupWorker, refusal_of
from svdq.worker.queue.recovery import Recovery
from svdq.worker.queue.rq_worker import ActiveJob
from svdq.worker.queue.scripts import QueuedJob

logger = logging.getLogger(__name__)

NUM_PERIODS = 4  # between jobs, from which follows how many are taken at once
MOST_LEAD_S = 2.0


@dataclass(kw_only=True)
class _Waiting:
    active: ActiveJob
    preparing: Future[Prepared] | None = None  # once it may start


class Dispatcher:
    """Hands jobs from the queue to the stage as it wants them; where Redis is far away, several at once."""

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
        self._num_queued = 0  # jobs that were queued when the last one was taken
        self._taken: deque[_Waiting] = deque()  # jobs that are not given to the stage yet
        self._num_at_once = 1  # jobs that were taken the last time
        self.lead_s = 0.0  # seconds from when the stage wants a job until it is taken
        #: Seconds from when the stage gets a job until it wants the next one, of the last few.
        self._periods_s: deque[float] = deque(maxlen=NUM_PERIODS)
        self._alone = ""  # id of the last job that had to run alone
        self._ended = False  # whether the end of all requests is queued for the stage
        self._was_paused = False

    def wanted(self, period_s: float) -> None:
        """Note how long the stage has had a job when it wants the next one; from any thread."""
        self._periods_s.append(period_s)

    def is_waiting(self, num_wanted: int) -> bool:
        """Return whether the stage wants a job and there is none, or a taken one cannot be started yet."""
        return not self._ended and (self._num_given < num_wanted or bool(self._taken))

    def fill(self, num_wanted: int) -> None:
        """Take the next jobs if the stage wants some, else prepare the next one in advance."""
        self._give()
        is_away = self._prefetcher.away_s >= GIVE_BACK_S
        if is_away and self._taken:
            self._give_back()
        if not self._taken and not is_away and not self.draining.is_set():
            self._take(self._num_to_take(num_wanted))
            self._give()
        if not self._taken and self.draining.is_set() and not self._ended:
            self._ended = True
            self.ready.put(None)

    def _num_to_take(self, num_wanted: int) -> int:
        """Return as many jobs as the stage wants, and will want before Redis has answered.

        No more than this group's part of the queue, so that others get theirs.
        """
        room = 0 if self._is_alone() else self._options.max_in_flight - len(self._reporter.active)
        number = num_wanted - self._num_given
        if number <= 0:
            return 0
        if len(self._periods_s) == NUM_PERIODS:
            more = int(self.lead_s / max(1e-6, fmean(self._periods_s)))
            most = min(2 * self._num_at_once, self._options.max_in_flight // 2, self._num_queued)
            number = max(number, min(number + more, most))
        return min(number, room)

    def _take(self, number: int) -> None:
        known = self._ahead[0] if self._ahead is not None else ""
        began_at = time.monotonic()
        taken = self._worker.take(number, known)
        if taken.jobs:
            # As long again may pass before the bookkeeping comes to it.
            self.lead_s = min(MOST_LEAD_S, 2 * (time.monotonic() - began_at))
            self._num_at_once, self._num_queued = len(taken.jobs), taken.num_queued
        for active in taken.jobs:
            self._reporter.take(active)
            self._taken.append(_Waiting(active=active, preparing=None if active.is_suspect else self._prepared(active)))
        if self._worker.paused != self._was_paused:
            self._was_paused = self._worker.paused
            logger.info("Intake is paused; `svdq resume` ends that." if self._was_paused else "Intake is resumed.")
        is_empty = number > 0 and not taken.jobs and not self._reporter.active
        if is_empty and self._options.burst and not self._more_will_come():
            self.draining.set()
        if not any(active.is_suspect for active in taken.jobs) and not self._is_alone():
            self._prefetch(taken.next)

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
        if not self._worker.paused and self._worker.take(0).next is not None:
            return True
        if later:
            logger.info("The queue is empty; scheduled for later: %d.", later)
        return False

    def _give(self) -> None:
        """Give the stage what is prepared, in the order of the queue."""
        while self._taken:
            first = self._taken[0]
            if first.preparing is None:
                if not self._may_start(first.active.rq_job.id):
                    return
                first.preparing = self._prepared(first.active)
            if not first.preparing.done():
                self._abandon_if_lost(first.active)
                return
            self._hand_over(first.active, first.preparing)

    def _abandon_if_lost(self, active: ActiveJob) -> None:
        job_id = active.rq_job.id
        waits = self._prefetcher.condition is not None
        if waits and (self._reporter.is_lost(active) or self._worker.was_canceled(job_id)):
            self._prefetcher.abandon(job_id)

    def _give_back(self) -> None:
        """Return what was taken to the queue: another host may reach the storage."""
        logger.warning(
            "The storage has not answered for %.0f s; %s back to the queue, and this group takes none until it does.",
            GIVE_BACK_S,
            "a job goes" if len(self._taken) == 1 else f"{len(self._taken)} jobs go",
        )
        self._prefetcher.give_back()
        while self._taken:  # the last one first: each goes to the front
            waiting = self._taken.pop()
            if waiting.preparing is not None:
                waiting.preparing.cancel()
            self._reporter.add(Report(job_id=waiting.active.rq_job.id, body={}, canceled=True))

    def _hand_over(self, active: ActiveJob, preparing: Future[Prepared]) -> None:
        job_id = active.rq_job.id
        try:
            prepared = preparing.result()
            request = self._request(active, prepared) if prepared.result is None else None
        except UnavailableError:
            # Preparing in advance tries once; now that the job is taken, wait for the storage.
            self._taken[0].preparing = self._load(job_id, active.arguments)
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
        self._taken.popleft()
        if self._checkpoints is not None:
            self._checkpoints.open(job_id)
        self._num_given += 1
        self.ready.put(request)
        # The next round prepares the job that is next while the stage encodes this one.
        self._wake.set()

    def _drop_taken(self, report: Report) -> None:
        self._taken.popleft()
        self._reporter.add(report)

    def _may_start(self, job_id: str) -> bool:
        """Whether a suspect of a crash can be started: only while nothing else is in flight."""
        if self._alone != job_id:
            self._alone = job_id
            logger.info("Job %s was in work when a rank died; it runs alone now.", job_id)
        return len(self._reporter.active) == 1

    def _is_alone(self) -> bool:
        return self._alone in self._reporter.active

    def _prefetch(self, found: QueuedJob | None) -> None:
        if self._ahead is not None and found is not None and self._ahead[0].encode() == found.job_id:
            return
        self._drop_ahead()  # another group has that job, and may leave a checkpoint, or it waits for a more urgent one
        if found is None or found.is_suspect:
            return
        rq_job = restored(self._worker.connection, found.job_id, found.record)
        if isinstance(rq_job, UntrustedJob) and refusal_of(rq_job) is None:
            arguments = read_arguments(rq_job)
            if arguments is not None:
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
        if resume is not None and not prepared.job.finishes:
            resume = resumed(resume, JobMeta.model_validate(active.rq_job.meta).step)
            logger.info("Job %s continues from step %d of %d.", job_id, resume.step, parameters.steps)
        return Request(
            job_id=job_id,
            parameters=parameters,
            job=active.taken(prepared.job, prepared.first_frame).model_dump(mode="json"),
            photo=photo,
            last_photo=last_photo,
            resume=resume,
            num_waiting=self._num_queued + len(self._taken) - 1,
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

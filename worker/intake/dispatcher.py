"""Takes jobs off the queue when the stage wants them, and makes requests of them. Bookkeeping thread only."""

import logging
import queue
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import fmean

from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.pipeline.loop.protocols import Report, Request
from svdq.producer import keys
from svdq.producer.job import JobArguments
from svdq.producer.queue import priority_of, read_arguments
from svdq.producer.records import JobMeta, JobResult
from svdq.producer.untrusted_job import UntrustedJob, restored
from svdq.worker.active_job import ActiveJob
from svdq.worker.checkpoint.checkpoints import Checkpoints, resumed
from svdq.worker.intake.prefetcher import IntakeOptions, Prefetcher, RefusedError
from svdq.worker.intake.reporter import Reporter
from svdq.worker.outages import GIVE_BACK_S, NoLongerWantedError
from svdq.worker.queue.group_worker import GroupWorker, refusal_of
from svdq.worker.queue.recovery import Recovery
from svdq.worker.queue.scripts import QueuedJob, text_of

logger = logging.getLogger(__name__)

NUM_PERIODS = 4  # between jobs, from which follows how many are taken at once
MOST_LEAD_S = 2.0


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
        #: What is found for jobs, by their ids: for those below that may start, and for the one that is probably next.
        self._preparing: dict[str, Future[Request | JobResult]] = {}
        self._ahead = ""  # id of the latter
        self._num_given = 0
        self._num_queued = 0  # jobs that were queued when the last one was taken
        self._taken: deque[ActiveJob] = deque()  # jobs that are not given to the stage yet
        self._num_at_once = 1  # jobs that were taken the last time
        self.lead_s = 0.0  # seconds from when the stage wants a job until it is taken
        #: Seconds from when the stage gets a job until it wants the next one, of the last few.
        self._periods_s: deque[float] = deque(maxlen=NUM_PERIODS)
        self._alone = ""  # id of the last job that had to run alone
        self._ended = False  # whether the end of all requests is queued for the stage
        self._was_paused = False
        self._idle_since: float | None = None  # when the queue was first found empty, with nothing in flight
        self.has_idled = False  # whether the group ends because it had nothing to do for long

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
        began_at = time.monotonic()
        jobs, popped = self._worker.take(number, self._ahead)
        if jobs:
            # As long again may pass before the bookkeeping comes to it.
            self.lead_s = min(MOST_LEAD_S, 2 * (time.monotonic() - began_at))
            self._num_at_once, self._num_queued = len(jobs), popped.num_queued
        for active in jobs:
            self._reporter.take(active)
            self._taken.append(active)
            if active.is_suspect:
                self._drop_ahead()
            else:
                self._prepare(active)
        if self._worker.paused != self._was_paused:
            self._was_paused = self._worker.paused
            logger.info("Intake is paused; `svdq resume` ends that." if self._was_paused else "Intake is resumed.")
        is_empty = number > 0 and not jobs and not self._reporter.active
        if is_empty and self._options.burst and not self._more_will_come():
            self.draining.set()
        self._idle_since = (self._idle_since or time.monotonic()) if is_empty else None
        if self._has_idled():
            self.has_idled = True
            self.draining.set()
        if not any(active.is_suspect for active in jobs) and not self._is_alone():
            self._prefetch(popped.next)

    def _has_idled(self) -> bool:
        """Whether the ranks are to end for now; not while failures have paused the group, which ends with them."""
        if self._options.idle_s is None or self._options.burst or self._idle_since is None:
            return False
        return time.monotonic() - self._idle_since >= self._options.idle_s and not self._worker.has_paused()

    def close(self) -> None:
        """Stop preparing jobs."""
        self._prefetcher.stop()
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _more_will_come(self) -> bool:
        """Whether a burst continues because a job is about to be queued; log how many remain for later if not."""
        self._recovery.unknown(self._reporter.execution_ids, is_last=True)
        self._worker.look_around()  # what others have just left to this group
        due, later = self._worker.num_scheduled()
        if due:
            return True
        # Taken back just now, or queued by another group as the last that was due.
        if not self._worker.paused and self._worker.take(0)[1].next is not None:
            return True
        if later:
            logger.info("The queue is empty; scheduled for later: %d.", later)
        return False

    def _give(self) -> None:
        """Give the stage what is prepared, in the order of the queue."""
        while self._taken:
            active = self._taken[0]
            if active.id not in self._preparing:
                if not self._may_start(active.id):
                    return
                self._prepare(active)
            if not self._preparing[active.id].done():
                self._abandon_if_lost(active)
                return
            self._hand_over(active)

    def _abandon_if_lost(self, active: ActiveJob) -> None:
        waits = self._prefetcher.condition is not None
        if waits and (self._reporter.is_lost(active) or self._worker.was_canceled(active.id)):
            self._prefetcher.abandon(active.id)

    def _give_back(self) -> None:
        """Return what was taken to the queue: another host may reach the storage."""
        logger.warning(
            "The storage has not answered for %.0f s; %s back to the queue, and this group takes none until it does.",
            GIVE_BACK_S,
            "a job goes" if len(self._taken) == 1 else f"{len(self._taken)} jobs go",
        )
        self._prefetcher.give_back()
        while self._taken:  # the last one first: each goes to the front
            job_id = self._taken.pop().id
            if (preparing := self._preparing.pop(job_id, None)) is not None:
                preparing.cancel()
            self._reporter.add(Report(job_id=job_id, body={}, canceled=True))

    def _hand_over(self, active: ActiveJob) -> None:
        """Give the stage the first of the taken jobs, or report its end."""
        ended = partial(Report, job_id=active.id, body={})
        outcome: Request | Report
        try:
            found = self._preparing.pop(active.id).result()
            if isinstance(found, JobResult):
                logger.info("The files of job %s exist already; nothing is rendered again.", active.id)
                outcome = ended(result=found.model_dump(mode="json"))
            else:
                outcome = self._completed(found, active)
        except UnavailableError:
            # Preparing in advance tries once; now that the job is taken, wait for the storage.
            self._load(active.id, active.arguments)
            return
        except NoLongerWantedError:
            outcome = ended(canceled=True)
        except Exception as error:  # noqa: BLE001 - one bad job must not affect others
            outcome = ended(failure=_sentence(error), refused=isinstance(error, RefusedError))
        self._taken.popleft()
        if isinstance(outcome, Report):
            self._reporter.add(outcome)
            return
        if self._checkpoints is not None:
            self._checkpoints.open(active.id)
        self._num_given += 1
        self.ready.put(outcome)
        # The next round prepares the job that is next while the stage encodes this one.
        self._wake.set()

    def _may_start(self, job_id: str) -> bool:
        """Whether a suspect of a crash can be started: only while nothing else is in flight."""
        if self._alone != job_id:
            self._alone = job_id
            logger.info("Job %s was in work when a rank died; it runs alone now.", job_id)
        return len(self._reporter.active) == 1

    def _is_alone(self) -> bool:
        return self._alone in self._reporter.active

    def _prefetch(self, found: QueuedJob | None) -> None:
        if found is not None and text_of(found.job_id) in self._preparing:
            return
        self._drop_ahead()  # another group has that job, and may leave a checkpoint, or it waits for a more urgent one
        if found is None or found.is_suspect:
            return
        rq_job = restored(self._worker.connection, found.job_id, found.record)
        if isinstance(rq_job, UntrustedJob) and refusal_of(rq_job) is None:
            arguments = read_arguments(rq_job)
            if arguments is not None:
                self._load(rq_job.id, arguments, once=True)
                self._ahead = rq_job.id

    def _prepare(self, active: ActiveJob) -> None:
        if self._ahead == active.id:
            self._ahead = ""
        else:
            self._drop_ahead()
            self._load(active.id, active.arguments)

    def _drop_ahead(self) -> None:
        """Drop what is prepared in advance: where the queue moves fast, jobs that others take must not pile up."""
        if self._ahead:
            self._preparing.pop(self._ahead).cancel()
            self._ahead = ""

    def _load(self, job_id: str, asked: JobArguments, *, once: bool = False) -> None:
        self._preparing[job_id] = found = self._loader.submit(self._prefetcher.prepare, job_id, asked, once=once)
        found.add_done_callback(lambda _: self._wake.set())

    def _completed(self, request: Request, active: ActiveJob) -> Request:
        """Add what is known of a job since it was taken."""
        resume = request.resume
        if resume is not None and not active.arguments.job.finishes:
            resume = resumed(resume, JobMeta.model_validate(active.rq_job.meta).step)
            logger.info("Job %s continues from step %d of %d.", active.id, resume.step, request.parameters.steps)
        return replace(
            request,
            job={**request.job, "execution": active.entry, "owner": active.rq_job.owner},
            resume=resume,
            num_waiting=self._num_queued + len(self._taken) - 1,
            priority=keys.PRIORITIES.index(priority_of(active.rq_job.origin)),
        )


def _sentence(error: Exception) -> str:
    if isinstance(error, SvdqError):
        return str(error)
    logger.error("A job could not be prepared.", exc_info=error)
    return f"It could not be prepared: {type(error).__name__}: {error}"

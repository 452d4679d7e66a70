"""Rank 0's source: takes jobs off the queue while earlier ones are in flight, and reports how they ended.

All contact with Redis stands in one bookkeeping thread with its own connection; the stage loop only ever waits for a
job that is not there yet. Photos are loaded by another thread, ahead of need.
"""

import logging
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import redis
from PIL.Image import Image

from svdq.pipeline import photo
from svdq.pipeline.errors import SvdqError
from svdq.pipeline.model import ModelInfo
from svdq.pipeline.stage import Report, Request
from svdq.producer.job import Job
from svdq.producer.queue import read_job
from svdq.producer.storage import Storage
from svdq.worker.rq_adapter import BEAT_S, MAINTENANCE_S, Flight, GroupWorker

logger = logging.getLogger(__name__)

#: Seconds between looks at an empty queue: the first job after an idle night starts at once, for 0.1% of a core.
POLL_S = 0.1
#: Seconds to wait after Redis did not answer.
RETRY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class IntakeOptions:
    """How a group takes jobs."""

    #: End when the queue is empty.
    burst: bool = False
    #: Photos with more pixels are refused.
    max_pixels: int = 100_000_000


class Intake:
    """The source of a group of ranks."""

    def __init__(self, connection: redis.Redis, storage: Storage, model: ModelInfo, options: IntakeOptions) -> None:
        self._storage = storage
        self._model = model
        self._options = options
        self._worker = GroupWorker(connection, on_stop=self._stop_job, on_shutdown=self.drain)
        self._flights: dict[str, Flight] = {}
        #: How many requests the stage has taken, or waits for, and how many it wants by now: both written by it alone.
        self._num_taken = self._num_wanted = 0
        #: How many it was given.
        self._num_given = 0
        #: What the stage takes next; None when no more will come.
        self._ready: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        #: Ends that are not in Redis yet.
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="photos")
        #: The photo of the job that will probably come next.
        self._ahead: tuple[str, Future[Image]] | None = None
        #: The job that is taken and waits for its photo.
        self._next: tuple[Flight, Future[Image]] | None = None
        self._wake = threading.Event()
        self._draining = threading.Event()
        #: Whether the stage was told that no more will come.
        self._ended = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bookkeeping", daemon=True)

    def start(self) -> None:
        """Show up in Redis and begin to take jobs.

        Raises:
            redis.RedisError: the server does not answer.
        """
        self._worker.start()
        self._thread.start()

    # Called by the stage loop.

    def take(self) -> Request | None:
        """Wait for the next video to make; None when no more will come."""
        self._num_taken += 1
        self._want(self._num_taken)
        return self._ready.get()

    def nearly_free(self) -> None:
        """Have the next job ready: rank 0 can start it in about a step's time."""
        self._want(self._num_taken + 1)

    def _want(self, number: int) -> None:
        self._num_wanted = number
        self._wake.set()

    # Called from other threads.

    def ended(self, report: Report) -> None:
        """Take note of how a sample ended."""
        self._reports.put(report)
        self._wake.set()

    def drain(self) -> None:
        """Take no more jobs; those in flight are finished."""
        self._draining.set()
        self._wake.set()

    def close(self, *, put_back: bool) -> None:
        """Report what has ended, give the rest back to the queue if asked to, and leave Redis."""
        self._closing.set()
        self._wake.set()
        self._thread.join()
        try:
            if put_back:
                self._worker.put_back(self._flights.values())
                logger.info("Stopped; %s went back to the queue.", _jobs(len(self._flights)))
            self._worker.end()
        except redis.RedisError as error:
            logger.warning("Redis does not answer (%s); jobs in flight are taken again after their lease.", error)
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _stop_job(self, job_id: str) -> None:
        logger.warning("Job %s was asked to stop; that works for queued jobs only as yet.", job_id)

    # The bookkeeping thread.

    def _run(self) -> None:
        beat_at = maintain_at = time.monotonic()
        while True:
            try:
                # Leases first: nothing below may keep one from being prolonged.
                if time.monotonic() >= beat_at:
                    self._worker.beat(self._flights.values())
                    beat_at = time.monotonic() + BEAT_S
                self._finish_reported()
                if self._closing.is_set():
                    return
                self._fill()
                if time.monotonic() >= maintain_at:
                    self._worker.maintain()
                    maintain_at = time.monotonic() + MAINTENANCE_S
            except redis.RedisError as error:
                logger.warning("Redis does not answer (%s); what is in flight goes on.", error)
                time.sleep(RETRY_S)
            except Exception:
                # A mistake of ours with one job: the leases of the others must not run out for it.
                logger.exception("The bookkeeping failed; it goes on.")
                time.sleep(RETRY_S)
            self._wake.wait(POLL_S)
            self._wake.clear()

    def _finish_reported(self) -> None:
        while not self._reports.empty():
            report = self._reports.get()
            flight = self._flights.get(report.job_id)
            if flight is None:
                continue
            try:
                self._finish(flight, report)
            except redis.RedisError:
                self._reports.put(report)  # tried again when Redis is back
                raise
            except BaseException:
                del self._flights[report.job_id]  # RQ's maintenance takes it up after its lease
                raise
            del self._flights[report.job_id]

    def _finish(self, flight: Flight, report: Report) -> None:
        if not self._worker.holds(flight):
            logger.warning("Job %s was taken over by another group; its result here is dropped.", report.job_id)
        elif report.cancelled:
            self._worker.stop(flight)
        elif report.failure is not None:
            logger.error("Job %s failed: %s", report.job_id, report.failure)
            self._worker.fail(flight, report.failure)
        else:
            logger.info("Job %s finished: %s", report.job_id, ", ".join(report.result["outputs"]))
            self._worker.succeed(flight, dict(report.result))

    def _fill(self) -> None:
        """Take the next job when the stage wants one, and look ahead for its photo when not."""
        if self._next is None and not self._draining.is_set():
            if self._num_given >= self._num_wanted:
                self._look_ahead()
            elif (flight := self._worker.pop()) is not None:
                self._flights[flight.rq_job.id] = flight
                self._next = (flight, self._photo(flight))
            elif self._options.burst and not self._flights:
                self._draining.set()
        if self._next is not None:
            self._give_next()
        elif self._draining.is_set() and not self._ended:
            self._ended = True
            self._ready.put(None)

    def _give_next(self) -> None:
        """Give the stage the job that was taken, once its photo is there."""
        assert self._next is not None
        flight, photo_ahead = self._next
        if not photo_ahead.done():
            return
        self._next = None
        try:
            image = photo_ahead.result()
        except Exception as error:  # noqa: BLE001 - one bad job harms nobody else
            self.ended(Report(job_id=flight.rq_job.id, body={}, result={}, failure=_sentence(error)))
            return
        self._num_given += 1
        self._ready.put(self._request(flight, image))

    def _look_ahead(self) -> None:
        rq_job = self._worker.peek()
        if rq_job is not None and (self._ahead is None or self._ahead[0] != rq_job.id):
            job = read_job(rq_job)
            if job is not None:
                self._ahead = (rq_job.id, self._loader.submit(self._load, job))

    def _photo(self, flight: Flight) -> Future[Image]:
        """Give the photo of a job that was taken, loaded ahead or to be loaded now."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != flight.rq_job.id:
            ahead = (flight.rq_job.id, self._loader.submit(self._load, flight.job))
        ahead[1].add_done_callback(lambda _: self._wake.set())
        return ahead[1]

    def _load(self, job: Job) -> Image:
        image = photo.load(self._storage.read(job.image), self._options.max_pixels)
        return photo.prepare(image, job.width, job.height, job.fit)

    def _request(self, flight: Flight, image: Image) -> Request:
        job = flight.job
        parameters = job.parameters
        if parameters.frames is None:
            parameters = parameters.model_copy(update={"frames": self._model.default_frames})
        if parameters.decode_chunk_size is None:
            parameters = parameters.model_copy(update={"decode_chunk_size": parameters.num_frames})
        return Request(
            job_id=flight.rq_job.id,
            parameters=parameters,
            photo=image,
            ticket=job.model_dump(mode="json", include={"image", "name", "formats", "fit"}),
        )


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _sentence(error: Exception) -> str:
    """Say why a photo cannot be used; what is not ours is logged with its traceback."""
    if isinstance(error, SvdqError):
        return str(error)
    logger.error("A photo could not be loaded.", exc_info=error)
    return f"Its photo could not be loaded: {type(error).__name__}: {error}"

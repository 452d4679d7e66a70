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
        #: What the stage takes next; None when no more will come.
        self._ready: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        #: Ends that are not in Redis yet.
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="photos")
        self._ahead: tuple[str, Future[Image]] | None = None
        self._wake = threading.Event()
        self._wanted = threading.Event()
        self._draining = threading.Event()
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
        self.nearly_free()
        return self._ready.get()

    def nearly_free(self) -> None:
        """Have the next job ready: rank 0 can start it in about a step's time."""
        self._wanted.set()
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
        if put_back:
            self._worker.put_back(self._flights.values())
        self._worker.end()
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
        if self._draining.is_set():
            self._ready.put(None)
            return
        if not self._wanted.is_set():
            self._look_ahead()
            return
        flight = self._worker.pop()
        if flight is None:
            if self._options.burst and not self._flights:
                self.drain()
            return
        self._flights[flight.rq_job.id] = flight
        try:
            request = self._request(flight)
        except SvdqError as error:
            self._worker.fail(flight, str(error))
            del self._flights[flight.rq_job.id]
            return
        self._wanted.clear()
        self._ready.put(request)

    def _look_ahead(self) -> None:
        rq_job = self._worker.peek()
        if rq_job is not None and (self._ahead is None or self._ahead[0] != rq_job.id):
            job = read_job(rq_job)
            if job is not None:
                self._ahead = (rq_job.id, self._loader.submit(self._load, job))

    def _load(self, job: Job) -> Image:
        image = photo.load(self._storage.read(job.image), self._options.max_pixels)
        return photo.prepare(image, job.width, job.height, job.fit)

    def _request(self, flight: Flight) -> Request:
        job, job_id = flight.job, flight.rq_job.id
        ahead, self._ahead = self._ahead, None
        image = ahead[1].result() if ahead is not None and ahead[0] == job_id else self._load(job)
        parameters = job.parameters
        if parameters.frames is None:
            parameters = parameters.model_copy(update={"frames": self._model.default_frames})
        if parameters.decode_chunk_size is None:
            parameters = parameters.model_copy(update={"decode_chunk_size": parameters.num_frames})
        return Request(
            job_id=job_id,
            parameters=parameters,
            photo=image,
            ticket=job.model_dump(mode="json", include={"image", "name", "formats", "fit"}),
        )

"""The last rank's sink: writes the files of finished videos in threads, and blocks the loop when too many wait."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import redis

from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.pipeline.loop.protocols import Report, Sink
from svdq.pipeline.loop.sample import Sample, sample_body
from svdq.pipeline.models.video_model import Frames, ModelInfo
from svdq.pipeline.planning.costs import WINDOW
from svdq.pipeline.trace import Tracer
from svdq.producer import keys
from svdq.producer.chains import why_no_video_before
from svdq.producer.clock import CLOCK
from svdq.producer.status.ranks import Condition
from svdq.producer.storage.storage import Storage
from svdq.worker.active_job import SampleJob
from svdq.worker.checkpoint.store import Codec
from svdq.worker.outages import RETRY_S, FileRefusals, NoLongerWantedError, RetryStoppedError, StorageRetry
from svdq.worker.output.content_credentials import ContentCredentials
from svdq.worker.output.video_files import VideoFiles

logger = logging.getLogger(__name__)

MAX_WAITING = 2  # videos that wait for a writer; with more the loop waits, which limits memory
BEHIND_S = 5.0  # seconds that the loop waits for the writers before a warning says that they fall behind


def is_held(connection: redis.Redis, stopping: threading.Event, sample: Sample) -> bool:
    """Return whether the group still holds the job of a sample; wait while Redis is unavailable, until `stopping`."""
    execution = SampleJob.model_validate(sample.job).execution
    has_warned = False
    while not stopping.is_set():
        try:
            with connection.pipeline(transaction=False) as pipeline:
                pipeline.sismember(keys.CANCELED, sample.job_id)
                pipeline.zscore(*execution)
                pipeline.time()
                is_canceled, lease, (seconds, microseconds) = pipeline.execute()
            CLOCK.note(seconds + microseconds / 1e6)
            return not is_canceled and lease is not None
        except redis.RedisError as error:
            if not has_warned:
                logger.warning("Redis does not answer (%s); the video of %s waits.", error, sample.job_id)
                has_warned = True
            stopping.wait(RETRY_S)
    return False


class ResultWriter(Sink):
    """The sink of a group."""

    def __init__(
        self,
        storage: Storage,
        model: ModelInfo,
        tracer: Tracer,
        *,
        is_held: Callable[[Sample], bool] = lambda _: True,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
        num_writers: int = 1,
        behind_s: float = BEHIND_S,
        codec: Codec | None = None,
        marks_files: bool = True,
        credentials: ContentCredentials | None = None,
    ) -> None:
        """Start threads; `is_held` says whether to publish, `mark` (job id) surrounds work that may crash.

        `codec` writes the latents of samples that have them. `marks_files` says whether files say that a model made
        them, unless their jobs do not want it; `credentials` sign those that do.
        """
        self._storage = storage
        self._files = VideoFiles(
            storage, model, is_held=is_held, codec=codec, marks_files=marks_files, credentials=credentials
        )
        self._tracer = tracer
        self._is_held = is_held
        self._mark = mark
        self._retry = StorageRetry("Videos wait to be written", storage.answers)
        self._waiting: queue.SimpleQueue[tuple[Sample, Frames, Callable[[Report], None]] | None] = queue.SimpleQueue()
        #: Jobs whose videos wait or are being written, in order; append and remove are atomic.
        self._here: list[str] = []
        self._room = threading.Semaphore(MAX_WAITING)
        self._behind_s = behind_s
        self._has_warned = False
        self._writes_s: deque[float] = deque(maxlen=WINDOW)
        self._reporting = threading.Lock()
        self._threads = [threading.Thread(target=self._run, name="write", daemon=True) for _ in range(num_writers)]
        for thread in self._threads:
            thread.start()

    def deliver(self, sample: Sample, frames: Frames, report: Callable[[Report], None]) -> None:
        """Queue frames (F, H, W, 3); blocks while too many videos wait."""
        self._here.append(sample.job_id)
        if not self._room.acquire(timeout=self._behind_s):
            if not self._has_warned and self._retry.condition is None and not self._retry.stopped:
                self._has_warned = True
                logger.warning(
                    "Videos are made faster than they are written, %d at a time: the last rank waits. How long a video "
                    "takes is in its JSON (seconds, write). Interpolation takes most, on one core for each video; "
                    "leave it out, write fewer formats, or give the machine more cores.",
                    len(self._threads),
                )
            self._room.acquire()
        self._waiting.put((sample, frames, report))

    @property
    def condition(self) -> Condition | None:
        """Why nothing can be written at present, and which jobs wait."""
        condition = self._retry.condition
        return condition and condition.model_copy(update={"job_ids": tuple(self._here)})

    def pace(self) -> tuple[float | None, int]:
        """Return the median seconds of a write, None before the first, and the number of writers; for any thread."""
        taken_s = [*self._writes_s]
        return median(taken_s) if taken_s else None, len(self._threads)

    def release(self) -> None:
        """Make a waiting `deliver` return and start no further write; for a rank that stops."""
        self._retry.stop()
        self._room.release(len(self._threads))
        self._end()

    def wait(self, timeout_s: float) -> None:
        """Wait until the writes in progress have ended, after `release` or `close`."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Wait until everything delivered is written and reported, or `release` is called."""
        self._end()
        for thread in self._threads:
            while thread.is_alive() and not self._retry.stopped:
                thread.join(0.5)

    def _end(self) -> None:
        for _ in self._threads:
            self._waiting.put(None)

    def _run(self) -> None:
        while (delivery := self._waiting.get()) is not None and not self._retry.stopped:
            self._room.release()
            sample, frames, send = delivery
            result: dict[str, Any] = {}
            failure = None
            try:
                with self._tracer.span("write", sample.job_id):
                    result = self._retry.call(
                        partial(self._attempt, sample, frames, FileRefusals()), partial(self._is_held, sample)
                    )
            except RetryStoppedError:
                return  # its job goes back to the queue, and its last checkpoint stays
            except NoLongerWantedError:
                if self._retry.stopped:
                    return
                logger.debug("Job %s was canceled or taken over; its files are dropped.", sample.job_id)
            except SvdqError as error:
                failure = str(error)
            except Exception as error:
                logger.exception("Writing the files of job %s failed.", sample.job_id)
                failure = f"Its files could not be written: {type(error).__name__}: {error}"
            self._here.remove(sample.job_id)
            report = Report(job_id=sample.job_id, body=sample_body(sample), result=result, failure=failure)
            with self._reporting:
                send(report)
            del delivery, frames  # frees the frames while this thread waits

    def _attempt(self, sample: Sample, frames: Frames, refusals: FileRefusals) -> dict[str, Any]:
        """Write a video's files; raise an OSError or UnavailableError if the storage cannot be used at present."""
        try:
            started = time.monotonic()
            with self._mark(sample.job_id):
                result = self._files.write(sample, frames)
            self._writes_s.append(time.monotonic() - started)
            return result
        except (OSError, UnavailableError) as error:
            self._storage.check_writable()
            if reason := why_no_video_before(self._storage, SampleJob.model_validate(sample.job).job):
                raise SvdqError(reason) from error
            refusals.check(error, f"Its output {SampleJob.model_validate(sample.job).job.output_stem(sample.job_id)!r}")
            raise

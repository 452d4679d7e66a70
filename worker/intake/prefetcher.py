"""Loads what a job needs before the stage takes it: its checkpoint, else its photo; nothing for a finished job.

Runs in a thread beside everything else, ahead of need. Does not know the queue.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from PIL.Image import Image

from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.base import ModelInfo
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Sample
from svdq.producer.job import Job
from svdq.producer.status.ranks import Condition
from svdq.producer.storage.storage import Storage
from svdq.worker.checkpoint.reader import CheckpointReader
from svdq.worker.intake.memory import MemoryPlan
from svdq.worker.output.finished import find_result, job_as_used
from svdq.worker.storage_retry import FILE_TIMEOUT_S, FIRST_DELAY_S, FileRefusals, StorageRetry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What there is of a job: one of the first three, and how its video is made."""

    #: The photo at its video's size.
    photo: Image | None = None
    #: How far it came in an earlier life.
    resume: Sample | None = None
    #: Its result, when it is finished.
    result: dict[str, Any] | None = None
    #: All that it leaves open filled in.
    parameters: VideoParameters


class Prefetcher:
    """Loads what the jobs of one group need, ahead of need."""

    def __init__(
        self,
        storage: Storage,
        model: ModelInfo,
        max_pixels: int,
        checkpoint_reader: CheckpointReader | None,
        memory: MemoryPlan | None = None,
        *,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
        first_delay_s: float = FIRST_DELAY_S,
        file_timeout_s: float = FILE_TIMEOUT_S,
    ) -> None:
        """Make it.

        Args:
            storage: where photos and videos are.
            model: what videos are made with; says what jobs leave open.
            max_pixels: photos with more are refused.
            checkpoint_reader: where checkpoints are found; None where there are none.
            memory: says which videos fit; None lets all through.
            mark: called with a job's id; the block that it guards may crash the process.
            first_delay_s: how long to wait when the storage refuses for the first time.
            file_timeout_s: how long a storage that can be used otherwise may refuse a photo or a sidecar.
        """
        self._storage = storage
        self._model = model
        self._max_pixels = max_pixels
        self._checkpoint_reader = checkpoint_reader
        self._memory = memory
        self._mark = mark
        self._file_timeout_s = file_timeout_s
        self._retry = StorageRetry("No video is begun", first_delay_s=first_delay_s)
        #: The job that is being prepared, and the one that nobody wants any more.
        self._job_id = self._unwanted = ""

    def prepare(self, job_id: str, job: Job) -> Prepared:
        """Look for files, checkpoint and photo, in this order; waits while the storage cannot be used.

        What is finished or half done was admitted when it was begun, and stays as it is.

        Raises:
            SvdqError: its video does not fit into memory, or the photo cannot be used.
            NoLongerWantedError: `abandon` was called.
            RetryStoppedError: `stop` was called.
        """
        self._job_id, self._unwanted = job_id, ""
        find = partial(self._find, job_id, job, FileRefusals(self._file_timeout_s))
        try:
            found = self._retry.call(find, lambda: self._unwanted != job_id)
        except UnavailableError as error:
            raise SvdqError(str(error)) from error  # a retry cannot fix it
        return self._decoded(found, job_id, job)

    def prepare_ahead(self, job_id: str, job: Job) -> Prepared:
        """Do the same for a job that may never be taken: once.

        Raises:
            SvdqError: its video does not fit into memory, or the photo cannot be used.
            UnavailableError: the storage cannot be used at present.
        """
        return self._decoded(self._find(job_id, job, FileRefusals(self._file_timeout_s)), job_id, job)

    @property
    def condition(self) -> Condition | None:
        """Why no video can be begun at present, and which one waits for it."""
        condition = self._retry.condition
        return condition and condition.model_copy(update={"job_ids": (self._job_id,)})

    def abandon(self, job_id: str) -> None:
        """Prepare a job no longer: it was canceled or taken over; from any thread."""
        self._unwanted = job_id
        self._retry.wake()

    def stop(self) -> None:
        """Wait for the storage no longer; from any thread."""
        self._retry.stop()

    def _admit(self, parameters: VideoParameters) -> VideoParameters:
        """Check that a video fits into memory, and fill in its decode_chunk_size.

        Raises:
            SvdqError: it does not fit.
        """
        if self._memory is not None:
            return self._memory.admit(parameters)
        if parameters.decode_chunk_size is None:
            return parameters.model_copy(update={"decode_chunk_size": parameters.num_frames})
        return parameters

    def _find(self, job_id: str, job: Job, refusals: FileRefusals) -> "Prepared | _Begun":
        """Look once for all that is in the storage."""
        with self._mark(job_id):
            return self._find_once(job_id, job, refusals)

    def _find_once(self, job_id: str, job: Job, refusals: FileRefusals) -> "Prepared | _Begun":
        parameters = job.parameters
        if parameters.frames is None:
            parameters = parameters.model_copy(update={"frames": self._model.default_frames})
        wanted = job_as_used(parameters, job.model_dump())
        try:
            result = find_result(self._storage, self._model, wanted, job_id)
        except UnavailableError as error:
            if self._storage.exists("inputs"):
                refusals.check(error, f"Its output {job.output_stem(job_id)!r}")
            raise
        if result is not None:
            return Prepared(result=result, parameters=parameters)
        resume = self._checkpoint_reader.furthest(job_id, parameters) if self._checkpoint_reader is not None else None
        if resume is not None:
            return Prepared(resume=resume, parameters=resume.parameters)
        return _Begun(self._admit(parameters), self._read(job.image, refusals))

    def _decoded(self, found: "Prepared | _Begun", job_id: str, job: Job) -> Prepared:
        if isinstance(found, Prepared):
            return found
        with self._mark(job_id):
            image = prepare_photo(found.photo, job.width, job.height, job.fit, self._max_pixels)
        return Prepared(photo=image, parameters=found.parameters)

    def _read(self, key: str, refusals: FileRefusals) -> bytes:
        try:
            return self._storage.read_input(key)
        except UnavailableError as error:
            # Raises the like when it is the whole storage that cannot be used; where not even the folder of all photos
            # is there, a disk is not mounted.
            if not self._storage.exists("inputs"):
                raise
            if isinstance(error.__cause__, FileNotFoundError | IsADirectoryError | NotADirectoryError):
                raise SvdqError(f"Its photo {key} is not in the storage, or no file; submit it again.") from error
            refusals.check(error, f"Its photo {key}")
            raise


@dataclass(frozen=True)
class _Begun:
    """A job that starts from nothing: how its video is made, and its photo's file."""

    parameters: VideoParameters
    photo: bytes

"""What a job needs before the stage takes it: its checkpoint, else its photo; or nothing, when it is finished already.

Runs in a thread beside everything else, ahead of need. Knows no queue.
"""

from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from svdq.pipeline import photo
from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.pipeline.model import ModelInfo
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Sample
from svdq.producer.job import Job
from svdq.producer.storage import Storage
from svdq.worker.checkpoints import Archive
from svdq.worker.finished import job_as_used, recognise
from svdq.worker.patience import Patience


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What there is of a job: one of the three."""

    #: The photo at its video's size.
    photo: Image | None = None
    #: How far it came in an earlier life.
    resume: Sample | None = None
    #: Its result, when it is finished.
    result: dict[str, Any] | None = None


class Preparer:
    """Prepares the jobs of one group."""

    def __init__(self, storage: Storage, model: ModelInfo, max_pixels: int, archive: Archive | None) -> None:
        """Make it.

        Args:
            storage: where photos and videos are.
            model: what videos are made with; says what jobs leave open.
            max_pixels: photos with more are refused.
            archive: where checkpoints are found; None where there are none.
        """
        self._storage = storage
        self._model = model
        self._max_pixels = max_pixels
        self._archive = archive
        self._patience = Patience("No video is begun")

    def parameters(self, job: Job) -> VideoParameters:
        """Fill in what a job leaves open."""
        parameters = job.parameters
        if parameters.frames is None:
            parameters = parameters.model_copy(update={"frames": self._model.default_frames})
        if parameters.decode_chunk_size is None:
            parameters = parameters.model_copy(update={"decode_chunk_size": parameters.num_frames})
        return parameters

    def prepare(self, job_id: str, job: Job) -> Prepared:
        """Look for files, checkpoint and photo, in this order; waits while the storage cannot be used.

        Raises:
            SvdqError: the photo cannot be used.
        """
        parameters = self.parameters(job)
        as_used = job_as_used(parameters, job.model_dump())
        result = self._patience.insist(lambda: recognise(self._storage, self._model, as_used, job_id))
        if result is not None:
            return Prepared(result=result)
        resume = self._archive.furthest(job_id, parameters) if self._archive is not None else None
        if resume is not None:
            return Prepared(resume=resume)
        data = self._patience.insist(lambda: self._read(job.image))
        return Prepared(photo=photo.prepare(photo.load(data, self._max_pixels), job.width, job.height, job.fit))

    def stop(self) -> None:
        """Wait for the storage no longer; from any thread."""
        self._patience.stop()

    def _read(self, key: str) -> bytes:
        try:
            return self._storage.read(key)
        except UnavailableError as error:
            if self._is_the_photos_fault(error):
                raise SvdqError(f"Its photo {key} is not in the storage, or no file; submit it again.") from error
            raise

    def _is_the_photos_fault(self, error: UnavailableError) -> bool:
        """Whether the photo alone is missing; where nothing at all is, a disk is not mounted."""
        # An error of a storage with secrets comes without its cause.
        is_missing = isinstance(error.__cause__, FileNotFoundError | IsADirectoryError | NotADirectoryError | None)
        return is_missing and self._storage.exists("inputs")

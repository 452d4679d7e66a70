"""Finds the files of a finished job, else its checkpoint, else its photos, in a thread, before the stage takes it."""

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from pydantic import ValidationError

from svdq.pipeline.errors import InputError, SvdqError, UnavailableError, first_error
from svdq.pipeline.loop.protocols import Request
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.models.lora_folder import NO_LORAS, LoraFolder
from svdq.pipeline.models.video_model import ModelInfo
from svdq.pipeline.video_parameters import VideoParameters
from svdq.producer.chains import why_no_video_before
from svdq.producer.decoder import Decoder, StoppedError
from svdq.producer.job import Job, JobArguments, last_frame_key, parse_job
from svdq.producer.records import JobResult, Sidecar, sidecar_digest
from svdq.producer.status.ranks import Condition
from svdq.producer.storage.storage import Storage
from svdq.worker.checkpoint.checkpoints import Checkpoints
from svdq.worker.checkpoint.store import Codec
from svdq.worker.intake.finished import sample_of
from svdq.worker.memory_plan import MemoryPlan
from svdq.worker.outages import FileRefusals, NoLongerWantedError, RetryStoppedError, StorageRetry
from svdq.worker.queue.crashes import CrashSuspect

logger = logging.getLogger(__name__)


class RefusedError(SvdqError):
    """The model cannot make such a video, whatever its photo is."""


@dataclass(frozen=True, kw_only=True)
class IntakeOptions:
    """How a group takes jobs."""

    memory: MemoryPlan  # decides which videos fit into memory
    burst: bool = False  # end when the queue is empty
    idle_s: float | None = None  # seconds without a job after which the ranks end, to be started again; None: never
    max_pixels: int = 100_000_000  # largest number of pixels of a photo
    #: Fills in what a job leaves open with the model's defaults; raises InputError for a video that it cannot make.
    complete: Callable[[VideoParameters], VideoParameters] = lambda parameters: parameters
    embed: Callable[[VideoParameters], object] = lambda parameters: None  # prompts ahead of time
    loras: LoraFolder = NO_LORAS  # LoRAs that jobs may choose; jobs with others are left to other groups
    wait_for_able: bool = False  # whether jobs that no group can make wait for one; they fail otherwise
    upscales: bool = False  # whether the group has an upscaler; jobs that need one fail otherwise
    codec: Codec | None = None  # reads the latents of finished videos; None: their files are read
    max_attempts: int = 2  # number of crashes of a rank after which the job it computes is set aside
    #: Most jobs in flight at once. Sockets limit the bytes that wait between ranks; without this limit a group with
    #: small samples could take the whole queue while its last rank waits for a slow disk.
    max_in_flight: int = 25
    suspects: Sequence[CrashSuspect] = ()  # what ranks of this host were working on when this group crashed
    #: Called with a job's id; records during a block that what a file of the job holds is read.
    mark_prepare: Callable[[str], AbstractContextManager[object]] = nullcontext


class Prefetcher:
    """Loads photos and checkpoints for the jobs of one group."""

    def __init__(
        self, storage: Storage, model: ModelInfo, options: IntakeOptions, checkpoints: Checkpoints | None
    ) -> None:
        """Load nothing yet; finished files are of `model`."""
        self._storage = storage
        self._model = model
        self._options = options
        self._checkpoints = checkpoints
        self._retry = StorageRetry("No video is begun", storage.answers)
        self._job_id = self._unwanted = ""  # the job that is being prepared, and the one that is no longer wanted
        self._is_stopped = False
        self._decoder = Decoder(is_stopped=lambda: self._is_stopped or self._unwanted == self._job_id != "")
        self._away_since: float | None = None  # when the storage was asked that has not answered since, monotonic

    def prepare(self, job_id: str, asked: JobArguments, *, once: bool = False) -> Request | JobResult:
        """Look for finished files, checkpoint and photo, in this order; return a result, or what to make.

        Waits while the storage cannot be used, unless it is to try `once`, for a job that may never be taken. Only a
        job that starts anew is checked against the memory plan. The job of the request has no execution yet. Raises
        SvdqError for videos that cannot be made, UnavailableError in the only attempt, and NoLongerWantedError or
        RetryStoppedError after `abandon` or `stop`.
        """
        find = partial(self._find, job_id, asked, FileRefusals())
        self._away_since = time.monotonic()
        self._job_id, self._unwanted = job_id, ""
        try:
            if once:
                with self._retry.watched():
                    found, photos = find()
            else:
                try:
                    found, photos = self._retry.call(find, lambda: self._unwanted != job_id)
                except UnavailableError as error:
                    raise SvdqError(str(error)) from error  # a retry cannot fix it
        finally:
            self._away_since = None
        if isinstance(found, JobResult) or not photos:
            return found
        note = partial(logger.warning, "Job %s: %s", job_id)
        size = found.parameters.width, found.parameters.height
        try:
            self._decoder.start()  # takes seconds on a busy machine; a kill meanwhile is not the photo's fault
            with self._options.mark_prepare(job_id):
                decoded = [
                    self._decoder.prepare(each, size, asked.job.fit, self._options.max_pixels, note) for each in photos
                ]
                with contextlib.suppress(Exception):  # raised again when the video is admitted
                    self._options.embed(found.parameters)
        except StoppedError as error:
            raise (RetryStoppedError if self._is_stopped else NoLongerWantedError)(str(error)) from error
        return replace(found, photo=decoded[0], last_photo=next(iter(decoded[1:]), None))

    @property
    def condition(self) -> Condition | None:
        """Why no video can be started at present, and which job waits."""
        condition = self._retry.condition
        return condition and condition.model_copy(update={"job_ids": (self._job_id,) if self._job_id else ()})

    @property
    def away_s(self) -> float:
        """The seconds for which the storage has not answered; 0 while nothing is asked of it."""
        since = self._away_since
        return 0.0 if since is None else time.monotonic() - since

    def give_back(self) -> None:
        """Go on trying the storage with the present job, which waits elsewhere from now on; from any thread."""
        self._job_id = ""

    def abandon(self, job_id: str) -> None:
        """Stop preparing a job that was canceled or taken over; from any thread."""
        self._unwanted = job_id
        self._retry.wake()

    def stop(self) -> None:
        """Stop waiting for the storage or a photo; from any thread."""
        self._is_stopped = True
        self._retry.stop()

    def _find(
        self, job_id: str, asked: JobArguments, refusals: FileRefusals
    ) -> tuple[Request | JobResult, list[bytes]]:
        """Make one attempt to find files or checkpoint; return the bytes of the photos if there are none."""
        job, request = asked.job, partial(self._request, job_id, asked)
        if job.predecessor and not self._storage.exists(job.sidecar_key(job_id)):
            self._check_before(job)  # first: links that are refused as the first one is would pause the intake
        try:
            job = parse_job(job.model_dump() | self._options.complete(job.parameters).model_dump())
        except InputError as error:
            raise RefusedError(str(error)) from error
        except ValidationError as error:
            reason = first_error(error)["msg"]
            raise RefusedError(
                f"The job does not fit the defaults of the model {self._model.name}: {reason}; choose others."
            ) from error
        try:
            result = find_result(self._storage, self._model, job, job_id, asked.replaced)
        except UnavailableError as error:
            if self._storage.exists("inputs"):
                self._away_since = time.monotonic()
                refusals.check(error, f"Its output {job.output_stem(job_id)!r}")
            raise
        if result is not None:
            return result, []
        if job.upscale and not self._options.upscales:
            raise SvdqError(
                f"The job asks for upscale {job.upscale}, and this worker has no upscaler: start it with "
                "SVDQ_UPSCALER, such as a RealESRGAN model, and `svdq retry` the job, or submit it without upscale."
            )
        if job.finishes:
            with self._options.mark_prepare(job_id):
                finished = sample_of(self._storage, self._options.codec, self._model, job_id, job)
            return request(job, resume=finished), []
        if self._checkpoints is not None:
            with self._options.mark_prepare(job_id):
                resume = self._checkpoints.furthest(job_id, job.parameters)
            if resume is not None and self._has_first_frame(job, resume):
                chunk, first_frame = resume.parameters.decode_chunk_size, resume.job.get("first_frame", "")
                job = job.model_copy(update={"decode_chunk_size": chunk})
                return request(job, resume=resume, first_frame=first_frame), []
        job = self._options.memory.admit(job)
        photos = [self._read(job, key, refusals) for key in job.photos]
        return request(job, first_frame=_digest(photos[0]) if job.predecessor else ""), photos

    def _request(
        self, job_id: str, asked: JobArguments, job: Job, *, resume: Sample | None = None, first_frame: str = ""
    ) -> Request:
        """Return the request for a job with all parameters, without photos; `first_frame` is as in `SampleJob`."""
        parameters, carried = job.parameters, JobArguments(job=job, notes=asked.notes).model_dump(mode="json")
        return Request(
            job_id=job_id,
            parameters=parameters,
            job=carried | {"first_frame": first_frame},
            resume=resume,
            encoders=self._options.memory.able("encode", parameters),
            decoders=self._options.memory.able("decode", parameters),
            chunk_chosen=asked.job.decode_chunk_size is None,
        )

    def _has_first_frame(self, job: Job, resume: Sample) -> bool:
        """Whether a checkpoint was made of the first frame that is in the storage now, or that is not known."""
        first_frame, key = resume.job.get("first_frame"), job.photos[0]
        if not first_frame or not self._storage.exists(key) or _digest(self._storage.read_input(key)) == first_frame:
            return True
        logger.info("Job %s starts anew: the video that it continues was rendered again.", resume.job_id)
        return False

    def _check_before(self, job: Job) -> None:
        if reason := why_no_video_before(self._storage, job):
            raise SvdqError(reason)

    def _read(self, job: Job, key: str, refusals: FileRefusals) -> bytes:
        before = job.predecessor
        try:
            self._check_before(job)
            return self._storage.read_input(key)
        except UnavailableError as error:
            # This call fails, too, if the whole storage cannot be used.
            if not self._storage.exists("inputs"):
                raise
            if isinstance(error.__cause__, FileNotFoundError) and self._storage.exists(key):
                raise  # it was mounted again meanwhile
            if isinstance(error.__cause__, FileNotFoundError | IsADirectoryError | NotADirectoryError):
                # An attempt before a crash may have removed it.
                raise SvdqError(
                    f"Its first frame, the last one of job {before}, was removed; `svdq retry --force {before}` first."
                    if before
                    else f"Its photo {key} is not in the storage, or it was damaged and removed; submit it again."
                ) from error
            self._away_since = time.monotonic()
            refusals.check(error, f"Its photo {key}")
            raise


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


UNTRAINED = ("preview", "tiny", "simulated")  # how the notices of such models begin


def find_result(storage: Storage, model: ModelInfo, job: Job, job_id: str, replaced: str = "") -> JobResult | None:
    """Return the result of a job that has a finished video: the record of it in Redis was lost, or never written.

    Its id says what it shows; only a seed that was drawn by an earlier version may be another, and counts then. None if
    it has no video, or the sidecar has the digest `replaced` and is to be rendered again, or an untrained model other
    than `model` made it. Raises UnavailableError if the storage cannot be reached.
    """
    key = job.sidecar_key(job_id)
    if not storage.exists(key):
        return None
    try:
        data = storage.read(key)
        if sidecar_digest(data) == replaced:
            return None
        sidecar = Sidecar.parse(data)
        parse_job(sidecar.job)
    except ValueError:
        return None  # not a sidecar of svdq, or of another version
    files = [*job.output_keys(job_id).values(), *([last_frame_key(job_id)] if job.chained else [])]
    # Other notices say that a video is approximate, or made of a lossy copy.
    if sidecar.model.notice.startswith(UNTRAINED) and sidecar.model.name != model.name:
        return None
    if sidecar.job_id != job_id or not all(map(storage.exists, files)):
        return None
    return sidecar.result

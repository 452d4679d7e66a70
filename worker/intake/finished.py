"""Makes the sample of a job that upscales a finished video: of its latents if they were kept, else of its mp4."""

import logging
from dataclasses import replace

import torch

from svdq.pipeline.command_line import svdq_command
from svdq.pipeline.errors import SampleError, SvdqError
from svdq.pipeline.loop.sample import SHOWN, SOUND, Sample
from svdq.pipeline.media.mp4 import read_mp4, read_sound
from svdq.pipeline.models.video_model import ModelInfo
from svdq.producer.job import Job, latents_key, parse_job
from svdq.producer.records import Sidecar
from svdq.producer.storage.storage import Storage
from svdq.worker.checkpoint.store import Codec

logger = logging.getLogger(__name__)


def sample_of(storage: Storage, codec: Codec | None, model: ModelInfo, job_id: str, job: Job) -> Sample:
    """Return the sample of the video that `job.finishes`, whose denoising is done.

    Raises SvdqError if neither its latents nor its mp4 can be used, and UnavailableError for the storage.
    """
    stem = f"outputs/{job.finishes}"
    # Without the folder of all photos, a disk is not mounted.
    if not storage.exists(f"{stem}.json") and storage.exists("inputs"):
        raise SvdqError(f"The video {job.finishes!r} that it upscales was removed from the storage; submit it anew.")
    try:
        sidecar = Sidecar.parse(storage.read(f"{stem}.json"))
        made = parse_job(sidecar.job)
    except ValueError as error:
        raise SvdqError(f"{storage.location(stem)}.json does not say how its video was made ({error}).") from error
    key = latents_key(sidecar.job_id)
    # The mp4 of a later link of a chain has all links, and its latents one.
    if codec is not None and not made.predecessor and storage.exists(key):
        try:
            kept = codec.decode(storage.read(key), sidecar.job_id, made.parameters)
        except ValueError as error:
            logger.warning("Job %s: the latents of %s cannot be used: %s.", job_id, sidecar.job_id, error)
        else:
            return _sample(job_id, job, "latents", kept)
    if "mp4" not in made.formats or not storage.exists(f"{stem}.mp4"):
        options = ("--like", f"{storage.location(stem)}.json", "--upscale", str(job.upscale))
        again = svdq_command("submit", "PHOTO", options=options)
        raise SvdqError(
            f"The video {job.finishes!r} has neither an mp4 nor latents that can be used; render it anew with "
            f"`{again}`."
        )
    tensors = {}
    with storage.staging() as folder:
        path = folder / "video.mp4"
        storage.copy_out(f"{stem}.mp4", path)
        shown = sidecar.shown
        size = shown.get("width") or made.width, shown.get("height") or made.height
        try:
            tensors[SHOWN] = torch.from_numpy(read_mp4(path, size))
            if model.sound_rate and getattr(made, "sound", False) and not made.boomerang:
                tensors[SOUND] = torch.from_numpy(read_sound(path, model.sound_rate).copy())
        except (SampleError, ValueError) as error:
            raise SvdqError(f"The file {storage.location(stem)}.mp4 cannot be decoded; submit it anew.") from error
    if len(tensors[SHOWN]) != sidecar.num_frames:
        raise SvdqError(f"The file {storage.location(stem)}.mp4 is cut short; submit it anew.")
    return _sample(job_id, job, "mp4", Sample(job_id="", parameters=job.parameters, boundaries=(), step=0), **tensors)


def _sample(job_id: str, job: Job, of: str, found: Sample, **tensors: torch.Tensor) -> Sample:
    return replace(
        found,
        job_id=job_id,
        parameters=job.parameters,
        step=job.parameters.steps,
        tensors=tensors or found.tensors,
        stages=(),
        seconds={},
        resumed=(),
        upscaled={"of": of},
    )

"""Writes the files of one finished video, and its JSON sidecar last: where it is, the files are complete."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from svdq.pipeline.loop.sample import KEPT, LAST_FRAME, SOUND, Sample
from svdq.pipeline.media import video
from svdq.pipeline.media.capture import Capture
from svdq.pipeline.media.mp4 import ChainSoFar
from svdq.pipeline.media.sound import Sound
from svdq.pipeline.media.xmp import Mark, SourceType
from svdq.pipeline.models.model_name import model_stem
from svdq.pipeline.models.video_model import Frames, ModelInfo
from svdq.producer.clock import CLOCK
from svdq.producer.job import Job, last_frame_key, latents_key, sound_key
from svdq.producer.records import LOCATION_NOTE, TAKEN_NOTE, Sidecar, SidecarModel
from svdq.producer.storage.storage import Storage
from svdq.worker.active_job import SampleJob
from svdq.worker.checkpoint.store import Codec
from svdq.worker.outages import NoLongerWantedError
from svdq.worker.output.content_credentials import ContentCredentials

VERSIONS_OF = ("svdq", "torch", "diffusers", "transformers")  # they can change a video's bits


class VideoFiles:
    """Writes videos of one model into a storage."""

    def __init__(
        self,
        storage: Storage,
        model: ModelInfo,
        *,
        is_held: Callable[[Sample], bool],
        codec: Codec | None,
        marks_files: bool,
        credentials: ContentCredentials | None,
    ) -> None:
        self._storage = storage
        self._model = model
        self._is_held = is_held
        self._codec = codec
        self._credentials = credentials
        self._versions = {name: version(name) for name in VERSIONS_OF}
        self._mark = None
        if marks_files:
            # The preview model moves a photo, without a trained model.
            source_type: SourceType = "algorithmicallyEnhanced" if model.family is None else "trainedAlgorithmicMedia"
            self._mark = Mark(
                source_type=source_type, tool=f"svdq {self._versions['svdq']}", model=model_stem(model.name)
            )

    def write(self, sample: Sample, frames: Frames) -> dict[str, Any]:
        """Write a video's files, and return the result of its job.

        Raises NoLongerWantedError, without a trace, if the job is not held at the end; SvdqError if the video cannot
        be written, and OSError or UnavailableError if the storage cannot be used at present.
        """
        started = time.perf_counter()
        taken = SampleJob.model_validate(sample.job)
        # The decode may have needed smaller chunks than were planned.
        job = taken.job.model_copy(update={"decode_chunk_size": sample.parameters.decode_chunk_size})
        fps = job.interpolate or job.fps
        with self._storage.staging() as staging:
            chain = self._chain_before(job, staging)
            shown = _shown(sample, job, frames, staging)
            num_frames = len(shown) + (chain.num_frames if chain else 0)
            sound = self._sound_of(sample, job, chain, num_frames, fps)
            mark = self._mark if job.mark else None
            sidecar = self._sidecar_of(sample, job, taken, mark, _difference(sample, job, frames, num_frames, fps))
            capture = Capture.parse(taken.notes.get(TAKEN_NOTE, ""), taken.notes.get(LOCATION_NOTE, ""))
            paths = {}
            for kind, key in job.output_keys(sample.job_id).items():
                paths[key] = staging / Path(key).name
                # An mp4 without a time shows the year 0; the others have then the bits of any other render.
                rendered = datetime.now().astimezone() if kind == "mp4" else None
                dated = replace(capture, time=capture.time or rendered)
                video.write_video(
                    shown, paths[key], kind, fps, sidecar.comment, sound=sound, capture=dated, mark=mark, chain=chain
                )
                if mark is not None and self._credentials is not None:
                    self._credentials.sign(paths[key], mark.source_type)
            if not self._is_held(sample):
                raise NoLongerWantedError("The job was canceled or taken over, or the worker stops.")
            self._keep(sample, job, frames, sound)
            for key, path in paths.items():
                self._storage.publish(path, key)
        timed = sidecar.model_copy(update=timings_of(sample, time.perf_counter() - started))
        self._storage.write_text(job.sidecar_key(sample.job_id), timed.text)
        return timed.result.model_dump(mode="json")

    def _chain_before(self, job: Job, staging: Path) -> ChainSoFar | None:
        """Return a copy of the mp4 that a link continues; None for other jobs."""
        if not job.predecessor:
            return None
        path = staging / "before.mp4"
        self._storage.copy_out(job.output_keys(job.predecessor)["mp4"], path)
        sidecar = Sidecar.parse(self._storage.read(job.sidecar_key(job.predecessor)))
        return ChainSoFar(path=path, num_frames=sidecar.num_frames)

    def _sound_of(self, sample: Sample, job: Job, chain: ChainSoFar | None, num_frames: int, fps: int) -> Sound | None:
        """Return the sound of all frames of the files; a boomerang has none, since it would be played backwards."""
        if SOUND not in sample.tensors or job.boomerang:
            return None
        sound = Sound.of(sample.tensors[SOUND].numpy(), self._model.sound_rate)
        if chain is not None:
            key = sound_key(job.predecessor)  # silence if the links before have none
            before = Sound.parse(self._storage.read(key)) if self._storage.exists(key) else sound.lasting(0, fps)
            sound = sound.after(before, chain.num_frames, fps)
        return sound.lasting(num_frames, fps)

    def _sidecar_of(
        self, sample: Sample, job: Job, taken: SampleJob, mark: Mark | None, shown: dict[str, int]
    ) -> Sidecar:
        model = self._model
        # Fields that are not given are not in the JSON.
        given: dict[str, Any] = {
            "shown": shown,
            "upscaled": dict(sample.upscaled),
            "taken": taken.notes.get(TAKEN_NOTE, ""),
            "digital_source_type": mark and mark.source_type,
        }
        return Sidecar(
            svdq=self._versions["svdq"],
            job_id=sample.job_id,
            job=job.model_dump(mode="json"),
            model=SidecarModel(
                name=model.name, notice=_notice_of(model, job, sample), compute=dict(model.compute), **model.made_of
            ),
            versions=self._versions,
            outputs=tuple(map(self._storage.location, job.output_keys(sample.job_id).values())),
            source=taken.source,
            owner=taken.owner,
            **{name: value for name, value in given.items() if value},
        )

    def _keep(self, sample: Sample, job: Job, frames: Frames, sound: Sound | None) -> None:
        """Store what other jobs begin with: the latents to be finished, and the end of a link with its sound."""
        if self._codec is not None and not job.finishes:
            kept = {name.removeprefix(KEPT): each for name, each in sample.tensors.items() if name.startswith(KEPT)}
            data = self._codec.encode(replace(sample, tensors=kept))
            self._storage.write_bytes(latents_key(sample.job_id), data)
        if job.chained and sound is not None:
            self._storage.write_bytes(sound_key(sample.job_id), sound.wav)
        if job.chained:
            last = sample.tensors[LAST_FRAME].numpy() if LAST_FRAME in sample.tensors else frames[-1]
            self._storage.write_bytes(last_frame_key(sample.job_id), video.png_of(last))


def _shown(sample: Sample, job: Job, frames: Frames, folder: Path) -> NDArray[np.uint8]:
    """Return the frames that a job adds to its files, interpolated ones in a file of `folder`."""
    if sample.upscaled.get("of") == "mp4":  # which shows them so
        return frames
    loop = getattr(job, "loop", False)  # not all families have it
    shown = video.change_motion(
        frames, job.fps, folder, boomerang=job.boomerang, loop=loop, interpolate=job.interpolate
    )
    if job.chained:  # nothing is shown between its last frame and the first one of the next link
        shown = shown[: (len(frames) - 1) * ((job.interpolate or job.fps) // job.fps) + 1]
    return shown[1:] if job.predecessor else shown  # the first one is the last one of the link before


def _difference(sample: Sample, job: Job, frames: Frames, num_frames: int, fps: int) -> dict[str, int]:
    """Return how the files differ from what the model made, as `Sidecar.shown`."""
    changed = {"frames": num_frames, "fps": fps} if (num_frames, fps) != (len(frames), job.fps) else {}
    if sample.upscaled:
        width, height = sample.parameters.shown_size
        changed |= {"width": width, "height": height}
    return changed


def _notice_of(model: ModelInfo, job: Job, sample: Sample) -> str:
    lossy = "upscaled from its mp4, a lossy copy" if sample.upscaled.get("of") == "mp4" else ""
    return ", ".join(filter(None, [notice_for(model, job, sample.step_costs), lossy]))


def notice_for(model: ModelInfo, job: Job, step_costs: Sequence[float]) -> str:
    """Return the notice of a video: of its model, and what its job leaves out; `step_costs` as in `Sample`.

    Models without weights ignore prompts, and name them.
    """
    if model.family is not None and 0.0 in step_costs:
        skipping = f"approximate ({sum(map(bool, step_costs))} of {len(step_costs)} steps computed)"
        return ", ".join(filter(None, [model.notice, skipping]))
    prompt = getattr(job, "prompt", "")
    return model.notice if model.family is not None or not prompt else f"{model.notice}, ignored the prompt: {prompt}"


def timings_of(sample: Sample, write_s: float) -> dict[str, Any]:
    """Return the fields of a sidecar about the time, the memory, the ranks and the resumptions of a video."""
    seconds = {**sample.seconds, "denoise": sum(denoise_s for _, _, denoise_s in sample.stages), "write": write_s}
    now = CLOCK.now()
    timings: dict[str, Any] = {
        "finished_at": now.replace(microsecond=now.microsecond // 1000 * 1000),
        # torchrun's process id identifies the group; it stays the same when ranks are restarted.
        "group": {"ranks": len(sample.boundaries) - 1, "host": socket.gethostname(), "pid": os.getppid()},
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "stages": [
            {"rank": rank, "steps": steps, "seconds": round(time_s, 4)} for rank, steps, time_s in sample.stages
        ],
    }
    if sample.memory:
        timings["memory_bytes"] = dict(sample.memory)
    if sample.resumed:
        timings["resumed"] = [asdict(resumption) for resumption in sample.resumed]
    return timings

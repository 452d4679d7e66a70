"""The last rank's sink: writes the files of finished videos in threads, and blocks the loop when too many wait.

Files are made in a staging folder and renamed into storage, the JSON sidecar last: where it is, the files are complete.
"""

import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import redis

from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.pipeline.loop.protocols import Report, Sink
from svdq.pipeline.loop.sample import KEPT, LAST_FRAME, SOUND, Sample, sample_body
from svdq.pipeline.media import video
from svdq.pipeline.media.capture import Capture
from svdq.pipeline.media.sound import Sound
from svdq.pipeline.media.video import change_motion
from svdq.pipeline.models.video_model import Frames, ModelInfo
from svdq.pipeline.planning.costs import WINDOW
from svdq.pipeline.trace import Tracer
from svdq.producer import keys
from svdq.producer.chains import why_no_video_before
from svdq.producer.job import Job, last_frame_key, latents_key, sound_key
from svdq.producer.records import LOCATION_NOTE, TAKEN_NOTE, Sidecar, SidecarModel
from svdq.producer.status.ranks import Condition
from svdq.producer.storage.storage import Storage
from svdq.worker.checkpoint.store import Codec
from svdq.worker.outages import RETRY_S, FileRefusals, NoLongerWantedError, RetryStoppedError, StorageRetry
from svdq.worker.queue.rq_worker import TakenJob

logger = logging.getLogger(__name__)

MAX_WAITING = 2  # videos besides those that are written; then the loop waits, which limits memory
BEHIND_S = 5.0  # seconds that the loop waits for the writers before a warning says that they fall behind
VERSIONS_OF = ("svdq", "torch", "diffusers", "transformers")  # they can change a video's bits


def is_held(connection: redis.Redis, stopping: threading.Event, sample: Sample) -> bool:
    """Return whether the group still holds the job of a sample; wait while Redis is unavailable, until `stopping`."""
    execution = TakenJob.model_validate(sample.job).execution
    has_warned = False
    while not stopping.is_set():
        try:
            with connection.pipeline(transaction=False) as pipeline:
                pipeline.sismember(keys.CANCELED, sample.job_id)
                pipeline.zscore(*execution)
                is_canceled, lease = pipeline.execute()
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
    ) -> None:
        """Start threads; `is_held` says whether to publish, `mark` (job id) surrounds work that may crash.

        `codec` writes the latents of samples that have them.
        """
        self._storage = storage
        self._model = model
        self._tracer = tracer
        self._is_held = is_held
        self._codec = codec
        self._mark = mark
        self._versions = {name: version(name) for name in VERSIONS_OF}
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
                result = self._write(sample, frames)
            self._writes_s.append(time.monotonic() - started)
            return result
        except (OSError, UnavailableError) as error:
            self._storage.check_writable()
            if reason := why_no_video_before(self._storage, TakenJob.model_validate(sample.job).job):
                raise SvdqError(reason) from error
            refusals.check(error, f"Its output {TakenJob.model_validate(sample.job).job.output_stem(sample.job_id)!r}")
            raise

    def _write(self, sample: Sample, frames: Frames) -> dict[str, Any]:
        started = time.perf_counter()
        taken = TakenJob.model_validate(sample.job)
        # The decode may have needed smaller chunks than were planned.
        job = taken.job.model_copy(update={"decode_chunk_size": sample.parameters.decode_chunk_size})
        keys = job.output_keys(sample.job_id)
        capture = Capture.parse(taken.notes.get(TAKEN_NOTE, ""), taken.notes.get(LOCATION_NOTE, ""))
        sidecar = self._sidecar_of(sample, job, taken)
        with self._storage.staging() as staging:
            paths = {key: staging / Path(key).name for key in keys.values()}
            fps = job.interpolate or job.fps
            loop = getattr(job, "loop", False)  # not all families have it
            shown = frames
            if sample.upscaled.get("of") != "mp4":  # which shows them so
                shown = change_motion(
                    frames, job.fps, staging, boomerang=job.boomerang, loop=loop, interpolate=job.interpolate
                )
            if job.chained:  # nothing is shown between its last frame and the first one of the next link
                shown = shown[: (len(frames) - 1) * (fps // job.fps) + 1]
            num_frames, num_before = len(shown), 0
            sound = self._sound_of(sample, job)
            if job.predecessor:
                shown = shown[1:]  # the first one is the last one of the link before
                self._storage.copy_out(job.output_keys(job.predecessor)["mp4"], staging / "before.mp4")
                num_before = Sidecar.parse(self._storage.read(job.sidecar_key(job.predecessor))).num_frames
                num_frames = num_before + len(shown)
            if sound is not None:  # the first frame of a link is the last one of the link before
                sound = sound.during(1 if job.predecessor else 0, len(shown), fps)
                if job.predecessor:
                    sound = sound.after(self._sound_before(job.predecessor, sound), num_before, fps)
            changed = {"frames": num_frames, "fps": fps} if (num_frames, fps) != (len(frames), job.fps) else {}
            if sample.upscaled:
                width, height = sample.parameters.shown_size
                changed |= {"width": width, "height": height}
                sidecar = sidecar.model_copy(update={"upscaled": dict(sample.upscaled)})
            if changed:
                sidecar = sidecar.model_copy(update={"shown": changed})
            for kind, key in keys.items():
                # An mp4 without a time shows the year 0; the others have then the bits of any other render.
                rendered = datetime.now().astimezone() if kind == "mp4" else None
                dated = replace(capture, time=capture.time or rendered)
                video.write_video(
                    shown,
                    paths[key],
                    kind,
                    fps,
                    sidecar.comment,
                    sound=None if job.predecessor else sound,
                    capture=dated,
                )
                if job.predecessor:
                    own = paths[key].rename(staging / "own.mp4")
                    parts = {staging / "before.mp4": num_before, own: len(shown)}
                    video.join_mp4(parts, paths[key], fps, sidecar.comment, sound=sound, capture=dated)
            if not self._is_held(sample):
                raise NoLongerWantedError("The job was canceled or taken over, or the worker stops.")
            self._keep(sample, job, frames, sound)
            for key, path in paths.items():
                self._storage.publish(path, key)
        sidecar = sidecar.model_copy(update=timings_of(sample, time.perf_counter() - started))
        self._storage.write_text(job.sidecar_key(sample.job_id), sidecar.text)
        return sidecar.result.model_dump(mode="json")

    def _sidecar_of(self, sample: Sample, job: Job, taken: TakenJob) -> Sidecar:
        model = self._model
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

    def _sound_of(self, sample: Sample, job: Job) -> Sound | None:
        """Return the sound that the model made; a boomerang has none, since it would be played backwards."""
        if SOUND not in sample.tensors or job.boomerang:
            return None
        return Sound.of(sample.tensors[SOUND].numpy(), self._model.sound_rate)

    def _sound_before(self, job_id: str, sound: Sound) -> Sound:
        """Return the sound of a chain up to a link; silence if that has none."""
        key = sound_key(job_id)
        return Sound.parse(self._storage.read(key)) if self._storage.exists(key) else sound.during(0, 0, 1)


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
    now = datetime.now(UTC)
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

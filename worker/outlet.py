"""The last rank's sink: writes the files of finished videos beside the loop, and pushes back when it cannot follow.

A video's files are made in a staging folder and renamed into storage; its JSON sidecar comes last, so a sidecar under
its final name means that the files beside it are complete. Knows no Redis.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from svdq.pipeline import video
from svdq.pipeline.errors import SvdqError
from svdq.pipeline.message import sample_body
from svdq.pipeline.model import Frames, ModelInfo
from svdq.pipeline.sample import Sample
from svdq.pipeline.stage import Report
from svdq.pipeline.trace import Tracer
from svdq.producer.job import Job
from svdq.producer.storage import Storage

logger = logging.getLogger(__name__)

#: Videos that may wait to be written; one more and the loop waits too, so that memory stays flat.
MAX_WAITING = 2
#: Distributions whose versions can change a video's bits.
VERSIONS_OF = ("svdq", "torch", "diffusers", "transformers")


@dataclass(frozen=True, kw_only=True)
class _Delivery:
    sample: Sample
    frames: Frames
    report: Callable[[Report], None]


class Outlet:
    """The sink of a group of ranks."""

    def __init__(self, storage: Storage, model: ModelInfo, tracer: Tracer) -> None:
        self._storage = storage
        self._model = model
        self._tracer = tracer
        self._versions = {name: version(name) for name in VERSIONS_OF}
        self._waiting: queue.Queue[_Delivery | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="write", daemon=True)
        self._thread.start()

    def deliver(self, sample: Sample, frames: Frames, report: Callable[[Report], None]) -> None:
        """Take frames (F, H, W, 3) to write; waits while too many videos wait already."""
        self._waiting.put(_Delivery(sample=sample, frames=frames, report=report))

    def close(self) -> None:
        """Wait until everything delivered is written and reported."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (delivery := self._waiting.get()) is not None:
            sample = delivery.sample
            result: dict[str, Any] = {}
            failure = None
            try:
                with self._tracer.span("write", sample.job_id):
                    result = self._write(sample, delivery.frames)
            except SvdqError as error:
                failure = str(error)
            except Exception as error:
                logger.exception("Writing the files of job %s failed.", sample.job_id)
                failure = f"Its files could not be written: {type(error).__name__}: {error}"
            delivery.report(Report(job_id=sample.job_id, body=sample_body(sample), result=result, failure=failure))

    def _write(self, sample: Sample, frames: Frames) -> dict[str, Any]:
        started = time.perf_counter()
        job = Job.model_validate(sample.parameters.model_dump() | dict(sample.ticket))
        stem = f"{job.name}-{sample.job_id}"
        keys = {kind: f"outputs/{stem}.{kind}" if kind != "png" else f"outputs/{stem}" for kind in job.formats}
        document = {
            "svdq": self._versions["svdq"],
            "job_id": sample.job_id,
            "job": job.model_dump(mode="json"),
            "model": {"name": self._model.name, "notice": self._model.notice},
            "versions": self._versions,
            "outputs": [self._storage.location(key) for key in keys.values()],
        }
        # Videos are passed on: where they lay on this machine is nobody else's business.
        comment = json.dumps({name: value for name, value in document.items() if name != "outputs"}, ensure_ascii=False)
        with self._storage.staging() as staging:
            for kind, key in keys.items():
                path = staging / Path(key).name
                video.write_video(frames, path, kind, job.fps, comment)
                self._storage.publish(path, key)
        seconds = {
            **sample.seconds,
            "denoise": sum(denoise_s for _, _, denoise_s in sample.stages),
            "write": time.perf_counter() - started,
        }
        timings = {
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
            "stages": [
                {"rank": rank, "steps": steps, "seconds": round(denoise_s, 4)}
                for rank, steps, denoise_s in sample.stages
            ],
        }
        text = json.dumps({**document, **timings}, indent=2, ensure_ascii=False)
        self._storage.write_text(f"outputs/{stem}.json", text + "\n")
        return {"outputs": document["outputs"], "used": document["job"], "notice": self._model.notice}

"""The sidecar of a video: JSON that is written last, and by which a finished job is recognized."""

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.models.base import ModelInfo
from svdq.pipeline.parameters import Format
from svdq.producer.job import Job, parse_job
from svdq.producer.queue import sidecar_digest
from svdq.producer.results.finished_videos import notice_of, parse_document
from svdq.producer.storage.storage import Storage


def output_keys(job: Job, job_id: str) -> dict[Format, str]:
    """Name the storage keys of a job's files by format; png is a folder of frames."""
    stem = job.output_stem(job_id)
    return {kind: stem if kind == "png" else f"{stem}.{kind}" for kind in job.formats}


def sidecar_key(job: Job, job_id: str) -> str:
    """Name the storage key of a job's sidecar."""
    return f"{job.output_stem(job_id)}.json"


def notice_for(model: ModelInfo, job: Job) -> str:
    """Return the notice of a model with the prompt that it ignored: models without weights ignore all prompts."""
    prompt = getattr(job, "prompt", "")
    return model.notice if model.family is not None or not prompt else f"{model.notice}, ignored the prompt: {prompt}"


def result_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Make the result of a job in Redis from its sidecar."""
    return {
        "outputs": document["outputs"],
        "used": document["job"],
        "model": document["model"]["name"],
        "notice": notice_of(document),
    }


def timings_of(sample: Sample, write_s: float) -> dict[str, Any]:
    """Return the end, the seconds, the memory, the steps of each rank and the resumptions of a video."""
    seconds = {**sample.seconds, "denoise": sum(denoise_s for _, _, denoise_s in sample.stages), "write": write_s}
    timings: dict[str, Any] = {
        "finished_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        # torchrun's process id identifies the group; it stays the same when ranks are restarted.
        "group": {"ranks": len(sample.boundaries) - 1, "host": socket.gethostname(), "pid": os.getppid()},
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "stages": [
            {"rank": rank, "steps": steps, "seconds": round(denoise_s, 4)} for rank, steps, denoise_s in sample.stages
        ],
    }
    if sample.memory:
        timings["memory_bytes"] = dict(sample.memory)
    if sample.resumed:
        timings["resumed"] = [asdict(resumption) for resumption in sample.resumed]
    return timings


def find_result(storage: Storage, model: ModelInfo, job: Job, job_id: str, replaced: str = "") -> dict[str, Any] | None:
    """Return the result of a job whose files exist, because a crash prevented its acknowledgement; else None.

    `job` has frames filled in; the decode_chunk_size of the files may differ. `model` must have made them. Those of the
    sidecar with the digest `replaced` are to be rendered again.

    Raises:
        UnavailableError: the storage cannot be reached.
    """
    key = sidecar_key(job, job_id)
    if not storage.exists(key):
        return None
    try:
        data = storage.read(key)
        if sidecar_digest(data) == replaced:
            return None
        document = parse_document(data)
        made = (document["job_id"], parse_job(document["job"]), document["model"]["name"])
        result = result_of(document)
        if not isinstance(result["outputs"], list) or not all(isinstance(path, str) for path in result["outputs"]):
            raise ValueError("its outputs are no paths")
    except UnavailableError:
        raise
    except (ValueError, KeyError, TypeError, SvdqError):
        return None  # not a sidecar of svdq, or of another version
    wanted = job.model_copy(update={"decode_chunk_size": made[1].decode_chunk_size})
    if made != (job_id, wanted, model.name) or not all(map(storage.exists, output_keys(job, job_id).values())):
        return None
    return result

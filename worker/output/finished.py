"""The account that is written beside a video's files, last of all; and recognising by it what is finished already.

Knows no queue.
"""

import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.pipeline.models.base import ModelInfo
from svdq.pipeline.parameters import Format, VideoParameters
from svdq.pipeline.sample import Sample
from svdq.producer.job import Job
from svdq.producer.results.provenance import notice_of, parse_document
from svdq.producer.storage.storage import Storage


def output_keys(job: Job, job_id: str) -> dict[Format, str]:
    """Name the storage keys of a job's files by format; png is a folder of frames."""
    stem = job.output_stem(job_id)
    return {kind: stem if kind == "png" else f"{stem}.{kind}" for kind in job.formats}


def sidecar_key(job: Job, job_id: str) -> str:
    """Name the storage key of the account beside a job's files."""
    return f"{job.output_stem(job_id)}.json"


def job_as_used(parameters: VideoParameters, metadata: Mapping[str, Any]) -> Job:
    """Put a job together again from a sample's parameters and metadata."""
    return Job.model_validate(
        parameters.model_dump() | {name: value for name, value in metadata.items() if name in Job.model_fields}
    )


def result_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Make the result of a job, as Redis keeps it, from its account."""
    return {
        "outputs": document["outputs"],
        "used": document["job"],
        "model": document["model"]["name"],
        "notice": notice_of(document),
    }


def timings_of(sample: Sample, write_s: float) -> dict[str, Any]:
    """Tell when a video was finished, what time and memory it took, on which ranks, and how often it was taken up."""
    seconds = {**sample.seconds, "denoise": sum(denoise_s for _, _, denoise_s in sample.stages), "write": write_s}
    timings: dict[str, Any] = {
        "finished_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        # The group by the process that its ranks have in common, torchrun; it lasts when ranks are started again.
        "group": {"ranks": len(sample.boundaries) - 1, "host": socket.gethostname(), "pid": os.getppid()},
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "stages": [
            {"rank": rank, "steps": steps, "seconds": round(denoise_s, 4)} for rank, steps, denoise_s in sample.stages
        ],
    }
    if sample.memory:
        timings["memory_bytes"] = dict(sample.memory)
    if sample.resumed:
        timings["resumed"] = [
            {"from_step": resumption.from_step, "steps_done_again": resumption.steps_done_again}
            for resumption in sample.resumed
        ]
    return timings


def find_result(storage: Storage, model: ModelInfo, job: Job, job_id: str) -> dict[str, Any] | None:
    """Find what was finished before and only not acknowledged: the result of a job whose files are all there.

    Args:
        storage: where they would be.
        model: what they must be made with.
        job: with frames filled in; memory may have decided for another chunk size.
        job_id: its id.

    Raises:
        UnavailableError: the storage cannot be reached.
    """
    key = sidecar_key(job, job_id)
    if not storage.exists(key):
        return None
    try:
        document = parse_document(storage.read(key))
        made = (document["job_id"], Job.model_validate(document["job"]), document["model"]["name"])
        result = result_of(document)
        if not isinstance(result["outputs"], list) or not all(isinstance(path, str) for path in result["outputs"]):
            raise ValueError("its outputs are no paths")
    except UnavailableError:
        raise
    except (ValueError, KeyError, TypeError, SvdqError):
        return None  # not an account of ours, or one of another version
    wanted = job.model_copy(update={"decode_chunk_size": made[1].decode_chunk_size})
    if made != (job_id, wanted, model.name) or not all(map(storage.exists, output_keys(job, job_id).values())):
        return None
    return result

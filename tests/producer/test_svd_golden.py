"""Ids, payloads and sidecars of SVD jobs as they were before there were other families: they stay, byte by byte."""

import json
from pathlib import Path
from typing import Any

import pytest

from svdq.producer.queue import SvdqQueue
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.enqueue import new_rq_job
from svdq.producer.submitting.entries import Entry
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.photos import Photo

#: Made by the code before there were families: the fields of `Draft` and `JobSpec`, and what became of them.
GOLDEN = json.loads(Path(__file__).with_name("svd_golden.json").read_text(encoding="utf-8"))


class _NoConnection:
    """Creating an RQ job needs no server."""

    connection_pool = None


def record(options: dict[str, Any], spec: dict[str, Any], photo: dict[str, str]) -> dict[str, Any]:
    formats = options.get("formats")
    options = options | ({"formats": tuple(formats)} if formats else {})
    made = []
    for entry in JobSpec(drafts=(Draft(**options),), **spec).entries(
        Photo(path=Path("x.jpg"), **photo, num_bytes=1), first_index=1
    ):
        job = entry.job
        if options.get("seed") is None:  # random
            job = job.model_copy(update={"seed": 0})
        queue = SvdqQueue(connection=_NoConnection())  # type: ignore[arg-type]
        rq_job = new_rq_job(queue, Entry(job=job, job_id=entry.job_id, photo="/photos/x.jpg"))
        used = job.model_copy(update={"frames": job.frames or 25, "decode_chunk_size": 7})
        made.append(
            {
                "id": entry.job_id,
                "payload": rq_job.serializer.dumps(rq_job.kwargs).decode(),
                "description": rq_job.description,
                "sidecar": json.dumps(used.model_dump(mode="json"), ensure_ascii=False),
            }
        )
    return {"options": options, "spec": spec, "photo": photo, "made": made}


@pytest.mark.parametrize("golden", GOLDEN)
def test_ids_payloads_and_sidecars_stay(golden: dict[str, Any]) -> None:
    made = record(golden["options"], golden["spec"], golden["photo"])["made"]
    assert made == golden["made"]

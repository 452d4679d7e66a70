"""Finished videos without a worker: real files and the JSON beside them, as the last rank leaves them."""

import hashlib
import io
import json
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from svdq.pipeline.media.video import write_video
from svdq.producer.storage.storage import Storage
from tests.queued import SvdJob

NOTICE = "preview (no diffusion model)"


def _photo() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (96, 64), "navy").save(buffer, "jpeg")
    return buffer.getvalue()


PHOTO = _photo()


@cache
def _encoded(kind: str, level: int) -> dict[str, bytes]:
    """Two tiny gray frames: the file, or those of a folder by the rest of their keys."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "video")
        write_video(np.full((2, 64, 64, 3), level, np.uint8), path, kind, 7, "{}")
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return {f"/{file.name}" if path.is_dir() else "": file.read_bytes() for file in files}


def add_video(
    storage: Storage,
    number: int,
    *,
    name: str = "photo",
    formats: Sequence[str] = ("mp4",),
    folder: str = "",
    photo: bytes = PHOTO,
    suffix: str = "jpg",
    source: str = "",
    owner: str = "",
    motion_bucket_id: int = 127,
    finished_at: datetime | None = None,
    seconds: dict[str, float] | None = None,
    group: dict[str, Any] | None = None,
    job_id: str = "",
    level: int = 0,
) -> str:
    """Put a finished video of two tiny frames of a gray level into a storage; return the id of its job."""
    image = f"inputs/{hashlib.sha256(photo).hexdigest()}.{suffix}"
    storage.write_bytes(image, photo)
    job = SvdJob(
        motion_bucket_id=motion_bucket_id,
        image=image,
        name=name,
        seed=number,
        steps=4,
        width=64,
        height=64,
        frames=2,
        formats=formats,
        folder=folder,
    )
    job_id = job_id or f"{number:020x}"
    stem = job.output_stem(job_id)
    keys = [stem if kind == "png" else f"{stem}.{kind}" for kind in formats]
    for kind, key in zip(formats, keys, strict=True):
        for end, data in _encoded(kind, level).items():
            storage.write_bytes(f"{key}{end}", data)
    document = {
        "svdq": "0",
        "job_id": job_id,
        "job": job.model_dump(mode="json"),
        "model": {"name": "preview", "notice": NOTICE},
        "outputs": [storage.location(key) for key in keys],
        "finished_at": (finished_at or datetime.now(UTC)).isoformat(),
    }
    document |= {"source": source} if source else {}
    document |= {"owner": owner} if owner else {}
    document |= {"seconds": seconds} if seconds else {}
    document |= {"group": group} if group else {}
    storage.write_text(f"{stem}.json", json.dumps(document))
    return job_id

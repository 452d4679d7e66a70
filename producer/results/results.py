"""The finished videos of a storage, found by the JSON beside them. Knows no Redis: a sidecar outlives its job there."""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from svdq.producer.moments import as_utc
from svdq.producer.results.provenance import notice_of
from svdq.producer.storage.files import Entry
from svdq.producer.storage.storage import Storage

#: Folder of the storage for videos.
OUTPUTS = "outputs"
#: The end of the name of every file of a job: its id, then the extension, which a folder of frames has not.
_ID_IN_NAME = re.compile(r"-([0-9a-f]{20})(?:\.[a-z0-9]+)?(?:/|$)")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished video."""

    #: Id of its job.
    job_id: str
    #: Storage key of its sidecar.
    sidecar: str
    #: The files beside it; of a folder of frames every frame.
    files: tuple[Entry, ...]
    #: Storage keys of the videos in the order of their formats; a folder for png frames.
    outputs: tuple[str, ...]
    #: When the last of them was finished; has a zone.
    finished_at: datetime
    #: What the sidecar says, and its bytes.
    document: dict[str, Any] = field(repr=False)
    data: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """Its name, for people."""
        return str(self.document["job"].get("name", "?"))

    @property
    def notice(self) -> str:
        """What is to be said wherever it is shown."""
        return notice_of(self.document)

    @property
    def image(self) -> str:
        """Storage key of its photo."""
        return str(self.document["job"].get("image", ""))

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(entry.size for entry in self.files)


def find_results(
    storage: Storage,
    *,
    since: datetime | None = None,
    job_ids: Collection[str] | None = None,
    folder: str = OUTPUTS,
) -> Iterator[Result]:
    """Find finished videos, in any order; what is no sidecar of ours is passed over.

    Args:
        storage: where they are.
        since: only those that were finished then or later; older sidecars are not even read.
        job_ids: only those of these jobs; None means all.
        folder: key of the folder to look in, however deep.

    Raises:
        UnavailableError: the storage cannot be reached.
    """
    by_job: dict[str, list[Entry]] = {}
    for entry in storage.entries(folder):
        job_id = job_id_in(entry.key)
        if job_id is not None and (job_ids is None or job_id in job_ids):
            by_job.setdefault(job_id, []).append(entry)
    sidecars = {
        entry.key: (entry, [other for other in entries if other is not entry])
        for entries in by_job.values()
        for entry in entries
        if entry.key.endswith(".json") and (since is None or entry.modified_at >= since)
    }
    for key, data in storage.read_many(list(sidecars)):
        result = _read(*sidecars[key], data)
        if result is not None and (since is None or result.finished_at >= since):
            yield result


def job_id_in(key: str) -> str | None:
    """Find the id of the job in the key of one of its files; None in those of others."""
    found = _ID_IN_NAME.search(key)
    return found[1] if found else None


def top_of(key: str) -> str:
    """Name the file or the folder of frames of a job that a key of one of its files leads to."""
    found = _ID_IN_NAME.search(key)
    return key[: found.end()].rstrip("/") if found else key


def _read(sidecar: Entry, others: list[Entry], data: bytes) -> Result | None:
    """Read a sidecar, which anyone may have put there or changed."""
    try:
        document = json.loads(data)
        job_id, locations = document["job_id"], document["outputs"]
        if not isinstance(document["job"], dict) or job_id != job_id_in(sidecar.key):
            return None
        # Where the storage was when they were made may be another place now; beside the sidecar they are in any case.
        folder = sidecar.key.rpartition("/")[0]
        outputs = tuple(f"{folder}/{str(location).rstrip('/').rpartition('/')[2]}" for location in locations)
    except (ValueError, LookupError, TypeError):
        return None
    files = [entry for key in outputs for entry in others if entry.key == key or entry.key.startswith(f"{key}/")]
    if not all(any(entry.key.startswith(key) for entry in files) for key in outputs):
        return None  # they were removed, or are being made anew
    return Result(
        job_id=job_id,
        sidecar=sidecar.key,
        files=tuple(sorted(files, key=lambda entry: entry.key)),
        outputs=outputs,
        finished_at=_finished_at(document, sidecar),
        document=document,
        data=data,
    )


def _finished_at(document: dict[str, Any], sidecar: Entry) -> datetime:
    """When a video was finished; those of earlier versions do not say it, and go by their sidecar's time."""
    try:
        return as_utc(datetime.fromisoformat(document["finished_at"]))
    except (KeyError, TypeError, ValueError):
        return sidecar.modified_at

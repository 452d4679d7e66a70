"""Finds the finished videos of a storage by their sidecars, which outlive the jobs in Redis."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from svdq.producer.results.provenance import MAX_SIDECAR_BYTES, notice_of, parse_document
from svdq.producer.storage.local import Entry
from svdq.producer.storage.storage import Storage
from svdq.producer.timeparse import as_utc

#: Folder of the storage for videos.
OUTPUTS = "outputs"
#: Ids of jobs that RQ allows.
_JOB_ID = re.compile(r"[A-Za-z0-9_-]+")
#: Suffix of a video beside its sidecar; "" is a folder of frames.
_EXTENSION = re.compile(r"(?:\.(?!json$)[a-z0-9]{1,5})?")
_FRAME = re.compile(r"frame_\d+\.png")
#: Times outside of this range overflow in some time zones.
_EARLIEST, _LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished video."""

    #: Id of its job.
    job_id: str
    #: Its sidecar.
    sidecar: Entry
    #: Its existing files; for a folder of frames, every frame but no other file.
    files: tuple[Entry, ...]
    #: Storage keys of the videos in the order of their formats; a folder for png frames.
    outputs: tuple[str, ...]
    #: When the last file was finished, with a time zone.
    finished_at: datetime
    #: The parsed sidecar, and its bytes.
    document: dict[str, Any] = field(repr=False)
    data: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """Its name for display."""
        return str(self.document["job"].get("name", "?"))

    @property
    def source(self) -> str:
        """Where its photo was, from the submitted folder on; "" if that was not recorded."""
        source = self.document.get("source", "")
        return source if isinstance(source, str) else ""

    @property
    def notice(self) -> str:
        """The notice to show with it."""
        return notice_of(self.document)

    @property
    def is_whole(self) -> bool:
        """Whether all of its files exist: none was removed or is being rendered again."""
        return all(any(_is_of(entry.key, key) for entry in self.files) for key in self.outputs)

    @property
    def size(self) -> int:
        """Total size of its files in bytes."""
        return sum(entry.size for entry in self.files)


def find_results(
    storage: Storage,
    *,
    since: datetime | None = None,
    job_ids: Collection[str] | None = None,
    folder: str = OUTPUTS,
    on_bad: Callable[[str], None] = lambda reason: None,
) -> Iterator[Result]:
    """Find finished videos whose files all exist, in any order.

    Args:
        storage: with the videos.
        since: earliest end; older sidecars are not read.
        job_ids: ids of jobs; None means all.
        folder: key of the folder to search, with its subfolders.
        on_bad: called with a sentence for each JSON file that is not a sidecar; the file is left out.

    Raises:
        UnavailableError: the storage cannot be reached.
    """
    ends = None if job_ids is None else tuple(f"-{job_id}.json" for job_id in job_ids)

    def is_wanted(sidecar: Entry) -> bool:
        return (since is None or sidecar.modified_at >= since) and (ends is None or sidecar.key.endswith(ends))

    for result in read_results(storage, storage.entries(folder), is_wanted, on_bad):
        if result.is_whole and (since is None or result.finished_at >= since):
            yield result


def read_results(
    storage: Storage, entries: Iterable[Entry], is_wanted: Callable[[Entry], bool], on_bad: Callable[[str], None]
) -> Iterator[Result]:
    """Read sidecars, and find the files of each.

    `entries` are all files of a folder. `on_bad` is called with a sentence for each JSON file that is not a sidecar,
    which is left out.
    """
    files: dict[str, Entry] = {}
    frames: dict[str, list[Entry]] = {}
    sidecars: dict[str, Entry] = {}
    for entry in entries:
        folder, _, name = entry.key.rpartition("/")
        if _FRAME.fullmatch(name):
            frames.setdefault(folder, []).append(entry)
        elif not name.endswith(".json"):
            files[entry.key] = entry
        elif is_wanted(entry):
            if entry.size > MAX_SIDECAR_BYTES:
                on_bad(_bad(storage, entry.key, f"it has {entry.size:,} bytes"))
            else:
                sidecars[entry.key] = entry
    for key, data in storage.read_many(list(sidecars)):
        try:
            yield _read(sidecars[key], data, files, frames)
        except ValueError as error:
            on_bad(_bad(storage, key, str(error)))


def _bad(storage: Storage, key: str, reason: str) -> str:
    return f"{storage.location(key)!r} does not say how a video was made ({reason}); it is left out."


def _read(sidecar: Entry, data: bytes, files: dict[str, Entry], frames: dict[str, list[Entry]]) -> Result:
    """Read a sidecar, which is untrusted input.

    Raises:
        ValueError: the file is not a valid sidecar.
    """
    document = parse_document(data)
    job_id, outputs = document.get("job_id"), document.get("outputs")
    stem = sidecar.key.removesuffix(".json")
    if not isinstance(job_id, str) or not _JOB_ID.fullmatch(job_id) or not stem.endswith(f"-{job_id}"):
        raise ValueError("it is not named after its job")
    if not isinstance(outputs, list) or not outputs or not all(isinstance(location, str) for location in outputs):
        raise ValueError("it names no files")
    if not str(document["job"].get("name", "?")).isprintable():
        raise ValueError("its name cannot be printed")
    # The storage may have moved since the files were made; they are always beside the sidecar.
    folder, _, name = stem.rpartition("/")
    names = [location.rstrip("/").rpartition("/")[2] for location in outputs]
    if not all(other.startswith(name) and _EXTENSION.fullmatch(other.removeprefix(name)) for other in names):
        raise ValueError("it names files of other videos")
    keys = tuple(f"{folder}/{other}" for other in dict.fromkeys(names))
    found = [entry for key in keys for entry in ([files[key]] if key in files else frames.get(key, ()))]
    return Result(
        job_id=job_id,
        sidecar=sidecar,
        files=tuple(sorted(found, key=lambda entry: entry.key)),
        outputs=keys,
        finished_at=_finished_at(document, sidecar),
        document=document,
        data=data,
    )


def _is_of(key: str, output: str) -> bool:
    return key == output or key.startswith(f"{output}/")


def _finished_at(document: dict[str, Any], sidecar: Entry) -> datetime:
    """Return when a video was finished; old sidecars lack the time, so the file's time counts."""
    if "finished_at" not in document:
        return sidecar.modified_at
    try:
        finished_at = as_utc(datetime.fromisoformat(document["finished_at"]))
        if _EARLIEST < finished_at < _LATEST:
            return finished_at
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError("its finishing time is invalid")

"""Finds the finished videos of a storage by their sidecars, which outlive the jobs in Redis."""

import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.producer.files import open_regular
from svdq.producer.storage.local import Entry
from svdq.producer.storage.storage import Storage
from svdq.producer.text import as_utc

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


#: EXIF tag ImageDescription, which webp files have.
EXIF_IMAGE_DESCRIPTION = 0x010E
#: Largest size of a document in bytes; a sidecar has a few thousand.
MAX_SIDECAR_BYTES = 1 << 20
#: Largest nesting of lists and objects; a sidecar has three levels.
MAX_DEPTH = 20

#: Bytes 4 to 8 of an mp4.
MP4_MARK = b"ftyp"
#: The comment tag of iTunes metadata, which ffmpeg writes.
MP4_COMMENT = "\xa9cmt"


def read_provenance(path: Path) -> dict[str, Any]:
    """Read how a video was made from an mp4, gif, webp or png, a folder of png frames, or a sidecar.

    Raises:
        InputError: the file does not exist, or was not made by svdq.
    """
    try:
        document = parse_document(_read_comment(_first_frame(path) if path.is_dir() else path) or "")
    except FileNotFoundError as error:
        raise InputError(f"There is no file {str(path)!r}; check its path.") from error
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror is not None:  # those of Pillow have no such text
            raise InputError(f"The file {str(path)!r} cannot be read ({error.strerror}); check its rights.") from error
        # Parsers of foreign files raise more types than they document; any error means that the file is not ours.
        raise _not_ours(path) from error
    return document


def parse_document(text: str | bytes) -> dict[str, Any]:
    """Parse the JSON document of a video, which anyone may have changed.

    Raises:
        ValueError: the document is invalid; the message says why.
    """
    try:
        document = json.loads(text.decode() if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError("it is not JSON") from error
    if not isinstance(document, dict) or "svdq" not in document or not isinstance(document.get("job"), dict):
        raise ValueError("svdq did not write it")
    if not _is_shallow(document, MAX_DEPTH):
        raise ValueError("it is nested too deeply")
    try:
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has unpaired surrogates") from error
    except ValueError as error:
        raise ValueError("it has numbers that are not finite") from error
    return document


def _is_shallow(value: object, depth: int) -> bool:
    """Return whether lists and objects are nested at most `depth` levels."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth >= 0 and all(_is_shallow(part, depth - 1) for part in parts)


def notice_of(document: Mapping[str, Any]) -> str:
    """Return the notice to show with a video, such as "preview (no diffusion model)", or ""."""
    model = document.get("model")
    notice = model.get("notice") if isinstance(model, dict) else None
    return str(notice or "")


def _not_ours(path: Path) -> InputError:
    return InputError(
        f"{str(path)!r} does not say how it was made; give a video that svdq made, or the .json beside it, unchanged."
    )


def _first_frame(folder: Path) -> Path:
    frames = sorted(folder.glob("*.png"))
    if not frames:
        raise InputError(f"There are no png frames in the folder {str(folder)!r}; give a video that svdq made.")
    return frames[0]


def _read_comment(path: Path) -> str | bytes | None:
    is_sidecar = path.suffix.lower() == ".json"
    with open_regular(path) as file:
        head = file.read(MAX_SIDECAR_BYTES + 1 if is_sidecar else 12)
    if is_sidecar:
        return head if len(head) <= MAX_SIDECAR_BYTES else None
    return _read_mp4(path) if head[4:8] == MP4_MARK else _read_image(path)


def _read_mp4(path: Path) -> str | None:
    from mutagen.mp4 import MP4  # imported on demand: only this function needs it

    tags: Any = MP4(path).tags  # type: ignore[no-untyped-call]
    comments = (tags or {}).get(MP4_COMMENT)
    return str(comments[0]) if comments else None


def _read_image(path: Path) -> str | None:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata of untrusted files
        with Image.open(path, formats=("GIF", "WEBP", "PNG")) as image:
            comment = image.info.get("comment")
            if comment is None and (description := image.getexif().get(EXIF_IMAGE_DESCRIPTION)):
                # EXIF has no Unicode type: the tag holds UTF-8, which Pillow decodes as Latin-1.
                comment = description.encode("latin-1", "replace")
    return comment.decode("utf-8", "replace") if isinstance(comment, bytes) else comment

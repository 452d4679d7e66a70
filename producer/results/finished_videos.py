"""Finds the finished videos of a storage by their sidecars, which outlive the jobs in Redis."""

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO

from svdq.pipeline.errors import InputError
from svdq.producer.files import open_regular
from svdq.producer.job import ID, parse_job
from svdq.producer.records import Sidecar
from svdq.producer.storage.local import FRAME, FileInfo
from svdq.producer.storage.storage import Storage

OUTPUTS = "outputs"
_ID_OF_SIDECAR = re.compile(rf"-({ID}|[^-/]+)\.json$")
_EXTENSION = re.compile(r"(?:\.(?!json$)[a-z0-9]{1,5})?")  # of a video; "" is a folder of frames
EXIF_IMAGE_DESCRIPTION = 0x010E


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished video."""

    job_id: str
    sidecar: FileInfo
    files: tuple[FileInfo, ...]  # that exist; for a folder of frames, every frame but no other file
    #: Storage keys of the videos in the order of their formats; a folder for png frames.
    outputs: tuple[str, ...]
    finished_at: datetime
    document: Sidecar = field(repr=False)
    data: bytes = field(repr=False)  # of the sidecar

    @property
    def is_whole(self) -> bool:
        """Whether all of its files exist: none was removed or is being rendered again."""
        return all(
            any(entry.key == key or entry.key.startswith(f"{key}/") for entry in self.files) for key in self.outputs
        )

    @property
    def is_in_its_folder(self) -> bool:
        """Whether it is where its job has written it: people move and copy videos with their JSON."""
        made_in = "/".join(filter(None, (OUTPUTS, str(self.document.job.get("folder") or ""))))
        return self.sidecar.key.rpartition("/")[0] == made_in

    @property
    def original(self) -> str:
        """The id of the rendered video that it is an upscaled copy of; "" for none, and if another version made it."""
        try:
            return parse_job(self.document.job).original
        except ValueError:
            return ""


def find_results(
    storage: Storage,
    *,
    since: datetime | None = None,
    job_ids: Collection[str] | None = None,
    fetched: str | None = None,
    on_bad: Callable[[str], None] = lambda reason: None,
) -> Iterator[Result]:
    """Find finished videos whose files all exist, in any order, in `outputs` and its subfolders.

    Or in `fetched`, the key of a folder that `svdq fetch` has filled, perhaps under other names. Sidecars older than
    `since` are not read. `on_bad` is called with a sentence for each JSON file that is no sidecar.
    """
    ends = None if job_ids is None else tuple(f"-{job_id}.json" for job_id in job_ids)

    def is_wanted(sidecar: FileInfo) -> bool:
        # Files have the time of their host or storage, whose clock may differ from the clock of Redis.
        return (since is None or sidecar.modified_at >= since - timedelta(days=1)) and (
            ends is None or sidecar.key.endswith(ends)
        )

    entries = storage.entries(OUTPUTS if fetched is None else fetched)
    for result in read_results(storage, entries, is_wanted, on_bad, any_names=fetched is not None):
        if result.is_whole and (since is None or result.finished_at >= since):
            yield result


def read_results(
    storage: Storage,
    entries: Iterable[FileInfo],
    is_wanted: Callable[[FileInfo], bool],
    on_bad: Callable[[str], None],
    *,
    any_names: bool = False,
) -> Iterator[Result]:
    """Read the sidecars among the files of a folder, and find the files of each; `on_bad` as in `find_results`.

    Files are named after their job, or with `any_names` as their sidecar is.
    """
    files: dict[str, FileInfo] = {}
    frames: dict[str, list[FileInfo]] = {}
    sidecars: dict[str, FileInfo] = {}
    for entry in entries:
        folder, _, name = entry.key.rpartition("/")
        if FRAME.fullmatch(name):
            frames.setdefault(folder, []).append(entry)
        elif not name.endswith(".json"):
            files[entry.key] = entry
        elif is_wanted(entry):
            sidecars[entry.key] = entry
    for key, data in storage.read_many(list(sidecars)):
        try:
            yield _read(sidecars[key], data, files, frames, any_names)
        except ValueError as error:
            on_bad(f"{storage.location(key)!r} does not say how a video was made ({error}); it is left out.")


def _read(
    sidecar: FileInfo, data: bytes, files: dict[str, FileInfo], frames: dict[str, list[FileInfo]], any_names: bool
) -> Result:
    document = Sidecar.parse(data)
    stem = sidecar.key.removesuffix(".json")
    named_after = f"-{document.job_id}"
    if not document.job_id or not (any_names or stem.endswith(named_after)):
        raise ValueError("it is not named after its job")
    # The storage may have moved since the files were made; they are always beside the sidecar.
    names = [location.rstrip("/").rpartition("/")[2].rpartition(named_after) for location in document.outputs]
    if not names:
        raise ValueError("it names no files")
    made_as = names[0][0] if any_names else stem.rpartition("/")[2].removesuffix(named_after)
    if not all(name[:2] == (made_as, named_after) and _EXTENSION.fullmatch(name[2]) for name in names):
        raise ValueError("it names files of other videos")
    keys = tuple(dict.fromkeys(f"{stem}{extension}" for _, _, extension in names))
    found = [entry for key in keys for entry in ([files[key]] if key in files else frames.get(key, ()))]
    return Result(
        job_id=document.job_id,
        sidecar=sidecar,
        files=tuple(sorted(found, key=lambda entry: entry.key)),
        outputs=keys,
        finished_at=document.finished_at or sidecar.modified_at,  # sidecars of early versions lack the time
        document=document,
        data=data,
    )


def results_of_job(storage: Storage, job_id: str) -> list[Result]:
    """Find all places of the video of a job in `outputs`, the folder of its job first; lists the whole storage."""
    entries = storage.entries(OUTPUTS)
    found = read_results(storage, entries, lambda sidecar: sidecar.key.endswith(f"-{job_id}.json"), lambda reason: None)
    return sorted(found, key=by_place)


def by_place(result: Result) -> tuple[bool, str]:
    """Sort the places of a video: where its job has written it, then by name."""
    return not result.is_in_its_folder, result.sidecar.key


def ids_of_sidecars(entries: Iterable[FileInfo]) -> list[str]:
    """Return the ids of jobs that the names of sidecars have."""
    return [match[1] for entry in entries if (match := _ID_OF_SIDECAR.search(entry.key))]


def has_files(storage: Storage, job_id: str, document: object) -> bool:
    """Return whether all files of a finished job are in a storage; also True if the job is of another version."""
    try:
        job = parse_job(document)
    except ValueError:
        return True
    return all(map(storage.exists, (job.sidecar_key(job_id), *job.output_keys(job_id).values())))


def read_provenance(path: Path) -> Sidecar:
    """Read how svdq made an mp4, gif, webp, png, folder of frames or sidecar; raises InputError if it did not."""
    try:
        return Sidecar.parse(_read_comment(_first_frame(path) if path.is_dir() else path) or "")
    except FileNotFoundError as error:
        raise InputError(f"There is no file {str(path)!r}; check its path.") from error
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror is not None:  # Pillow's errors have no such text
            raise InputError(f"The file {str(path)!r} cannot be read ({error.strerror}); check its rights.") from error
        # Parsers of foreign files raise more types than they document; any error means that the file is not ours.
        raise InputError(
            f"{str(path)!r} does not say how it was made; give a video that svdq made, or the .json beside it, "
            "unchanged."
        ) from error


def _first_frame(folder: Path) -> Path:
    frames = sorted(folder.glob("*.png"))
    if not frames:
        raise InputError(f"There are no png frames in the folder {str(folder)!r}; give a video that svdq made.")
    return frames[0]


def _read_comment(path: Path) -> str | bytes | None:
    with open_regular(path) as file:
        if path.suffix.lower() == ".json":
            return file.read()
        is_mp4 = file.read(12)[4:8] == b"ftyp"
        file.seek(0)
        return _read_mp4(file) if is_mp4 else _read_image(path)


def _read_mp4(file: BinaryIO) -> str | None:
    from tinytag import TinyTag  # imported on demand: only this function needs it

    # The comment is the iTunes tag that ffmpeg writes.
    return TinyTag.get("video.mp4", file, duration=False).comment


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

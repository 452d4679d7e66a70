"""Copies finished videos from a storage into a local folder.

A video's files get their names only when all of them have arrived, the JSON last. A video is not fetched again if its
JSON is unchanged in the folder and the files beside it have the right sizes. Nothing that is there is replaced: where a
file has the name and other bytes, the video gets a number.
"""

import contextlib
import errno
import fcntl
import filecmp
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import redis

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.media.capture import Capture
from svdq.pipeline.models.model_name import model_stem
from svdq.producer.connection import session
from svdq.producer.files import sweep, temporary_name
from svdq.producer.job import parse_job
from svdq.producer.name_templates import has_field, render_folder, render_name, template_values
from svdq.producer.results.finished_videos import OUTPUTS, Result, find_results, ids_of_sidecars
from svdq.producer.settings import Settings, given_path
from svdq.producer.status.job_view import view
from svdq.producer.status.registries import newest_ids
from svdq.producer.status.selection import complete_id, complete_ids
from svdq.producer.storage.local import FileInfo, flush
from svdq.producer.storage.storage import Storage

ARRIVING_PREFIX = ".svdq-"


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """The outcome of fetching one video."""

    job_id: str
    paths: tuple[Path, ...]  # of its files: a folder for png frames
    copied: int  # bytes; 0 if the video existed already


def results_of(
    settings: Settings, storage: Storage, job_ids: Sequence[str], on_bad: Callable[[str], None] = lambda reason: None
) -> list[Result]:
    """Find the videos of jobs by prefixes of their ids, in the order given.

    `on_bad` is called with a sentence for each of their sidecars that cannot be read. Raises InputError, with the job's
    status, if one has no video, and UnavailableError for the storage and Redis.
    """
    if not all(len(text) >= 20 for text in job_ids):  # else whole ids
        known = ids_of_sidecars(storage.entries(OUTPUTS))
        job_ids = [
            complete_id(text, known) if any(each.startswith(text) for each in known) else text for text in job_ids
        ]
    found = {result.job_id: result for result in find_results(storage, job_ids=frozenset(job_ids), on_bad=on_bad)}
    missing = [job_id for job_id in job_ids if job_id not in found]
    if missing:
        raise InputError(_why_missing(settings, storage, missing[0]))
    return [found[job_id] for job_id in dict.fromkeys(job_ids)]


def ids_of(connection: redis.Redis, storage: Storage, beginnings: Sequence[str]) -> list[str]:
    """Complete prefixes of ids of jobs, also of videos whose jobs Redis has forgotten; raises as `complete_ids`."""
    with contextlib.suppress(InputError):  # the storage may be large, and is asked only for what Redis does not know
        return complete_ids(connection, beginnings)
    known = [*newest_ids(connection), *ids_of_sidecars(storage.entries(OUTPUTS))]
    return list(dict.fromkeys(complete_id(text, known) for text in beginnings))


def split_template(output: str) -> tuple[Path, str]:
    """Return the folder of an output, up to the first part with a field, and the template that follows, if any.

    Raises InputError as `given_path`.
    """
    parts = output.split("/")
    number = next((index for index, part in enumerate(parts) if has_field(part)), len(parts))
    folder = "/".join(parts[:number]) or ("/" if output.startswith("/") else ".")
    return given_path(folder), "/".join(parts[number:])


def fetch_all(storage: Storage, results: Sequence[Result], output: str) -> Iterator[Fetched]:
    """Copy videos into a folder one by one, or to where a template says, with a number if another file has the name.

    Without a template, the folder corresponds to outputs/ of the storage. Without videos the folder is not created.
    Raises InputError if the folder cannot be written, or a video does not have a field of the template, and
    UnavailableError for the storage.
    """
    if not results:
        return
    folder, template = split_template(output)
    stems = [_stem(result, template) for result in results]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder.glob(f"{ARRIVING_PREFIX}*"), ARRIVING_PREFIX)
        for result, stem in zip(results, stems, strict=True):
            yield _fetch(storage, result, folder, folder / stem)
    except OSError as error:
        raise InputError(f"The folder {str(folder)!r} cannot be written ({error.strerror}); give another.") from error


def _stem(result: Result, template: str) -> str:
    """Return the path of a video's files in the folder, without their extension."""
    stem = result.sidecar.key.removesuffix(".json").removeprefix(f"{OUTPUTS}/")
    if not template:
        return stem
    try:
        job = parse_job(result.document.job)
    except ValueError:
        raise InputError(
            f"The video {result.job_id} is of another version of svdq; fetch it without a template."
        ) from None
    source, (below, _, name) = result.document.source, stem.rpartition("/")
    model, day = job.model or model_stem(result.document.model.name), result.finished_at.astimezone().date()
    taken = Capture.parse(result.document.taken, "").time
    values = template_values(job, PurePosixPath(source).stem or job.name, source, model, day, taken)
    folders, _, last = template.rpartition("/")
    if has_field(last):
        name = render_name(last, values)
    else:
        folders = template
    parts = (render_folder(folders, values), below if "{folder" not in template else "", name)
    return "/".join(filter(None, parts))


def _numbered(stem: Path) -> Iterator[Path]:
    """Yield the paths that the files of a video may have without an extension: `stem`, then with numbers from 2."""
    yield stem
    yield from (stem.with_name(f"{stem.name}-{number}") for number in itertools.count(2))


def _moved(result: Result, key: str, stem: Path) -> Path:
    """Return the path of a file of a video, all of whose paths begin with `stem`."""
    return Path(f"{stem}{key.removeprefix(result.sidecar.key.removesuffix('.json'))}")


def _fetch(storage: Storage, result: Result, folder: Path, stem: Path) -> Fetched:
    for place in _numbered(stem):
        if _is_there(result, place):
            return Fetched(job_id=result.job_id, paths=_paths(result, place), copied=0)
        if not any(map(os.path.lexists, (*_paths(result, place), _moved(result, result.sidecar.key, place)))):
            break
    arriving = folder / temporary_name(ARRIVING_PREFIX)
    arriving.mkdir()
    try:
        for entry in result.files:
            target = _place(arriving, entry.key)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                storage.copy_out(entry.key, target)
            except UnavailableError as error:
                if shutil.disk_usage(arriving).free < entry.size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
                raise
            if target.stat().st_size != entry.size:
                raise UnavailableError(f"{storage.location(entry.key)!r} did not arrive complete; fetch it again.")
            _set_time(target, entry)
            flush(target)
        sidecar = _place(arriving, result.sidecar.key)
        sidecar.write_bytes(result.data)
        _set_time(sidecar, result.sidecar)
        flush(sidecar)
        stem.parent.mkdir(parents=True, exist_ok=True)
        with _locked(stem.parent):
            for place in _numbered(stem):
                if (num_new := _publish(arriving, result, place)) is not None:
                    break
        flush(stem.parent)
    finally:
        shutil.rmtree(arriving, ignore_errors=True)
    num_bytes = sum(entry.size for entry in result.files) + len(result.data) if num_new else 0
    return Fetched(job_id=result.job_id, paths=_paths(result, place), copied=num_bytes)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one fetch at a time name files in a folder; on a share without such locks, `_publish` replaces nothing."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _publish(arriving: Path, result: Result, stem: Path) -> int | None:
    """Give the files that have arrived their names; None, and nothing is done, if something else has one of them.

    Returns how many were not there. The sidecar goes last: its presence means that the files beside it are complete.
    """
    done: list[tuple[Path, Path]] = []
    for key in (*result.outputs, result.sidecar.key):
        arrived, target = _place(arriving, key), _moved(result, key, stem)
        if arrived.is_dir() and target.is_dir() and not target.is_symlink():
            # Perhaps of a fetch that was killed, or one that lacks a frame; what others have added stays.
            pairs = [(frame, target / frame.name) for frame in sorted(arrived.iterdir())]
        else:
            pairs = [(arrived, target)]
        for source, path in pairs:
            if _is_same(source, path):
                continue
            try:
                _move_new(source, path)
            except OSError as error:
                if not os.path.lexists(path):
                    raise
                for moved, name in reversed(done):
                    name.rename(moved)
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
                return None
            done.append((source, path))
    return len(done)


def _is_same(arrived: Path, path: Path) -> bool:
    return arrived.is_file() and path.is_file() and filecmp.cmp(arrived, path, shallow=False)


def _move_new(source: Path, path: Path) -> None:
    """Rename a file or a folder; raises OSError if there is something, but for an empty folder."""
    if source.is_dir():
        source.rename(path)
        return
    try:
        os.link(source, path)
    except FileExistsError:
        raise
    except OSError:  # some file systems, such as exFAT, have no hard links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        source.rename(path)
    else:
        source.unlink()


def _paths(result: Result, stem: Path) -> tuple[Path, ...]:
    return tuple(_moved(result, key, stem) for key in result.outputs)


def _set_time(path: Path, entry: FileInfo) -> None:
    """Give a copy the time of its render, by which programs sort files without a date inside."""
    time_s = entry.modified_at.timestamp()
    with contextlib.suppress(PermissionError):  # only its owner may, which on a share may be somebody else
        os.utime(path, (time_s, time_s))


def _is_there(result: Result, stem: Path) -> bool:
    """Whether this version was fetched before, by its JSON, the sizes, and that no file was written after the JSON."""
    sidecar = _moved(result, result.sidecar.key, stem)
    try:
        if sidecar.read_bytes() != result.data:
            return False
        fetched_at = sidecar.stat().st_mtime_ns
        found = [(_moved(result, entry.key, stem).stat(), entry) for entry in result.files]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    return all(status.st_size == entry.size and status.st_mtime_ns <= fetched_at for status, entry in found)


def _place(folder: Path, key: str) -> Path:
    return folder / key.removeprefix(f"{OUTPUTS}/")


def _why_missing(settings: Settings, storage: Storage, job_id: str) -> str:
    with session(settings) as connection:
        [job_id] = complete_ids(connection, [job_id])
        job = view(connection, job_id)
    if job.status == "finished":
        return (
            f"Job {job_id!r} is finished, but its files are not in the storage {storage.shown!r}: they were removed, "
            "or are in another storage; set SVDQ_STORAGE or --storage to that storage."
        )
    advice = f"`svdq retry {job_id}` queues it again" if job.ended else f"wait for it with `svdq wait {job_id}`"
    reason = f": {job.error}" if job.error else f"; {advice}."
    return f"Job {job_id!r} has no video, it is {job.status}{reason}"

"""The finished and failed videos as the page lists them, the newest first."""

import heapq
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Any

import redis

from svdq.cli.formatting import named
from svdq.cli.serve.api_errors import without_folders
from svdq.cli.serve.form import label_of
from svdq.cli.serve.videos import files_of
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model_name import model_stem
from svdq.producer.job import VIDEO_FIELDS, parse_job, shown_loras
from svdq.producer.queue import statuses
from svdq.producer.results.finished_videos import OUTPUTS, Result, by_place, ids_of_sidecars, read_results
from svdq.producer.results.remove import remove_video
from svdq.producer.status.job_view import JobView, view_many
from svdq.producer.status.registries import ended_before, newest_ids
from svdq.producer.status.selection import owners_of
from svdq.producer.storage.local import FileInfo
from svdq.producer.storage.storage import Storage
from svdq.producer.text import rfc3339
from svdq.producer.verdicts import Verdict, read_verdicts

#: Videos on a page of the list, and jobs looked at for it: a filter that fits few gets its page in parts.
PAGE_SIZE = 48
MAX_SCANNED = 5000
#: Jobs read at a time.
CHUNK = 200

#: The filters of the page: the statuses and the marks of each.
FILTERS: dict[str, tuple[tuple[str, ...], tuple[Verdict | None, ...]]] = {
    "open": (("finished", "failed"), (None, "keep")),
    "new": (("finished",), (None,)),
    "keep": (("finished",), ("keep",)),
    "reject": (("finished",), ("reject",)),
    "failed": (("failed",), (None, "keep", "reject")),
    "canceled": (("canceled", "stopped"), (None, "keep", "reject")),
}
#: A cursor: when a video ended, in seconds since the epoch, and its id.
Cursor = tuple[int, str]
#: Prefix of cursors to videos in the storage, and the cursor before the first one.
_OLDER = "older:"
_BEGIN: Cursor = (10**13, "")
_FLAG = re.compile(r"--([a-z][a-z-]+)")
#: Formats that a browser plays, the best first.
_PLAYED = ("mp4", "webp", "gif")
#: Newest videos that are remembered; a list of more would take much memory, and nobody scrolls that far.
MAX_VIDEOS = 20_000
#: Seconds after which the storage is listed anew.
FRESH_S = 60.0
MISSED_S = 2.0  # the same where a file is not where its job has written it


class StoredVideos:
    """The finished videos of a storage, also of jobs that Redis has forgotten."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._listed_at = -FRESH_S
        #: The JSON of each video, the newest first, and in all places of each.
        self._sidecars: dict[Cursor, FileInfo] = {}
        self._places: dict[str, list[FileInfo]] = {}
        #: Bytes of all files.
        self._bytes = 0

    def before(self, limit: int, cursor: Cursor | None = None) -> list[Cursor]:
        """Return the videos that ended before one, as `registries.ended_before`.

        Raises:
            UnavailableError: the storage cannot be reached.
        """
        return [each for each in self._list() if cursor is None or each < cursor][:limit]

    def views(self, job_ids: Sequence[str]) -> list[JobView]:
        """Return videos as finished jobs, without those that have no valid sidecar; raises as `before`."""
        if not job_ids:
            return []
        self._list()
        results = (found[0] for found in self._results(job_ids).values())
        return [view for view in map(self._view, results) if view is not None]

    def located(self, view: JobView) -> JobView:
        """Return a job with the folder in which its files are, which somebody may have renamed; raises as `before`.

        A remote storage is asked about the first file only.
        """
        if not (files := files_of(view)) or self._storage.exists(next(iter(files.values()))):
            return view
        self._list(MISSED_S)
        if not (found := self._results([view.id]).get(view.id)):
            return view
        return replace(view, parameters=view.parameters | {"folder": _folder_of(found[0])})

    def mean_bytes(self) -> int | None:
        """Return the bytes that a video of the storage takes on average; None without any."""
        sidecars = self._list()
        return self._bytes // len(sidecars) if sidecars and len(sidecars) < MAX_VIDEOS else None

    def located_here(self, view: JobView) -> JobView:
        """Return the same; of a remote storage, which is not asked about each video of a list, the job as it is."""
        return view if self._storage.folder is None else self.located(view)

    def has(self, key: str) -> bool:
        """Return whether a file is in the storage; a remote one is not asked."""
        return self._storage.folder is None or self._storage.exists(key)

    def remove(self, connection: redis.Redis, job_ids: Collection[str]) -> dict[str, InputError]:
        """Remove videos whose jobs Redis has forgotten; return why each stays that is needed. Raises as `before`."""
        self._list()
        problems: dict[str, InputError] = {}
        for job_id, found in self._results(job_ids).items():
            try:
                remove_video(connection, self._storage, found)
            except InputError as error:
                problems[job_id] = error
        self.forget()
        return problems

    def forget(self) -> None:
        """List the storage anew at the next question."""
        with self._lock:
            self._listed_at = -FRESH_S

    def ids(self) -> set[str]:
        """Return the ids of all videos; raises as `before`."""
        return {job_id for _, job_id in self._list()}

    def _results(self, job_ids: Collection[str]) -> dict[str, list[Result]]:
        """Read videos in all their places, of each the folder of its job first, else the one that was written first."""
        with self._lock:
            entries = [entry for job_id in job_ids for entry in self._places.get(job_id, ())]
        found: dict[str, list[Result]] = {}
        for result in read_results(self._storage, entries, lambda _: True, lambda reason: None):
            found.setdefault(result.job_id, []).append(result)
        return {job_id: sorted(found[job_id], key=by_place) for job_id in job_ids if job_id in found}

    def _view(self, result: Result) -> JobView | None:
        try:
            job = parse_job(result.document.job)
        except ValueError:
            return None  # anyone with access to the storage may have written it
        return JobView(
            id=result.job_id,
            status="finished",
            outputs=tuple(map(self._storage.location, result.outputs)),
            notice=result.document.model.notice,
            model=result.document.model.name,
            parameters=job.model_dump(mode="json") | {"folder": _folder_of(result)},
            source=result.document.source,
            owner=result.document.owner,
            ended_at=result.finished_at,
        )

    def _list(self, fresh_s: float = FRESH_S) -> dict[Cursor, FileInfo]:
        with self._lock:
            if time.monotonic() - self._listed_at >= fresh_s:
                entries = list(self._storage.entries(OUTPUTS))
                self._bytes = sum(entry.size for entry in entries)
                self._places = {}
                for entry in entries:
                    for job_id in ids_of_sidecars([entry]):
                        self._places.setdefault(job_id, []).append(entry)
                found = {
                    (int(entry.modified_at.timestamp()), job_id): entry
                    for job_id, places in self._places.items()
                    for entry in [min(places, key=lambda place: (place.modified_at, place.key))]
                }
                self._sidecars = dict(heapq.nlargest(MAX_VIDEOS, found.items(), key=itemgetter(0)))
                self._listed_at = time.monotonic()
            return self._sidecars


def _folder_of(result: Result) -> str:
    """Return the folder below `outputs` that a video is in."""
    return result.sidecar.key.rpartition("/")[0].removeprefix(OUTPUTS).strip("/")


def read_page(
    connection: redis.Redis,
    storage: Storage,
    older: StoredVideos,
    show: str,
    before: str,
    *,
    search: str = "",
    owners: Collection[str] = (),
    is_brief: bool = False,
) -> dict[str, Any]:
    """Return a page of the list and the cursor of the next one, which is None at the end.

    Videos come from the records of jobs, and after them from the storage. `show` is one of `FILTERS`, and `before` a
    cursor as text, "" for the first page. All words of `search` are in the name, the prompt or the photo's path.
    With `owners`, only their videos are in it. A brief page has only the ids, statuses and marks, of many videos.

    Raises:
        InputError: the filter or the cursor is not allowed.
    """
    if show not in FILTERS:
        raise InputError(f"There is no filter {show[:80]!r}; choose one of {', '.join(FILTERS)}.")
    shown, fitting_marks = FILTERS[show]
    size, describe = (MAX_SCANNED, _brief) if is_brief else (PAGE_SIZE, reviewed)
    registered = ["failed" if status == "stopped" else status for status in shown]
    begin = _parse_cursor(before.removeprefix(_OLDER))
    found: list[dict[str, Any]] = []
    words = search.casefold().split()

    def fits(job: JobView) -> bool:
        text = f"{job.name}\n{job.prompt}\n{job.source}".casefold()
        return job.status in shown and (not owners or job.owner in owners) and all(word in text for word in words)

    def collect(
        next_cursors: Callable[[int, Cursor | None], list[Cursor]],
        read: Callable[[Sequence[str]], list[JobView]],
        cursor: Cursor | None,
    ) -> Cursor | None:
        """Add videos up to a whole page; return the cursor of its last one, None at the end of all."""
        for _ in range(MAX_SCANNED // CHUNK):
            cursors = next_cursors(CHUNK, cursor)
            marks = dict(zip(cursors, read_verdicts(connection, [job_id for _, job_id in cursors]), strict=True))
            fitting = [each for each in cursors if marks[each] in fitting_marks]
            # A search, or owners, may leave out any number of them, so all are read.
            wanted = fitting if words or owners else fitting[: size - len(found)]
            views = {job.id: job for job in read([job_id for _, job_id in wanted])}
            for cursor in wanted:
                # Some records have expired meanwhile, and stopped jobs are among the failed ones.
                if (job := views.get(cursor[1])) is not None and fits(job):
                    found.append(describe(job, marks[cursor], older))
                    if len(found) == size:
                        return cursor
            if len(fitting) == len(wanted):
                if len(cursors) < CHUNK:
                    return None
                cursor = cursors[-1]
        return cursor

    is_bare = is_brief and not words and not owners

    def read_known(job_ids: Sequence[str]) -> list[JobView]:
        if not is_bare:
            return view_many(connection, job_ids)
        known = zip(job_ids, statuses(connection, job_ids), strict=True)
        return [JobView(id=job_id, status=status) for job_id, status in known if status is not None]

    def read_forgotten(job_ids: Sequence[str]) -> list[JobView]:
        known = zip(job_ids, statuses(connection, job_ids), strict=True)
        forgotten = [job_id for job_id, status in known if status is None]
        return [JobView(id=job_id, status="finished") for job_id in forgotten] if is_bare else older.views(forgotten)

    if before.startswith(_OLDER):
        kind, end = _OLDER, collect(older.before, read_forgotten, begin)
    else:
        kind, end = "", collect(partial(ended_before, connection, registered), read_known, begin)
        if end is None and "finished" in shown:  # the storage is listed only for a reader who scrolls to the end
            kind, end = _OLDER, _BEGIN
    return {"results": found, "next": None if end is None else f"{kind}{end[0]}:{end[1]}"}


def read_progress(connection: redis.Redis, older: StoredVideos, owners: Collection[str] = ()) -> dict[str, int]:
    """Return how many videos are finished, of everybody or of `owners`, and how many of them have a verdict.

    Raises as `StoredVideos.before`.
    """
    finished = newest_ids(connection, statuses=("finished",))
    known = list(dict.fromkeys([*finished, *(job_id for _, job_id in older.before(MAX_VIDEOS))]))
    if owners:
        of_each = zip(known, owners_of(connection, known), strict=True)
        known = [job_id for job_id, owner in of_each if (owner or "") in owners]
    marks = read_verdicts(connection, known)
    return {"total": len(marks), "reviewed": sum(mark is not None for mark in marks)}


def _parse_cursor(text: str) -> Cursor | None:
    if not text:
        return None
    seconds, colon, job_id = text.partition(":")
    if not colon or not (seconds.isascii() and seconds.isdecimal() and len(seconds) < 15):
        raise InputError(f"The cursor {text[:80]!r} is not one that this list has given; start again without it.")
    return int(seconds), job_id


def plain(error: str) -> str:
    """Return a sentence for the command line without folders of the server, and with the form's words for flags."""
    return _FLAG.sub(lambda flag: label_of(flag[1].replace("-", "_")), without_folders(error))


def _brief(job: JobView, mark: Verdict | None, _older: StoredVideos) -> dict[str, Any]:
    return {"id": job.id, "status": job.status if job.is_readable else "failed", "mark": mark or ""}


def reviewed(job: JobView, mark: Verdict | None, older: StoredVideos) -> dict[str, Any]:
    """Describe one video of the list."""
    job = older.located_here(job)
    parameters = job.parameters
    width, height = parameters.get("width"), parameters.get("height")
    files = files_of(job)
    kind = next((kind for kind in _PLAYED if kind in files), "png")
    seed = parameters.get("seed")
    return _brief(job, mark, older) | {
        "name": named(job.name, job.link),
        "owner": job.owner,
        "kind": kind,
        "is_there": kind in files and older.has(files[kind]),
        "seed": seed if isinstance(seed, int) else None,
        "size": f"{width}x{height}" if width and height else "",
        "notice": job.notice,
        "model": model_stem(job.model),
        "error": plain(job.error) if job.error and job.status not in FILTERS["canceled"][0] else None,
        "prompt": job.prompt,
        "ended_at": rfc3339(job.ended_at) if job.ended_at else None,
        "duration_s": job.duration_s,
        "photo": str(parameters.get("image", "")),
        "photo_name": job.source or PurePosixPath(job.photo.replace("\\", "/")).name or job.name,
        "parameters": {
            name: shown_loras(parameters[name]) if name == "loras" else parameters[name]
            for name in VIDEO_FIELDS
            if name in parameters
        },
    }

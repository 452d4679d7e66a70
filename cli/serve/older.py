"""Videos whose jobs Redis has forgotten, found by the JSON beside them in the storage."""

import heapq
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from svdq.producer.job import parse_job
from svdq.producer.results.results import OUTPUTS, Result, read_results
from svdq.producer.status.status import JobView
from svdq.producer.storage.local import Entry
from svdq.producer.storage.storage import Storage

#: Newest videos that are remembered; a list of more would take much memory, and nobody scrolls that far.
MAX_VIDEOS = 20_000
#: Seconds after which the storage is listed anew.
FRESH_S = 60.0


@dataclass(frozen=True, slots=True)
class _Index:
    listed_at: float
    #: When each video was finished, in seconds since the epoch, and its id; the newest first.
    places: Sequence[tuple[int, str]]
    #: The JSON of each id.
    sidecars: dict[str, Entry]


class Older:
    """The finished videos of a storage by the ids of their jobs."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._index = _Index(-FRESH_S, (), {})

    def before(self, place: tuple[int, str] | None, limit: int) -> list[tuple[int, str]]:
        """Return the videos after a place in the order of the newest first, as `registries.ended_before`.

        Raises:
            UnavailableError: the storage cannot be reached.
        """
        return [each for each in self._listed().places if place is None or each < place][:limit]

    def views(self, job_ids: Sequence[str]) -> list[JobView]:
        """Return videos as jobs that are finished; those without a valid sidecar are left out.

        Raises:
            UnavailableError: the storage cannot be reached.
        """
        index = self._listed() if job_ids else self._index
        entries = [index.sidecars[job_id] for job_id in job_ids if job_id in index.sidecars]
        results = read_results(self._storage, entries, lambda _: True, lambda reason: None)
        return [view for view in map(self._view, results) if view is not None]

    def _view(self, result: Result) -> JobView | None:
        try:
            job = parse_job(result.document["job"])
        except ValueError:
            return None  # anyone with access to the storage may have written it
        model = result.document.get("model")
        return JobView(
            id=result.job_id,
            status="finished",
            outputs=tuple(map(self._storage.location, result.outputs)),
            notice=result.notice,
            model=str(model.get("name", "")) if isinstance(model, dict) else "",
            parameters=job.model_dump(mode="json"),
            source=result.source,
            ended_at=result.finished_at,
        )

    def _listed(self) -> _Index:
        with self._lock:
            if time.monotonic() - self._index.listed_at >= FRESH_S:
                sidecars = (entry for entry in self._storage.entries(OUTPUTS) if entry.key.endswith(".json"))
                newest = heapq.nlargest(MAX_VIDEOS, sidecars, key=lambda entry: entry.modified_at)
                by_id = {_id_of(entry): entry for entry in reversed(newest)}
                places = sorted(
                    ((int(entry.modified_at.timestamp()), each) for each, entry in by_id.items()), reverse=True
                )
                self._index = _Index(time.monotonic(), places, by_id)
            return self._index


def _id_of(sidecar: Entry) -> str:
    return sidecar.key.removesuffix(".json").rpartition("-")[2]

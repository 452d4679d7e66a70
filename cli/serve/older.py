"""Videos whose jobs Redis has forgotten, found by the JSON beside them in the storage."""

import heapq
import threading
import time
from collections.abc import Sequence

from svdq.producer.job import parse_job
from svdq.producer.results.results import OUTPUTS, Result, read_results
from svdq.producer.status.status import JobView
from svdq.producer.storage.local import Entry
from svdq.producer.storage.storage import Storage

#: Newest videos that are remembered; a list of more would take much memory, and nobody scrolls that far.
MAX_VIDEOS = 20_000
#: Seconds after which the storage is listed anew.
FRESH_S = 60.0


class Older:
    """The finished videos of a storage by the ids of their jobs."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._listed_at = -FRESH_S
        #: When each video was finished, in seconds since the epoch, and its id; the newest first.
        self._places: list[tuple[int, str]] = []
        #: The JSON of each id.
        self._sidecars: dict[str, Entry] = {}

    def before(self, place: tuple[int, str] | None, limit: int) -> list[tuple[int, str]]:
        """Return the videos after a place in the order of the newest first, as `registries.ended_before`.

        Raises:
            UnavailableError: the storage cannot be reached.
        """
        self._list()
        return [each for each in self._places if place is None or each < place][:limit]

    def views(self, job_ids: Sequence[str]) -> list[JobView]:
        """Return videos as jobs that are finished; those without a valid sidecar are left out.

        Raises:
            UnavailableError: the storage cannot be reached.
        """
        if not job_ids:
            return []
        self._list()
        entries = [entry for entry in map(self._sidecars.get, job_ids) if entry is not None]
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

    def _list(self) -> None:
        with self._lock:
            if time.monotonic() - self._listed_at >= FRESH_S:
                sidecars = (entry for entry in self._storage.entries(OUTPUTS) if entry.key.endswith(".json"))
                newest = heapq.nlargest(MAX_VIDEOS, sidecars, key=lambda entry: entry.modified_at)
                self._sidecars = {
                    entry.key.removesuffix(".json").rpartition("-")[2]: entry for entry in reversed(newest)
                }
                self._places = sorted(
                    ((int(entry.modified_at.timestamp()), job_id) for job_id, entry in self._sidecars.items()),
                    reverse=True,
                )
                self._listed_at = time.monotonic()

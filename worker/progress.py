"""Tells Redis what a rank is doing, beside the step loop. Knows no RQ.

The step loop only leaves a note; a thread of its own writes the newest note at most a few times a second and otherwise
sleeps without waking up.
"""

import contextlib
import json
import threading

import redis

from svdq.pipeline.sample import Sample

#: Seconds between two notes to Redis: what a person watching a bar can tell apart.
INTERVAL_S = 0.25

#: Writes meta only into a job that still exists: HSET alone would make a job out of nothing after it was deleted.
_SAVE_META = "if redis.call('exists', KEYS[1]) == 1 then redis.call('hset', KEYS[1], 'meta', ARGV[1]) end"


def meta_of(sample: Sample, index: int, rank: int, notice: str) -> dict[str, object]:
    """Make the `meta` of a job in flight: how far it is, and its parameters as used."""
    parameters = sample.parameters
    return {
        "step": index,
        "rank": rank,
        "notice": notice,
        "used": {"frames": parameters.frames, "decode_chunk_size": parameters.decode_chunk_size},
    }


class ProgressMonitor:
    """The monitor of one rank."""

    def __init__(self, connection: redis.Redis, rank: int, notice: str) -> None:
        self._connection = connection
        self._rank = rank
        self._notice = notice
        self._note: tuple[Sample, int] | None = None
        self._news = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def step(self, sample: Sample, index: int) -> None:
        """Note that a step is about to be done."""
        self._note = (sample, index)
        self._news.set()

    def idle(self) -> None:
        """Note that nothing is being done."""
        self._note = None

    def cancelled(self, job_id: str) -> bool:
        """Say no: jobs in flight are not cancelled yet."""
        return False

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._news.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._news.wait()
            self._news.clear()
            note = self._note
            if note is not None:
                sample, index = note
                meta = json.dumps(meta_of(sample, index, self._rank, self._notice))
                # Progress is a courtesy: a server that is away costs nobody a step.
                with contextlib.suppress(redis.RedisError):
                    self._connection.eval(_SAVE_META, 1, f"rq:job:{sample.job_id}", meta)
            self._closed.wait(INTERVAL_S)

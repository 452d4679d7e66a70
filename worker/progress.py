"""Tells Redis what a rank is doing and hears what is cancelled, beside the step loop. Knows no RQ.

The step loop only leaves a note; a thread of its own talks to Redis a few times a second while there is work, and
otherwise sleeps without waking up. The breadcrumb is left at once: it must be there when the step kills the process.
"""

import contextlib
import json
import threading
import time

import redis

from svdq.pipeline.sample import Sample
from svdq.producer import keys
from svdq.worker.breadcrumbs import Breadcrumbs
from svdq.worker.fence import execution_of

#: Seconds between two talks with Redis: what a person watching a bar can tell apart.
INTERVAL_S = 0.25
#: Seconds for which it counts what Redis said of cancelled jobs: one may be stopped, and tried again soon after.
FRESH_S = 1.0

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

    def __init__(self, connection: redis.Redis, rank: int, notice: str, breadcrumbs: Breadcrumbs | None = None) -> None:
        self._connection = connection
        self._rank = rank
        self._notice = notice
        self._breadcrumbs = breadcrumbs
        self._note: tuple[Sample, int] | None = None
        #: Ids of jobs that the user has cancelled, in flight anywhere.
        self._cancelled: frozenset[str] = frozenset()
        #: When that was heard.
        self._heard_at = -FRESH_S
        #: The ticket of the sample here whose execution is not ours any more: cancelled in RQ's way, or taken over.
        self._lost: object = None
        self._news = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def step(self, sample: Sample, index: int) -> None:
        """Note that a step is about to be done."""
        if self._breadcrumbs is not None:
            self._breadcrumbs.step(sample.job_id, index)
        self._note = (sample, index)
        self._news.set()

    def idle(self) -> None:
        """Note that nothing is being done."""
        self._note = None
        if self._breadcrumbs is not None:
            self._breadcrumbs.idle()

    def cancelled(self, job_id: str) -> bool:
        """Whether there is no use in going on with a job, as far as it is known by now."""
        note = self._note
        # Of the sample here alone: the same job, taken anew, may be right behind it.
        is_lost = note is not None and note[0].job_id == job_id and note[0].ticket is self._lost
        return is_lost or (job_id in self._cancelled and time.monotonic() - self._heard_at < FRESH_S)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._news.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._news.wait()
            self._news.clear()
            while (note := self._note) is not None and not self._closed.is_set():
                # Progress is a courtesy: a server that is away costs nobody a step.
                with contextlib.suppress(redis.RedisError):
                    self._talk(*note)
                self._closed.wait(INTERVAL_S)

    def _talk(self, sample: Sample, index: int) -> None:
        meta = json.dumps(meta_of(sample, index, self._rank, self._notice))
        execution = execution_of(sample.ticket)
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.eval(_SAVE_META, 1, f"rq:job:{sample.job_id}", meta)
            pipeline.smembers(keys.CANCELLED)
            if execution is not None:
                pipeline.zscore(*execution)
            _, cancelled, *lease = pipeline.execute()
        self._heard_at = time.monotonic()
        self._cancelled = frozenset(job_id.decode(errors="replace") for job_id in cancelled)
        if lease == [None]:
            self._lost = sample.ticket

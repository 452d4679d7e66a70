"""Returns the jobs of dead groups: on this host when a group starts, from other hosts when their leases have expired.

Jobs go back to the front of their queues, in their old order and without spending retries. RQ's own maintenance, which
spends the retries of all jobs, does not run.

A lease has expired when its end has passed by the clock of Redis and this process has seen no renewal for some beats by
its monotonic clock. So neither a wrong clock of a host nor a jump of Redis' clock takes jobs from living groups. A
lease that ends later than any living group writes has expired when nobody has renewed it for as long as one lasts.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import redis
import rq
from rq.executions import Execution

from svdq.producer import keys, processes
from svdq.producer.queue import queues
from svdq.worker.queue import scripts
from svdq.worker.queue.crashes import CrashSuspect, count_crash
from svdq.worker.queue.group_worker import GroupWorker
from svdq.worker.queue.rq_worker import BEAT_S, LEASE_S
from svdq.worker.queue.scripts import text_of

logger = logging.getLogger(__name__)

SILENT_S = 2 * BEAT_S  # seconds for which this process must also have seen no renewal of a lease
EARLY_S = SILENT_S + 1  # seconds before its end at which a lease is watched: living groups renew theirs earlier
#: Seconds from now after which no living group can have put the end of a lease: the clock was set back since.
FAR_S = LEASE_S + EARLY_S
POPPED_S = 60.0  # seconds after which a job returns that another program popped and did not begin; as in RQ


class _Taken(NamedTuple):
    started_at: str  # as RQ writes it: these texts sort by time
    worker: str
    execution: Execution


class _Seen(NamedTuple):
    """What `Recovery.look` has read."""

    now_s: float  # by the clock of Redis
    queues: Sequence[rq.Queue]
    #: By the names of queues: the jobs that are popped and not begun, with their owners, b"" for unknown ones; and the
    #: entries of leases that end soon, have ended, or end too late, each with its end.
    popped: Mapping[str, Mapping[bytes, bytes]]
    late: Mapping[str, Mapping[bytes, float]]


class StalenessTracker:
    """Measures how long values in Redis have not changed, by the monotonic clock of this process."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        #: By key: for each member its state, and when it was first seen in it.
        self._seen: dict[str, dict[bytes, tuple[Hashable, float]]] = {}

    def seconds(self, key: str, states: Mapping[bytes, Hashable]) -> dict[bytes, float]:
        """Return for how many seconds each member of a key has been seen in its state; 0 for a new member."""
        now = self._monotonic()
        before, seen = self._seen.get(key, {}), {}
        for name, state in states.items():
            known = before.get(name)
            seen[name] = known if known is not None and known[0] == state else (state, now)
        self._seen[key] = seen
        return {name: now - since for name, (_, since) in seen.items()}

    def forget(self) -> None:
        """Forget all states."""
        self._seen.clear()


def _silent_s(left_s: float) -> float:
    """Return for how many seconds a lease that ends in `left_s` must not have been renewed, to count as expired."""
    if left_s <= 0:
        return SILENT_S
    return LEASE_S + SILENT_S if left_s > FAR_S else math.inf


class Recovery:
    """The recovery of one group, called by its bookkeeping thread."""

    def __init__(self, worker: GroupWorker, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._leases, self._ownerless = StalenessTracker(monotonic), StalenessTracker(monotonic)
        self._connection: redis.Redis = worker.connection
        self._is_counted = False

    def at_start(self, suspects: Sequence[CrashSuspect]) -> None:
        """Return the jobs of dead groups of this host before the first pop; count the crash of the suspects."""
        if not self._is_counted:  # the caller tries again if Redis becomes unavailable
            count_crash(self._connection, suspects)
            self._is_counted = True
        seen = self.look(self._worker.queues)
        for queue in seen.queues:
            taken = [item for item in self._taken(queue, self._entries(queue)) if processes.is_gone(item.worker)]
            self._take_back(queue, seen, processes.is_gone, taken)
            self._worker.release_deferred(queue)
        for job_id in map(text_of, self._connection.hkeys(keys.CRASHES)):
            if not self._connection.exists(rq.job.Job.key_for(job_id)):
                self._connection.hdel(keys.CRASHES, job_id)
        for name in map(text_of, self._connection.hkeys(keys.PAUSES)):
            if processes.is_gone(name):
                self._connection.hdel(keys.PAUSES, name)

    def look(self, found: Sequence[rq.Queue] = ()) -> _Seen:
        """Read what is popped and whose leases end, of some queues or all, also of models that no worker runs now."""
        found = found or queues(self._connection)
        now_s = scripts.server_time(self._connection)
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.hgetall(keys.POPPED)
            for queue in found:
                pipeline.lrange(queue.intermediate_queue_key, 0, -1)
                key = queue.started_job_registry.key
                pipeline.zrangebyscore(key, "-inf", now_s + EARLY_S, withscores=True)
                pipeline.zrangebyscore(key, now_s + FAR_S, "+inf", withscores=True)
            owners, *answers = pipeline.execute()
        popped, late = {}, {}
        for queue, job_ids, early, far in zip(found, answers[::3], answers[1::3], answers[2::3], strict=True):
            popped[queue.name] = {job_id: owners.get(job_id, b"") for job_id in job_ids}
            late[queue.name] = dict([*early, *far])
        return _Seen(now_s=now_s, queues=found, popped=popped, late=late)

    def unknown(self, held: Collection[str], seen: _Seen | None = None, *, is_last: bool = False) -> None:
        """Return jobs of this worker whose begin Redis did not confirm; call between pops.

        `held` has the ids of the executions that the worker knows. The leases of others end after seconds, since nobody
        renews them; with `is_last`, do not wait for that.
        """
        seen = seen or self.look(self._worker.queues)
        for queue in self._worker.queues:
            if queue.name not in seen.popped:
                continue  # nothing was ever in it
            begun = self._taken(queue, self._entries(queue) if is_last else seen.late[queue.name])
            unknown = [item for item in begun if item.worker == self._worker.name and item.execution.id not in held]
            self._take_back(queue, seen, self._worker.name.__eq__, unknown)

    def expired(self, seen: _Seen | None = None) -> None:
        """Return to the queue the jobs of groups whose leases have expired, and the jobs that they had only popped."""
        prefix = self._worker.redis_worker_namespace_prefix

        def is_gone(name: str) -> bool:
            return not self._connection.exists(f"{prefix}{name}")

        seen = seen or self.look()
        now_s = seen.now_s
        for queue in seen.queues:
            ends = seen.late[queue.name]
            unchanged_s = self._leases.seconds(queue.name, ends)
            silent = {name: end_s for name, end_s in ends.items() if unchanged_s[name] >= _silent_s(end_s - now_s)}
            others = [item for item in self._taken(queue, silent) if item.worker != self._worker.name]
            self._take_back(queue, seen, is_gone, others, lease_until=max([now_s, *silent.values()]))

    def redis_failed(self) -> None:
        """Watch leases from now on, since nobody could renew one."""
        self._leases.forget()

    def _entries(self, queue: rq.Queue) -> list[bytes]:
        entries: list[bytes] = self._connection.zrange(queue.started_job_registry.key, 0, -1)  # type: ignore[assignment]
        return entries

    def _taken(self, queue: rq.Queue, entries: Collection[bytes]) -> list[_Taken]:
        """Read the executions of a registry's entries, the newest first; remove entries that RQ has not made."""
        if not entries:
            return []
        executions = []
        for entry in entries:
            name = entry.decode(errors="replace")
            if name.encode() == entry and name.count(":") == 1:
                executions.append(Execution.from_composite_key(name, self._connection))
            else:  # anyone can write to Redis
                self._connection.zrem(queue.started_job_registry.key, entry)
        with self._connection.pipeline(transaction=False) as pipeline:
            for execution in executions:
                pipeline.hget(execution.key, "worker_name")
                pipeline.hmget(rq.job.Job.key_for(execution.job_id), "worker_name", "started_at")
            answers = pipeline.execute(raise_on_error=False)
        taken = []
        for execution, worker, job in zip(executions, answers[::2], answers[1::2], strict=True):
            if isinstance(job, redis.ResponseError):  # not a hash
                job = (None, None)
            # The record of an execution ends with its lease; then the job's record has the name.
            owner = worker if isinstance(worker, bytes) else job[0]
            taken.append(_Taken(text_of(job[1]), text_of(owner), execution))
        return sorted(taken, key=lambda item: item.started_at, reverse=True)

    def _take_back(
        self,
        queue: rq.Queue,
        seen: _Seen,
        is_gone: Callable[[str], bool],
        taken: Sequence[_Taken],
        *,
        lease_until: float = scripts.FOREVER,
    ) -> None:
        """Return to a queue what workers that are gone have popped, and then what was `taken`, the newest first."""
        owners = seen.popped[queue.name]
        popped_s = self._ownerless.seconds(queue.name, dict.fromkeys(name for name in owners if not owners[name]))
        returned = []
        for job_id, owner in reversed([*owners.items()]):
            is_left = is_gone(text_of(owner)) if owner else popped_s[job_id] >= POPPED_S
            if is_left and scripts.return_popped_to_queue(self._connection, queue, job_id, owner):
                returned.append(text_of(job_id))
        for item in taken:
            if scripts.return_to_queue(self._connection, queue, item.execution, lease_until):
                returned.append(item.execution.job_id)
        if returned:
            logger.info("Took back jobs of dead groups to %s: %s.", queue.name, ", ".join(reversed(returned)))

"""Counts and lists jobs by RQ status without reading them.

Each function takes one round trip, whose cost does not depend on the number of kept jobs. Never runs RQ's clean-up,
which may call functions chosen by whoever can write to Redis.
"""

from collections.abc import Iterator, Mapping, Sequence

import redis
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.registry import BaseRegistry

from svdq.producer.queue import SvdqQueue, queues

#: All statuses of jobs, in display order.
STATUSES = ("queued", "started", "scheduled", "deferred", "finished", "failed", "stopped", "canceled")

#: RQ keeps stopped jobs in the registry of failed ones; this finds those that are stopped, or all others, the newest
#: first. KEYS: the registry. ARGV: status, start of the keys of jobs, number of ids at most.
_OF_STATUS = """
local found = {}
for _, id in ipairs(redis.call('zrevrange', KEYS[1], 0, -1)) do
  if #found >= tonumber(ARGV[3]) then
    break
  end
  local is_stopped = redis.pcall('hget', ARGV[2] .. id, 'status') == 'stopped'
  if is_stopped == (ARGV[1] == 'stopped') then
    found[#found + 1] = id
  end
end
return found
"""
#: Counts the stopped jobs in the registry of failed ones.
#: KEYS: the registry. ARGV: start of the keys of jobs, least score.
_NUM_STOPPED = """
local number = 0
for _, id in ipairs(redis.call('zrangebyscore', KEYS[1], ARGV[2], '+inf')) do
  if redis.pcall('hget', ARGV[1] .. id, 'status') == 'stopped' then
    number = number + 1
  end
end
return number
"""
#: More ids than there are.
_ALL = 2**31
#: Keys that one round trip of a scan looks at.
_SCANNED = 500


def counts(connection: redis.Redis) -> dict[str, dict[str, int]]:
    """Count the jobs of every queue by status."""
    asked = []
    with connection.pipeline(transaction=False) as pipeline:
        for queue in queues(connection):
            pipeline.llen(queue.key)
            pipeline.llen(_between(queue))
            asked += [(queue.name, "queued"), (queue.name, "queued")]
            for status, registry in _registries(queue).items():
                pipeline.zcard(registry.key)
                asked.append((queue.name, status))
            _count_stopped(pipeline, queue)
            asked.append((queue.name, "stopped"))
        answers = pipeline.execute()
    found: dict[str, dict[str, int]] = {}
    for (name, status), answer in zip(asked, answers, strict=True):
        found.setdefault(name, dict.fromkeys(STATUSES, 0))[status] += answer
    for of_queue in found.values():
        of_queue["failed"] -= of_queue["stopped"]
    return found


def num_failed(connection: redis.Redis, since_score: float) -> int:
    """Count the failed jobs of all queues with at least this expiry, without stopped jobs."""
    with connection.pipeline(transaction=False) as pipeline:
        for queue in queues(connection):
            pipeline.zcount(queue.failed_job_registry.key, since_score, "+inf")
            _count_stopped(pipeline, queue, since_score)
        answers = pipeline.execute()
    return int(sum(answers[::2]) - sum(answers[1::2]))


def newest_ids(connection: redis.Redis, limit: int = _ALL, statuses: Sequence[str] = ()) -> list[str]:
    """Return the ids of the newest jobs of every status and queue, up to `limit` of each, unique but in no order.

    Registries are sorted by expiry, which for ended jobs follows their end.

    Args:
        connection: to Redis.
        limit: number of ids per queue and status.
        statuses: statuses to include; all if empty.
    """
    ids: dict[str, None] = {}
    wanted = set(statuses or STATUSES)
    with connection.pipeline(transaction=False) as pipeline:
        for queue in queues(connection):
            if "queued" in wanted:
                pipeline.lrange(queue.key, -limit, -1)
                pipeline.lrange(_between(queue), -limit, -1)
            for status, registry in _registries(queue).items():
                one_of_two = wanted & {"failed", "stopped"}
                if status == "failed" and len(one_of_two) == 1:
                    prefix = Job.redis_job_namespace_prefix
                    pipeline.eval(_OF_STATUS, 1, registry.key, *one_of_two, prefix, limit)
                elif status in wanted:
                    pipeline.zrange(registry.key, 0, limit - 1, desc=True)
        answers = pipeline.execute()
    for entries in answers:
        # An entry of a started job is `<id>:<execution>`.
        ids.update(dict.fromkeys(entry.decode(errors="backslashreplace").partition(":")[0] for entry in entries))
    return list(ids)


def scan_ids(connection: redis.Redis) -> Iterator[bytes]:
    """Find all jobs there are, whatever queue or registry they are on their way to."""
    prefix = Job.redis_job_namespace_prefix.encode()
    for key in connection.scan_iter(match=prefix + b"*", count=_SCANNED):
        job_id = key.removeprefix(prefix)
        if b":" not in job_id:  # else what RQ keeps beside a job
            yield job_id


def num_ahead(connection: redis.Redis, places: Mapping[str, str]) -> dict[str, int]:
    """Count the jobs that are taken before given queued jobs.

    Args:
        connection: to Redis.
        places: the name of the queue by the id of each queued job.

    Returns:
        The number by job id, without jobs that have left their queue.
    """
    names = [queue.name for queue in queues(connection)]
    lists = [queue.key for queue in queues(connection)]
    with connection.pipeline(transaction=False) as pipeline:
        for key in lists:
            pipeline.llen(key)
        for job_id, name in places.items():
            pipeline.lpos(lists[names.index(name)], job_id)
        answers = pipeline.execute()
    lengths, positions = answers[: len(lists)], answers[len(lists) :]
    return {
        job_id: sum(lengths[: names.index(name)]) + position
        for (job_id, name), position in zip(places.items(), positions, strict=True)
        if position is not None
    }


def _count_stopped(pipeline: redis.Redis, queue: SvdqQueue, since_score: float | str = "-inf") -> None:
    prefix = Job.redis_job_namespace_prefix
    pipeline.eval(_NUM_STOPPED, 1, queue.failed_job_registry.key, prefix, since_score)


def _between(queue: SvdqQueue) -> str:
    """Return the list in which RQ keeps a job between taking it off the queue and registering it as started."""
    return IntermediateQueue.get_intermediate_queue_key(queue.key)


def _registries(queue: SvdqQueue) -> dict[str, BaseRegistry]:
    return {
        "started": queue.started_job_registry,
        "scheduled": queue.scheduled_job_registry,
        "deferred": queue.deferred_job_registry,
        "finished": queue.finished_job_registry,
        "failed": queue.failed_job_registry,
        "canceled": queue.canceled_job_registry,
    }

"""The Lua scripts of the worker, which move jobs between queue, worker and registries; a kill loses no job.

A job is in exactly one of these at any time: its queue; RQ's intermediate queue, with its owner in `svdq:popped`; RQ's
registry of executions (`rq:wip:…`); or a registry of ended jobs. Processes compare only times of the clock of Redis.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import redis
import rq
from rq.executions import Execution, ExecutionRegistry
from rq.utils import utcformat

from svdq.producer import keys
from svdq.producer.untrusted_job import key_of

#: KEYS: rq:suspended, our pauses, svdq:popped, then queue and intermediate queue in turn. ARGV: the worker's name, and
#: the field of our pauses that concerns it.
#: Returns {number of the queue, job id}; {} when nothing is queued; {-1} when intake is paused.
_POP = """
if redis.call('exists', KEYS[1]) == 1 or redis.call('hexists', KEYS[2], ARGV[2]) == 1 then
  return {-1}
end
for i = 4, #KEYS, 2 do
  local id = redis.call('lmove', KEYS[i], KEYS[i + 1], 'LEFT', 'RIGHT')
  if id then
    redis.call('hset', KEYS[3], id, ARGV[1])
    return {(i - 4) / 2, id}
  end
end
return {}
"""

#: KEYS: rq:wip:<queue>, the execution, the job's executions, queue, job. ARGV: <job>:<execution>, execution, job, and
#: the latest end of its lease. Returns 1 if the job is back in its queue, -1 if it has ended.
_RETURN_TO_QUEUE = """
local lease = redis.call('zscore', KEYS[1], ARGV[1])
if not lease or tonumber(lease) > tonumber(ARGV[4]) then
  return 0
end
redis.call('zrem', KEYS[1], ARGV[1])
redis.call('del', KEYS[2])
redis.call('zrem', KEYS[3], ARGV[2])
if redis.call('type', KEYS[5]).ok ~= 'hash' or redis.call('hget', KEYS[5], 'status') ~= 'started' then
  return -1
end
redis.call('hset', KEYS[5], 'status', 'queued')
redis.call('hdel', KEYS[5], 'worker_name', 'started_at')
redis.call('lpush', KEYS[4], ARGV[3])
return 1
"""

#: KEYS: svdq:popped, intermediate queue, queue, job. ARGV: job id, its owner or ''.
_RETURN_POPPED_TO_QUEUE = """
if (redis.call('hget', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then
  return 0
end
redis.call('hdel', KEYS[1], ARGV[1])
if redis.call('lrem', KEYS[2], 1, ARGV[1]) == 0 then
  return 0
end
if redis.call('type', KEYS[4]).ok ~= 'hash' or redis.call('hget', KEYS[4], 'status') ~= 'queued' then
  return -1
end
redis.call('lpush', KEYS[3], ARGV[1])
return 1
"""

#: KEYS: queue, intermediate queue, svdq:popped. ARGV: job id, the worker's name.
_CLAIM = """
if redis.call('lrem', KEYS[1], 1, ARGV[1]) == 0 then
  return 0
end
redis.call('rpush', KEYS[2], ARGV[1])
redis.call('hset', KEYS[3], ARGV[1], ARGV[2])
return 1
"""

#: Executes commands that begin a popped job; WATCH on the hash of popped jobs would make groups wait for each other.
#: KEYS: svdq:popped, job, execution. ARGV: job id, the worker's name, and the commands: number of words, words.
#: Returns 1 if the job is begun, also by an earlier call whose answer was lost; 0 if the worker does not own it, -1 if
#: it owns it and the job is not queued.
_BEGIN = """
if redis.call('exists', KEYS[3]) == 1 then
  return 1
end
if redis.call('hget', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 0
end
if redis.call('hget', KEYS[2], 'status') ~= 'queued' then
  return -1
end
local i = 3
while i <= #ARGV do
  redis.call(unpack(ARGV, i + 1, i + ARGV[i]))
  i = i + ARGV[i] + 1
end
return 1
"""

#: Queues a job that is due. RQ's scheduler takes several steps, between which others may cancel or queue it.
#: KEYS: rq:scheduled:<queue>, queue, job. ARGV: job id, now as RQ writes it, now in seconds, and seconds for which the
#: record of a job that is due may be missing: RQ registers a job before it writes it.
#: Returns 1 if the job is queued, 0 if it may be later, -1 if it was canceled or deleted.
_PROMOTE = """
local due_at = tonumber(redis.call('zscore', KEYS[1], ARGV[1]) or '') or 1e300
local is_job = redis.call('type', KEYS[3]).ok == 'hash'
if due_at > tonumber(ARGV[3]) or not is_job and due_at > tonumber(ARGV[3]) - tonumber(ARGV[4]) then
  return 0
end
redis.call('zrem', KEYS[1], ARGV[1])
if not is_job or redis.call('hget', KEYS[3], 'status') ~= 'scheduled' then
  return -1
end
redis.call('hset', KEYS[3], 'status', 'queued', 'enqueued_at', ARGV[2])
local in_front = redis.call('hget', KEYS[3], 'enqueue_at_front') == '1'
redis.call(in_front and 'lpush' or 'rpush', KEYS[2], ARGV[1])
return 1
"""

#: KEYS: job. ARGV: field, value.
_SET_FIELD = "if redis.call('exists', KEYS[1]) == 1 then redis.call('hset', KEYS[1], ARGV[1], ARGV[2]) end"

MISSING_S = 60  # seconds after which a scheduled job without a record counts as deleted
FOREVER = 1e18


class Pop(NamedTuple):
    """The result of taking the next job: its queue, or None, and its id; or whether intake is paused."""

    queue: rq.Queue | None = None
    job_id: bytes = b""
    paused: bool = False


def text_of(name: bytes | str | None) -> str:
    """Decode a name that anyone may have written; no name of svdq has bytes that are not UTF-8."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name or ""


def server_time(connection: redis.Redis) -> float:
    """Read the clock of Redis, in seconds since the epoch: the one clock that all hosts share."""
    seconds, microseconds = connection.time()
    return float(seconds) + microseconds / 1e6


def is_wrong_type(error: Exception) -> bool:
    """Whether a command failed because another program has given a key of a job the wrong type."""
    return isinstance(error, redis.ResponseError) and "WRONGTYPE" in str(error)


def _eval(connection: redis.Redis, script: str, names: Sequence[str | bytes], *values: object) -> Any:
    return connection.eval(script, len(names), *names, *values)  # type: ignore[arg-type]  # redis-py's stub wants text


def pop(connection: redis.Redis, queues: Sequence[rq.Queue], worker_name: str, pause: str = "") -> Pop:
    """Take the next job off the queues, most urgent first, and record its owner; none if `pause` is in keys.PAUSES."""
    places = [key for queue in queues for key in (queue.key, queue.intermediate_queue_key)]
    names = [keys.SUSPENDED, keys.PAUSES, keys.POPPED, *places]
    answer = _eval(connection, _POP, names, worker_name, pause or worker_name)
    if not answer:
        return Pop()
    return Pop(paused=True) if answer[0] < 0 else Pop(queue=queues[answer[0]], job_id=answer[1])


def claim(connection: redis.Redis, queue: rq.Queue, job_id: str, worker_name: str) -> bool:
    """Take a given job off a queue as `pop` takes the next; return whether it was there."""
    names = (queue.key, queue.intermediate_queue_key, keys.POPPED)
    return bool(_eval(connection, _CLAIM, names, job_id, worker_name))


def begin(connection: redis.Redis, worker_name: str, execution: Execution, commands: Sequence[Sequence[Any]]) -> int:
    """Begin a popped job by commands that are executed together, if the worker still owns it; as `_BEGIN` returns."""
    names = (keys.POPPED, key_of(execution.job_id), execution.key)
    words = [word for command in commands for word in (len(command), *command)]
    return int(_eval(connection, _BEGIN, names, execution.job_id, worker_name, *words))


def drop_popped(pipeline: redis.Redis, queue: rq.Queue, job_id: bytes | str) -> None:
    """Remove a job from the popped ones."""
    pipeline.lrem(queue.intermediate_queue_key, 1, job_id)  # type: ignore[arg-type]  # redis-py's stub wants text
    pipeline.hdel(keys.POPPED, job_id)


def return_to_queue(
    connection: redis.Redis, queue: rq.Queue, execution: Execution, lease_until: float = FOREVER
) -> bool:
    """Put the job of an execution back to the front of its queue, unless its lease ends later than `lease_until`."""
    job_id = execution.job_id
    registry, executions = queue.started_job_registry.key, ExecutionRegistry(job_id, connection).key
    names = (registry, execution.key, executions, queue.key, key_of(job_id))
    values = (execution.composite_key, execution.id, job_id, lease_until)
    return bool(_eval(connection, _RETURN_TO_QUEUE, names, *values) == 1)


def return_popped_to_queue(connection: redis.Redis, queue: rq.Queue, job_id: bytes, owner: bytes) -> bool:
    """Put a job that its owner (b"": another program) popped and did not begin back to the front of its queue."""
    names = (keys.POPPED, queue.intermediate_queue_key, queue.key, key_of(job_id))
    return bool(_eval(connection, _RETURN_POPPED_TO_QUEUE, names, job_id, owner) == 1)


def promote(pipeline: redis.Redis, queue: rq.Queue, job_id: bytes, now_s: float) -> None:
    """Queue a job that is due, unless it was canceled or another group did; the answer is 1 if it is queued."""
    names = (queue.scheduled_job_registry.key, queue.key, key_of(job_id))
    _eval(pipeline, _PROMOTE, names, job_id, utcformat(datetime.fromtimestamp(now_s, UTC)), now_s, MISSING_S)


def set_field(pipeline: redis.Redis, job_id: str, field: str, value: str) -> None:
    """Write a field of a job that exists: HSET alone would create a job that was deleted."""
    _eval(pipeline, _SET_FIELD, [key_of(job_id)], field, value)


def write_lease(
    pipeline: redis.Redis, queue: rq.Queue, execution: Execution, until_s: float, *, is_new: bool = False
) -> None:
    """Write the lease of an execution, which ends at `until_s` by the clock of Redis; an old one only if it exists."""
    pipeline.zadd(queue.started_job_registry.key, {execution.composite_key: until_s}, xx=not is_new)
    # RQ keeps a job's list of its executions for a minute longer.
    executions = ExecutionRegistry(execution.job_id, pipeline)
    pipeline.zadd(executions.key, {execution.id: until_s + 60})
    pipeline.expireat(executions.key, int(until_s) + 60)

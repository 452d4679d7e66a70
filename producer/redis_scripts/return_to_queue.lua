-- KEYS: rq:wip:<queue>, the execution, the job's executions, queue, job. ARGV: <job>:<execution>, execution, job, and
-- the latest end of its lease. Returns 1 if the job is back in its queue, -1 if it has ended.
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

-- Renews the lease of an execution with all its records, which may have expired.
-- KEYS: rq:wip:<queue>, execution, the job's executions, job. ARGV: <job>:<execution>, execution, the end of the lease by
-- the clock of Redis, seconds that it lasts, now as RQ writes it, then the fields of the execution and their values.
-- Returns 1, or 0 if its worker does not hold the job any more: then nothing is written.
if not redis.call('zscore', KEYS[1], ARGV[1]) then
  return 0
end
redis.call('hset', KEYS[2], unpack(ARGV, 6))
redis.call('expire', KEYS[2], ARGV[4])
redis.call('zadd', KEYS[1], ARGV[3], ARGV[1])
-- RQ keeps a job's list of its executions for a minute longer.
redis.call('zadd', KEYS[3], ARGV[3] + 60, ARGV[2])
redis.call('expire', KEYS[3], ARGV[4] + 60)
if redis.call('exists', KEYS[4]) == 1 then
  redis.call('hset', KEYS[4], 'last_heartbeat', ARGV[5])
end
return 1

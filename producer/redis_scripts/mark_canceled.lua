-- Marks a job in flight for cancellation. KEYS: job, marks, the job's executions. ARGV: job id.
-- Returns 1 if it is marked, 0 if it is not started any more, -1 if it has no execution: no group has it.
if redis.call('hget', KEYS[1], 'status') ~= 'started' then
  return 0
elseif redis.call('zcard', KEYS[3]) == 0 then
  return -1
end
redis.call('sadd', KEYS[2], ARGV[1])
return 1

-- KEYS: job, rq:queues, queue or registry of scheduled jobs. ARGV: job id, queue, when it is due or "", then the fields
-- of the job and their values. Returns 1, or 0 if the job exists, which RQ's own script for unique jobs does not tell.
if redis.call('exists', KEYS[1]) == 1 then
  return 0
end
redis.call('hset', KEYS[1], unpack(ARGV, 4))
redis.call('sadd', KEYS[2], ARGV[2])
if ARGV[3] == '' then
  redis.call('rpush', KEYS[3], ARGV[1])
else
  redis.call('zadd', KEYS[3], ARGV[3], ARGV[1])
end
return 1

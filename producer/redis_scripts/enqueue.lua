-- KEYS: job, rq:queues, queue or registry of scheduled jobs; of a job that upscales a video, also the key that exists
-- while that is removed and the set of the jobs that need it. ARGV: job id, queue, when it is due or "", seconds that the
-- set lasts, then the fields of the job and their values. Returns 1, or 0 if the job exists, or -1 if the video is being
-- removed.
if redis.call('exists', KEYS[1]) == 1 then
  return 0
end
if KEYS[4] then
  if redis.call('exists', KEYS[4]) == 1 then
    return -1
  end
  redis.call('sadd', KEYS[5], ARGV[1])
  redis.call('expire', KEYS[5], ARGV[4])
end
redis.call('hset', KEYS[1], unpack(ARGV, 5))
redis.call('sadd', KEYS[2], ARGV[2])
if ARGV[3] == '' then
  redis.call('rpush', KEYS[3], ARGV[1])
else
  redis.call('zadd', KEYS[3], ARGV[3], ARGV[1])
end
add_event('video.created', ARGV[1])
return 1

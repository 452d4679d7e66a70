-- KEYS: queue, intermediate queue, svdq:popped. ARGV: job id, the worker's name.
if redis.call('lrem', KEYS[1], 1, ARGV[1]) == 0 then
  return 0
end
redis.call('rpush', KEYS[2], ARGV[1])
redis.call('hset', KEYS[3], ARGV[1], ARGV[2])
return 1

-- KEYS: svdq:popped, intermediate queue, queue, job. ARGV: job id, its owner or ''.
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

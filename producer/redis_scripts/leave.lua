-- Leaves a popped job to other groups. KEYS: svdq:popped, the job, rq:queues, the intermediate queue, their queue. ARGV: job
-- id, the worker's name, the name of their queue, what the job waits for. Returns 1, or 0 if it was canceled or taken back.
-- It takes its owner's turn there, or goes before whatever was moved to the front earlier.
if redis.call('hget', KEYS[1], ARGV[1]) ~= ARGV[2] or redis.call('lrem', KEYS[4], 1, ARGV[1]) == 0 then
  return 0
end
redis.call('hdel', KEYS[1], ARGV[1])
redis.call('sadd', KEYS[3], KEYS[5])
redis.call('hset', KEYS[2], 'origin', ARGV[3], 'svdq_waits', ARGV[4])
local front = redis.call('hget', KEYS[2], 'svdq_front')
if not front then
  redis.call('rpush', KEYS[5], ARGV[1])
  take_turns(KEYS[5], {ARGV[1]})
  return 1
end
local place, before = 0
repeat
  before = redis.call('lindex', KEYS[5], place)
  local other = before and redis.pcall('hget', 'rq:job:' .. before, 'svdq_front')
  place = place + 1
until type(other) ~= 'string' or other < front
if before then
  redis.call('linsert', KEYS[5], 'before', before, ARGV[1])
else
  redis.call('rpush', KEYS[5], ARGV[1])
end
return 1

-- KEYS: rq:suspended, our pauses, svdq:popped, then queue and intermediate queue in turn. ARGV: the worker's name, and
-- the field of our pauses that concerns it.
-- Returns {number of the queue, job id}; {} when nothing is queued; {-1} when intake is paused.
if redis.call('exists', KEYS[1]) == 1 or redis.call('hexists', KEYS[2], ARGV[2]) == 1 then
  return {-1}
end
local queues = {}
for i = 4, #KEYS, 2 do
  table.insert(queues, KEYS[i])
end
-- An idle group asks several times a second.
if redis.call('exists', unpack(queues)) == 0 then
  return {}
end
for i = 4, #KEYS, 2 do
  local id = redis.call('lmove', KEYS[i], KEYS[i + 1], 'LEFT', 'RIGHT')
  if id then
    redis.call('hset', KEYS[3], id, ARGV[1])
    return {(i - 4) / 2, id}
  end
end
return {}

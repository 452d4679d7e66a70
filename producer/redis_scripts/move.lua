-- Moves a job within or between queues. KEYS: job, target, then all queues. ARGV: job id, target's name, the command
-- that adds it to the target, and the arguments of that; of `linsert`, `before`, the id of another job, and its own.
-- After `rpush` it takes its owner's turn there; elsewhere somebody has put it by hand.
if ARGV[3] == 'linsert' and (ARGV[1] == ARGV[5] or not redis.call('lpos', KEYS[2], ARGV[5])) then
  return 0
end
for i = 3, #KEYS do
  if redis.call('lrem', KEYS[i], 1, ARGV[1]) > 0 then
    redis.call(ARGV[3], KEYS[2], unpack(ARGV, 4))
    redis.call('hset', KEYS[1], 'origin', ARGV[2])
    if ARGV[3] == 'lpush' then
      local time = redis.call('time') -- for leave.lua
      redis.call('hset', KEYS[1], 'svdq_front', time[1] .. string.format('%06d', time[2]))
    else
      redis.call('hdel', KEYS[1], 'svdq_front')
    end
    if ARGV[3] == 'rpush' then
      take_turns(KEYS[2], {ARGV[1]})
    end
    return 1
  end
end
return 0

-- Pops the next jobs, most urgent first, and looks at the one behind them.
-- KEYS: rq:suspended, our pauses, svdq:popped, svdq:canceled, svdq:crashes, then queue, intermediate queue and the set of
-- its workers in turn. ARGV: the worker's name, the field of our pauses that concerns it, how many jobs to pop at most,
-- the start of the keys of jobs, a job whose record is known, and the field of our pauses that concerns its host.
-- Returns whether intake is paused; the time; the popped jobs; the next one, in a list; and for each queue the number of
-- its jobs and of its workers. A job is {number of its queue, id, record, whether it is canceled, whether it is suspected
-- of a crash}; such a suspect is the last that is popped, since it runs alone.
local reasons = redis.call('hmget', KEYS[2], ARGV[2], ARGV[6])
local paused = redis.call('exists', KEYS[1]) == 1 or reasons[1] or reasons[2]
local queues = {}
for i = 6, #KEYS, 3 do
  table.insert(queues, KEYS[i])
end
local found = {paused and 1 or 0, redis.call('time'), {}, {}, {}}
-- An idle group asks several times a second.
if redis.call('exists', unpack(queues)) == 0 then
  return found
end
local function describe(i, id, known)
  local record = {}
  if id ~= known and redis.call('type', ARGV[4] .. id).ok == 'hash' then
    record = redis.call('hgetall', ARGV[4] .. id)
  end
  local canceled, suspect = redis.call('sismember', KEYS[4], id), redis.call('hexists', KEYS[5], id)
  return {(i - 6) / 3, id, record, canceled, suspect}
end
local left = paused and 0 or tonumber(ARGV[3])
for i = 6, #KEYS, 3 do
  while left > 0 do
    local id = redis.call('lmove', KEYS[i], KEYS[i + 1], 'LEFT', 'RIGHT')
    if not id then
      break
    end
    redis.call('hset', KEYS[3], id, ARGV[1])
    local job = describe(i, id)
    table.insert(found[3], job)
    left = job[5] == 1 and 0 or left - 1
  end
  local next = #found[4] == 0 and redis.call('lindex', KEYS[i], 0)
  if next then
    table.insert(found[4], describe(i, next, ARGV[5]))
  end
  table.insert(found[5], {redis.call('llen', KEYS[i]), redis.call('scard', KEYS[i + 2])})
end
return found

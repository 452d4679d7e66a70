-- Counts what a group without ranks would start them for: jobs that wait, that are due, and those that a group which
-- has died had popped, had begun or was about to queue. None while the queues are paused.
-- KEYS: rq:suspended, svdq:popped, then queue, intermediate queue, scheduled, started and ready registry in turn. ARGV:
-- the start of the keys of workers.
if redis.call('exists', KEYS[1]) == 1 then
  return 0
end
local now_s = redis.call('time')[1]
local number = 0
local function add(answer) -- an error if a key has the wrong type
  number = number + (type(answer) == 'number' and answer or 0)
end
for i = 3, #KEYS, 5 do
  add(redis.pcall('llen', KEYS[i]))
  add(redis.pcall('zcount', KEYS[i + 2], '-inf', now_s))
  add(redis.pcall('zcount', KEYS[i + 3], '-inf', now_s))
  add(redis.pcall('zcard', KEYS[i + 4]))
  local popped = redis.pcall('lrange', KEYS[i + 1], 0, -1)
  for _, id in ipairs(popped.err and {} or popped) do
    local worker = redis.call('hget', KEYS[2], id)
    add(worker and redis.call('exists', ARGV[1] .. worker) == 1 and 0 or 1)
  end
end
return number

-- Samples the queued jobs evenly. KEYS: the queues. ARGV: how many jobs in all, in how many slices of a queue.
-- Returns the ids.
local total, ids = 0, {}
for _, queue in ipairs(KEYS) do
  total = total + redis.call('llen', queue)
end
for _, queue in ipairs(KEYS) do
  local number = redis.call('llen', queue)
  local length = math.ceil(number * math.min(1, ARGV[1] / math.max(1, total)) / ARGV[2])
  for first = 0, number - 1, math.max(1, length, math.ceil(number / ARGV[2])) do
    for _, id in ipairs(redis.call('lrange', queue, first, first + length - 1)) do
      ids[#ids + 1] = id
    end
  end
end
return ids

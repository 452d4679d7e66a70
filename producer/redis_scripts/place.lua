-- Moves jobs from the end of a queue to their owners' turns. KEYS: queue. ARGV: "push" to add them first, or "", job ids.
local ids = {}
for i = 2, #ARGV do
  ids[#ids + 1] = ARGV[i]
  if ARGV[1] == 'push' then
    redis.call('rpush', KEYS[1], ARGV[i])
  end
end
take_turns(KEYS[1], ids)

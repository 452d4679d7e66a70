-- RQ keeps stopped jobs in the registry of failed ones; this finds the ids of the stopped ones, the newest first.
-- KEYS: the registry, svdq:stopped. ARGV: start of the keys of jobs, least score in the registry.
local found = {}
for _, id in ipairs(redis.call('zrevrange', KEYS[2], 0, -1)) do
  local score = redis.call('zscore', KEYS[1], id)
  local is_late = score and (ARGV[2] == '-inf' or tonumber(score) >= tonumber(ARGV[2]))
  if is_late and redis.pcall('hget', ARGV[1] .. id, 'status') == 'stopped' then
    found[#found + 1] = id
  end
end
return found

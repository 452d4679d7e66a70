-- Appends lines to the log of a job, unless it was removed, up to a size. KEYS: the job. ARGV: field, lines, bytes.
if redis.call('exists', KEYS[1]) == 0 then
  return
end
local log = (redis.call('hget', KEYS[1], ARGV[1]) or '') .. ARGV[2]
local limit = tonumber(ARGV[3])
if #log > limit then
  local cut = string.find(log, '\n', #log - limit, true)
  log = string.sub(log, (cut or 0) + 1)
end
redis.call('hset', KEYS[1], ARGV[1], log)

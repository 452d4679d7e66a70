-- Writes a field of a job that exists. KEYS: job. ARGV: field, value.
if redis.call('exists', KEYS[1]) == 1 then
  redis.call('hset', KEYS[1], ARGV[1], ARGV[2])
end

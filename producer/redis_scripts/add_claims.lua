-- Adds to the claims on a job. KEYS: job. ARGV: field, number. Returns the sum, or nil without a job or below zero.
local claims = tonumber(redis.call('hget', KEYS[1], ARGV[1]) or 0) + ARGV[2]
if redis.call('exists', KEYS[1]) == 0 or claims < 0 then
  return nil
end
redis.call('hset', KEYS[1], ARGV[1], claims)
return claims

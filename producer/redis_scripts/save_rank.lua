-- Writes the record of a rank, and forgets ranks whose records have expired, all by the clock of Redis.
-- KEYS: record, svdq:ranks. ARGV: `<group>:<rank>`, the record, seconds that it lasts.
local now_s = tonumber(redis.call('time')[1])
redis.call('set', KEYS[1], ARGV[2], 'EX', ARGV[3])
redis.call('zadd', KEYS[2], now_s, ARGV[1])
redis.call('zremrangebyscore', KEYS[2], '-inf', now_s - ARGV[3] - 1)
redis.call('expire', KEYS[2], ARGV[3])

-- Makes a worker's host the one that sends the events in the outbox of webhooks, and keeps it so.
-- KEYS: svdq:webhooks-sender, svdq:webhooks-wanted, svdq:webhooks. ARGV: its name, the name of a sender that is gone or
-- "", milliseconds until others may send, seconds for which events are kept and wanted after that.
-- Returns the name of the sender.
local sender = redis.call('get', KEYS[1])
if sender and sender ~= ARGV[1] and sender ~= ARGV[2] then
  return sender
end
redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[3])
redis.call('set', KEYS[2], '1', 'ex', ARGV[4])
redis.call('expire', KEYS[3], ARGV[4])
return ARGV[1]

-- Other scripts that call `add_event` begin with this one; see `lua.source`.
-- Adds an event of a video to the outbox of webhooks while workers send them. The newest 100,000 are kept, about as many
-- as fit into 10 MB, for a week after the last one.
local function add_event(event, id)
  if redis.call('exists', 'svdq:webhooks-wanted') == 1 then
    redis.call('xadd', 'svdq:webhooks', 'maxlen', '~', 100000, '*', 'type', event, 'id', id)
    redis.call('expire', 'svdq:webhooks', 604800)
  end
end

-- Queues jobs that are due. RQ's scheduler takes several steps, between which others may cancel or queue them.
-- KEYS: rq:scheduled:<queue>, queue, jobs. ARGV: now as RQ writes it, and the ids of the jobs in their order.
-- Returns how many are queued: others may be later, or were canceled or deleted.
local now_s, num_queued, behind = tonumber(redis.call('time')[1]), 0, {}
for i = 3, #KEYS do
  local id = ARGV[i - 1]
  local due_at = redis.call('zscore', KEYS[1], id)
  if due_at and tonumber(due_at) <= now_s then
    redis.call('zrem', KEYS[1], id)
    if redis.pcall('hget', KEYS[i], 'status') == 'scheduled' then
      redis.call('hset', KEYS[i], 'status', 'queued', 'enqueued_at', ARGV[1])
      num_queued = num_queued + 1
      if redis.call('hget', KEYS[i], 'enqueue_at_front') == '1' then
        redis.call('lpush', KEYS[2], id)
      else
        redis.call('rpush', KEYS[2], id)
        behind[#behind + 1] = id
      end
    end
  end
end
if #behind > 0 then
  take_turns(KEYS[2], behind)
end
return num_queued

-- Queues a job that is due. RQ's scheduler takes several steps, between which others may cancel or queue it.
-- KEYS: rq:scheduled:<queue>, queue, job. ARGV: job id, now as RQ writes it, now in seconds, and seconds for which the
-- record of a job that is due may be missing: RQ registers a job before it writes it.
-- Returns 1 if the job is queued, 0 if it may be later, -1 if it was canceled or deleted.
local due_at = tonumber(redis.call('zscore', KEYS[1], ARGV[1]) or '') or 1e300
local is_job = redis.call('type', KEYS[3]).ok == 'hash'
if due_at > tonumber(ARGV[3]) or not is_job and due_at > tonumber(ARGV[3]) - tonumber(ARGV[4]) then
  return 0
end
redis.call('zrem', KEYS[1], ARGV[1])
if not is_job or redis.call('hget', KEYS[3], 'status') ~= 'scheduled' then
  return -1
end
redis.call('hset', KEYS[3], 'status', 'queued', 'enqueued_at', ARGV[2])
local in_front = redis.call('hget', KEYS[3], 'enqueue_at_front') == '1'
redis.call(in_front and 'lpush' or 'rpush', KEYS[2], ARGV[1])
if not in_front then
  take_turns(KEYS[2], {ARGV[1]})
end
return 1

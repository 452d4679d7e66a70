-- Executes commands that begin a popped job; WATCH on the hash of popped jobs would make groups wait for each other.
-- KEYS: svdq:popped, job, execution. ARGV: job id, the worker's name, and the commands: number of words, words.
-- Returns 1 if the job is begun, also by an earlier call whose answer was lost; 0 if the worker does not own it, -1 if
-- it owns it and the job is not queued.
if redis.call('exists', KEYS[3]) == 1 then
  return 1
end
if redis.call('hget', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 0
end
if redis.call('hget', KEYS[2], 'status') ~= 'queued' then
  return -1
end
-- One that returned to its queue has been started before; `retry` makes it new.
if (redis.call('hget', KEYS[2], 'last_heartbeat') or '') == '' then
  add_event('video.started', ARGV[1])
end
execute(3)
return 1

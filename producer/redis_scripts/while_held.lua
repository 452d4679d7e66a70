-- Executes commands that renew or end a job, if its worker holds it and it was not deleted; the record of the execution may
-- have expired meanwhile. KEYS: rq:wip:<queue>, svdq:popped, job, dependents of the job. ARGV: <job>:<execution>, or the
-- id of a job that is popped and not begun; the worker's name; "alone" to do nothing if other jobs depend on it, or "";
-- the event that it ends with, or ""; and the commands: number of words, words. Returns 1 if they are executed, 0 if the
-- worker does not hold the job, 2 if other jobs depend on it.
if not redis.call('zscore', KEYS[1], ARGV[1]) and redis.call('hget', KEYS[2], ARGV[1]) ~= ARGV[2] then
  return 0
end
if redis.call('exists', KEYS[3]) == 0 then
  return 0
end
if ARGV[3] == 'alone' and redis.call('exists', KEYS[4]) == 1 then
  return 2
end
execute(5)
if ARGV[4] ~= '' then
  add_event(ARGV[4], string.match(ARGV[1], '^[^:]*'))
end
return 1

-- Executes commands that end a job, if its worker holds it; the record of the execution may have expired meanwhile.
-- KEYS: rq:wip:<queue>, svdq:popped, dependents of the job. ARGV: <job>:<execution>, or the id of a job that is popped and
-- not begun; the worker's name; "alone" to do nothing if other jobs depend on it, or ""; the event that it ends with; and
-- the commands: number of words, words. Returns 1 if it is ended, 0 if the worker does not hold it, 2 if other jobs depend on it.
if not redis.call('zscore', KEYS[1], ARGV[1]) and redis.call('hget', KEYS[2], ARGV[1]) ~= ARGV[2] then
  return 0
end
if ARGV[3] == 'alone' and redis.call('exists', KEYS[3]) == 1 then
  return 2
end
execute(5)
add_event(ARGV[4], string.match(ARGV[1], '^[^:]*'))
return 1

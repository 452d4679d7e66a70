-- Executes commands that end a job, if its worker holds it; the record of the execution may have expired meanwhile.
-- KEYS: rq:wip:<queue>, dependents of the job. ARGV: <job>:<execution>, and the commands: number of words, words.
-- Returns 0 if the worker does not hold it, else 1, or 2 if other jobs depend on it.
if not redis.call('zscore', KEYS[1], ARGV[1]) then
  return 0
end
local has_dependents = redis.call('scard', KEYS[2]) > 0
execute(2)
return has_dependents and 2 or 1

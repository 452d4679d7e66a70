-- Executes commands that end a job as finished, if its worker holds it and no other job depends on it.
-- KEYS: rq:wip:<queue>, the execution, dependents of the job. ARGV: <job>:<execution>, and the commands: number of words,
-- words. Returns 1 if it is ended, 0 if the worker does not hold it, -1 if others depend on it.
if redis.call('exists', KEYS[2]) == 0 or not redis.call('zscore', KEYS[1], ARGV[1]) then
  return 0
end
if redis.call('scard', KEYS[3]) > 0 then
  return -1
end
local i = 2
while i <= #ARGV do
  redis.call(unpack(ARGV, i + 1, i + ARGV[i]))
  i = i + ARGV[i] + 1
end
return 1

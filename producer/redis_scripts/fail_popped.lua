-- Executes commands that end a popped job, if the worker owns it.
-- KEYS: svdq:popped. ARGV: job id, the worker's name, and the commands: number of words, words.
-- Returns 1 if it is ended.
if redis.call('hget', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 0
end
execute(3)
return 1

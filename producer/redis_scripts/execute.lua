-- Executes the commands from ARGV[first] on: for each the number of its words, and the words.
local function execute(first)
  local i = first
  while i <= #ARGV do
    redis.call(unpack(ARGV, i + 1, i + ARGV[i]))
    i = i + ARGV[i] + 1
  end
end

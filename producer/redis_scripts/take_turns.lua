-- Other scripts that call `take_turns` begin with this one; see `lua.source`.
-- Moves jobs that were pushed to the end of a queue to their owners' turns: the n-th waiting job of an owner comes after
-- every job that is the n-th, or an earlier one, among the jobs of another owner. No other job changes its place.
-- The hash svdq:turns:<queue> has the owners of jobs that were seen there: one HMGET is much faster than many HGETs.
local function take_turns(queue, ids)
  local known, unknown = 'svdq:turns:' .. queue, {}
  local function owner_of(id)
    local owner = redis.pcall('hget', 'rq:job:' .. id, 'svdq_owner')
    return type(owner) == 'string' and owner or ''
  end
  local owners = {}
  for _, id in ipairs(ids) do
    owners[id] = owner_of(id)
    if owners[id] ~= '' then
      redis.call('sadd', 'svdq:owners', owners[id])
    end
  end
  if redis.call('exists', 'svdq:unfair') == 1 or redis.call('scard', 'svdq:owners') < 2 then
    return
  end
  local waiting = redis.call('lrange', queue, 0, -1)
  if redis.call('hlen', known) > 2 * #waiting + 1000 then
    redis.call('del', known)
  end
  local counts, ends, rounds = {}, {}, 0 -- ends[n]: the last place of any owner's n-th job
  for first = 1, #waiting, 5000 do -- Lua's stack has room for 8,000
    local last = math.min(first + 4999, #waiting)
    local found = redis.call('hmget', known, unpack(waiting, first, last))
    for i = first, last do
      local id, owner = waiting[i], found[i - first + 1]
      if not owner then
        owner = owner_of(id)
        unknown[#unknown + 1] = id
        unknown[#unknown + 1] = owner
      end
      if not owners[id] then
        local number = (counts[owner] or 0) + 1
        counts[owner] = number
        ends[number] = i
        if number > rounds then
          rounds = number
        end
      end
    end
  end
  for first = 1, #unknown, 5000 do
    redis.call('hset', known, unpack(unknown, first, math.min(first + 4999, #unknown)))
    redis.call('expire', known, 86400)
  end
  for number = 2, rounds do
    ends[number] = math.max(ends[number], ends[number - 1])
  end
  -- By number, and of the same number in their order. The places for higher numbers come later.
  local moves, found = {}, {}
  for i, id in ipairs(ids) do
    local number = (counts[owners[id]] or 0) + 1
    counts[owners[id]] = number
    moves[i] = number * 1e6 + i
    found[moves[i]] = id
  end
  table.sort(moves)
  local place = 1
  for _, move in ipairs(moves) do
    place = math.max(place, (ends[math.min(math.floor(move / 1e6), rounds)] or 0) + 1)
    while owners[waiting[place]] do -- it is to be moved, too
      place = place + 1
    end
    local after, id = waiting[place], found[move]
    if redis.call('lrem', queue, -1, id) == 1 then
      redis.call(after and 'linsert' or 'rpush', queue, unpack(after and {'before', after, id} or {id}))
    end
  end
end

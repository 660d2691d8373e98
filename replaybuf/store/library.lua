#!lua name=replaybuf1

-- Put one group into the index unless its id, or its ticket's prompt, has one already.
-- keys: index, group ids, counts; args: group id, id of the ticket's prompt or "", numbers, strings
-- returns {1, number} or {0, number of the one that was first}
local function publish(keys, args)
  local seen = redis.call('HGET', keys[2], args[1])
  if not seen and args[2] ~= '' then
    seen = redis.call('HGET', keys[2], args[2])
  end
  if seen then
    return {0, tonumber(seen)}
  end
  local number = redis.call('HINCRBY', keys[3], 'stored', 1)
  redis.call('XADD', keys[1], number .. '-0', 'n', args[3], 's', args[4])
  redis.call('HSET', keys[2], args[1], number)
  if args[2] ~= '' and args[2] ~= args[1] then
    redis.call('HSET', keys[2], args[2], number)
  end
  return {1, number}
end

-- Append ledger entry `n` if the caller still leads. Repeating an append that was done is recognised.
-- keys: ledger, fence; args: fencing token, n, record
local function append(keys, args)
  local fence = redis.call('GET', keys[2])
  if fence ~= args[1] then
    return {'fenced', fence}
  end
  local id = args[2] .. '-0'
  local last = redis.call('XREVRANGE', keys[1], '+', '-', 'COUNT', 1)[1]
  local newest = last and tonumber(string.match(last[1], '^(%d+)')) or 0
  if newest >= tonumber(args[2]) then
    local there = redis.call('XRANGE', keys[1], id, id)[1]
    redis.call('SET', keys[2], fence) -- a write, so that a wait for durability covers the entry that is there
    return {(there and there[2][2] == args[3]) and 'ok' or 'taken', tostring(newest)}
  end
  if newest + 1 ~= tonumber(args[2]) and last then
    return {'gap', tostring(newest)}
  end
  redis.call('XADD', keys[1], id, 'r', args[3])
  return {'ok', args[2]}
end

-- Take or renew the lease. keys: lead, fence; args: who, ttl in ms, "1" to take it whoever holds it
-- returns {1, fencing token} or {0, holder, ms left}
local function lead(keys, args)
  local holder = redis.call('GET', keys[1])
  if holder == args[1] then
    redis.call('PEXPIRE', keys[1], args[2])
    return {1, redis.call('GET', keys[2])}
  end
  if holder and args[3] ~= '1' then
    return {0, holder, redis.call('PTTL', keys[1])}
  end
  redis.call('SET', keys[1], args[1], 'PX', args[2])
  return {1, tostring(redis.call('INCR', keys[2]))}
end

-- Give the lease back if it is still ours. keys: lead; args: who
local function resign(keys, args)
  if redis.call('GET', keys[1]) == args[1] then
    redis.call('DEL', keys[1])
  end
  return 1
end

-- Change tickets and their counters in one go. keys: tickets, counts, fence
-- args: fencing token, number of tickets to drop, them, number to set, (deadline, ticket)..., (counter, increment)...
local function tickets(keys, args)
  local fence = redis.call('GET', keys[3])
  if fence ~= args[1] then
    return {'fenced', fence}
  end
  local at = 3
  for _ = 1, tonumber(args[2]) do
    redis.call('ZREM', keys[1], args[at])
    at = at + 1
  end
  local set = tonumber(args[at])
  at = at + 1
  for _ = 1, set do
    redis.call('ZADD', keys[1], args[at], args[at + 1])
    at = at + 2
  end
  while at < #args do
    redis.call('HINCRBY', keys[2], args[at], args[at + 1])
    at = at + 2
  end
  return {'ok', ''}
end

-- Raise counters and set others. keys: counts; args: number to raise, (counter, increment)..., (counter, value)...
local function count(keys, args)
  local raised = 2 * tonumber(args[1])
  for at = 2, #args, 2 do
    redis.call(at <= raised and 'HINCRBY' or 'HSET', keys[1], args[at], args[at + 1])
  end
  return {'ok', ''}
end

-- All may run on a full server: what fills it are payloads, which are refused by themselves.
redis.register_function{function_name = 'rb_publish', callback = publish, flags = {'allow-oom'}}
redis.register_function{function_name = 'rb_count', callback = count, flags = {'allow-oom'}}
redis.register_function{function_name = 'rb_append', callback = append, flags = {'allow-oom'}}
redis.register_function{function_name = 'rb_lead', callback = lead, flags = {'allow-oom'}}
redis.register_function{function_name = 'rb_resign', callback = resign, flags = {'allow-oom'}}
redis.register_function{function_name = 'rb_tickets', callback = tickets, flags = {'allow-oom'}}

#!lua name=replaybuf1

-- The newest fencing token, which a caller must have to write; "" where there is none, as in an emptied Redis.
local function newest_fence(key)
  return redis.call('GET', key) or ''
end

-- Number of the group that has this id; 0 where its history is trimmed; false where there is none.
-- `bit` is the prompt index that the id stands for where it has the form of a ticket's default id, else ''.
local function known(ids, id, done, bit)
  local number = redis.call('HGET', ids, id)
  if number then
    return tonumber(number)
  end
  return bit ~= '' and redis.call('GETBIT', done, bit) == 1 and 0
end

-- Put one group into the index unless its id, or its ticket's prompt, has one already.
-- keys: index, group ids, counts, fence, trimmed prompts of the id's adapter, and of the ticket's
-- args: fencing token ("" = a producer that writes here itself), group id, id of the ticket's prompt or "", numbers,
-- strings, prompt index of the first id, of the second, or ""
-- returns {1, number}, {0, number of the one that was first; 0 where its history is trimmed}
-- or {-1, newest fencing token}
local function publish(keys, args)
  local token = table.remove(args, 1)
  if token ~= '' then
    local fence = newest_fence(keys[4])
    if fence ~= token then
      return {-1, fence}
    end
  end
  local seen = known(keys[2], args[1], keys[5], args[5])
  if not seen and args[2] ~= '' and args[2] ~= args[1] then
    seen = known(keys[2], args[2], keys[6], args[6])
  end
  if seen then
    return {0, seen}
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
  local fence = newest_fence(keys[2])
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
  if newest + 1 ~= tonumber(args[2]) then
    return {'gap', tostring(newest)}
  end
  redis.call('XADD', keys[1], id, 'r', args[3])
  return {'ok', args[2]}
end

-- Take or renew the lease. keys: lead, fence; args: who, ttl in ms, "1" to take it whoever holds it
-- returns {1, fencing token} or {0, holder, ms left}
-- A token is a number that grows and who took it, so that tokens from before a Redis was emptied stay strange to it.
local function lead(keys, args)
  local holder = redis.call('GET', keys[1])
  if holder == args[1] then
    redis.call('PEXPIRE', keys[1], args[2])
    return {1, newest_fence(keys[2])}
  end
  if holder and args[3] ~= '1' then
    return {0, holder, redis.call('PTTL', keys[1])}
  end
  redis.call('SET', keys[1], args[1], 'PX', args[2])
  local before = tonumber(string.match(newest_fence(keys[2]), '^%d+') or '0')
  local token = string.format('%d:%s', before + 1, args[1])
  redis.call('SET', keys[2], token)
  return {1, token}
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
  local fence = newest_fence(keys[3])
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

-- Keep in a bitmap, a bit each, that these prompts have their group, instead of its default id in the table of ids.
-- keys: group ids, trimmed prompts of the adapter, counts, fence
-- args: fencing token, adapter, what stands before a prompt index in an id, (prompt index, number of its group)...
local function done(keys, args)
  local fence = newest_fence(keys[4])
  if fence ~= args[1] then
    return {'fenced', fence}
  end
  -- Only indexes that were issued: the bitmap is as long as the highest one.
  local issued = tonumber(redis.call('HGET', keys[3], 'next:' .. args[2]) or 0)
  for at = 4, #args, 2 do
    local id = args[3] .. args[at]
    if tonumber(args[at]) < issued and redis.call('HGET', keys[1], id) == args[at + 1] then
      redis.call('SETBIT', keys[2], args[at], 1)
      redis.call('HDEL', keys[1], id)
    end
  end
  return {'ok', ''}
end

-- Replace the snapshot and drop what it makes needless, unless the caller is fenced or a newer one stands there.
-- keys: snapshot, fence, index, ledger, entries set aside
-- args: fencing token, snapshot, first index number kept, first ledger entry kept, (number, entry to set aside)...
local function snapshot(keys, args)
  local fence = newest_fence(keys[2])
  if fence ~= args[1] then
    return {'fenced', fence}
  end
  local standing = tonumber(redis.call('GETRANGE', keys[1], 4, 23)) or -1
  if standing > tonumber(string.sub(args[2], 5, 24)) then
    return {'older', tostring(standing)}
  end
  redis.call('SET', keys[1], args[2])
  for at = 5, #args, 2 do
    redis.call('HSET', keys[5], args[at], args[at + 1])
  end
  redis.call('XTRIM', keys[3], 'MINID', args[3] .. '-0')
  redis.call('XTRIM', keys[4], 'MINID', args[4] .. '-0')
  return {'ok', ''}
end

-- Delete entries set aside, unless the caller is fenced: a newer leader's may have the same numbers to keep.
-- keys: entries set aside, fence; args: fencing token, numbers...
local function drop(keys, args)
  local fence = newest_fence(keys[2])
  if fence ~= args[1] then
    return {'fenced', fence}
  end
  for at = 2, #args do
    redis.call('HDEL', keys[1], args[at])
  end
  return {'ok', ''}
end

-- All may run on a full server: what fills it are payloads, which are refused by themselves.
redis.register_function{function_name = 'rb_publish', callback = publish, flags = {'allow-oom'}}
redis.register_function{function_name = 'rb_count', callback = count, flags = {'allow-oom'}}
redis.register_function{function_name = 'rb_done', callback = done, flags = {'allow-oom'}}
redis.register_function{function_name = 'rb_snapshot', callback = snapshot, flags = {'allow-oom'}}
redis.register_function{function_name = 'rb_drop', callback = drop, flags = {'allow-oom'}}
redis.register_function{function_name = 'rb_append', callback = append, flags = {'allow-oom'}}
redis.register_function{function_name = 'rb_lead', callback = lead, flags = {'allow-oom'}}
redis.register_function{function_name = 'rb_resign', callback = resign, flags = {'allow-oom'}}
redis.register_function{function_name = 'rb_tickets', callback = tickets, flags = {'allow-oom'}}

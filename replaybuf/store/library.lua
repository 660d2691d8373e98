#!lua name=replaybuf1

-- The newest fencing token; '' if there is none, as in an emptied Redis.
local function newest_fence(key)
  return redis.call('GET', key) or ''
end

-- Wrap a function that only a leader may call.
-- It gets all keys but the first, the fence, and all arguments but the first, the caller's fencing token.
-- The wrapper returns {'fenced', newest token} if the token is not the newest, else {outcome, detail}.
local function for_leader(callback)
  return function(keys, args)
    local fence_key, token = table.remove(keys, 1), table.remove(args, 1)
    local newest = newest_fence(fence_key)
    if newest ~= token then
      return {'fenced', newest}
    end
    local outcome, detail = callback(keys, args, fence_key, token)
    return {outcome or 'ok', detail or ''}
  end
end

-- Number of the group with this id; 0 if its history is trimmed; false if there is none.
-- `bit`: the prompt index of an id that has the form of a ticket's default id, else ''.
local function find_number(ids, id, done, bit)
  local number = redis.call('HGET', ids, id)
  if number then
    return tonumber(number)
  end
  return bit ~= '' and redis.call('GETBIT', done, bit) == 1 and 0
end

-- Put one group into the index unless its id, or its ticket's prompt, already has a group.
-- keys: index, group ids, counts, fence, trimmed prompts of the id's adapter, and of the ticket's
-- args: fencing token ('' = a producer that writes directly), group id, id of the ticket's prompt or '', numbers,
-- strings, prompt index of the first id and of the second, or ''
-- returns {1, number}, {0, number of the first group; 0 if its history is trimmed} or {-1, newest fencing token}
local function publish(keys, args)
  local token = table.remove(args, 1)
  if token ~= '' then
    local newest = newest_fence(keys[4])
    if newest ~= token then
      return {-1, newest}
    end
  end
  local has_prompt = args[2] ~= '' and args[2] ~= args[1]
  local first = find_number(keys[2], args[1], keys[5], args[5])
  if not first and has_prompt then
    first = find_number(keys[2], args[2], keys[6], args[6])
  end
  if first then
    return {0, first}
  end
  local number = redis.call('HINCRBY', keys[3], 'stored', 1)
  redis.call('XADD', keys[1], number .. '-0', 'n', args[3], 's', args[4])
  redis.call('HSET', keys[2], args[1], number)
  if has_prompt then
    redis.call('HSET', keys[2], args[2], number)
  end
  return {1, number}
end

-- Append ledger entry `n`. A repeat of the same entry is 'ok'.
-- keys: ledger; args: n, record; outcomes: ok, taken, gap; detail: number of the newest entry
local function append(keys, args, fence_key, token)
  local n, id = tonumber(args[1]), args[1] .. '-0'
  local last = redis.call('XREVRANGE', keys[1], '+', '-', 'COUNT', 1)[1]
  local newest = last and tonumber(string.match(last[1], '^(%d+)')) or 0
  if newest >= n then
    local stored = redis.call('XRANGE', keys[1], id, id)[1]
    redis.call('SET', fence_key, token) -- a write: the caller's wait for durability then covers the stored entry
    return (stored and stored[2][2] == args[2]) and 'ok' or 'taken', tostring(newest)
  end
  if newest + 1 ~= n then
    return 'gap', tostring(newest)
  end
  redis.call('XADD', keys[1], id, 'r', args[2])
  return 'ok', args[1]
end

-- Take or renew the lease. keys: lead, fence; args: holder, ttl in ms, '1' to take it from any holder
-- returns {1, fencing token} or {0, holder, ms left}
-- A token is a growing number and its holder, so that an emptied Redis does not accept tokens from before.
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

-- Release the lease if the caller holds it. keys: lead; args: holder
local function resign(keys, args)
  if redis.call('GET', keys[1]) == args[1] then
    redis.call('DEL', keys[1])
  end
  return 1
end

-- Change tickets and counters. keys: tickets, counts
-- args: number of tickets to drop, tickets, number to set, (deadline, ticket)..., (counter, increment)...
local function tickets(keys, args)
  local drops = tonumber(args[1])
  for at = 2, drops + 1 do
    redis.call('ZREM', keys[1], args[at])
  end
  local counters = drops + 3 + 2 * tonumber(args[drops + 2])
  for at = drops + 3, #args, 2 do
    if at < counters then
      redis.call('ZADD', keys[1], args[at], args[at + 1])
    else
      redis.call('HINCRBY', keys[2], args[at], args[at + 1])
    end
  end
end

-- Raise counters and set others. keys: counts; args: number to raise, (counter, increment)..., (counter, value)...
local function count(keys, args)
  local raised = 2 * tonumber(args[1])
  for at = 2, #args, 2 do
    redis.call(at <= raised and 'HINCRBY' or 'HSET', keys[1], args[at], args[at + 1])
  end
  return {'ok', ''}
end

-- Keep one bit per prompt that has a group, instead of the default id in the table of ids.
-- keys: group ids, trimmed prompts of the adapter, counts
-- args: adapter, prefix of a prompt index in an id, (prompt index, number of its group)...
local function done(keys, args)
  -- Issued indexes only: the bitmap is as long as its highest index.
  local issued = tonumber(redis.call('HGET', keys[3], 'next:' .. args[1]) or 0)
  for at = 3, #args, 2 do
    local id = args[2] .. args[at]
    if tonumber(args[at]) < issued and redis.call('HGET', keys[1], id) == args[at + 1] then
      redis.call('SETBIT', keys[2], args[at], 1)
      redis.call('HDEL', keys[1], id)
    end
  end
end

-- Replace the snapshot and trim what it makes unnecessary, unless the stored snapshot is newer.
-- keys: snapshot, index, ledger, old entries
-- args: snapshot, first index number kept, first ledger entry kept, (number, old entry)...; outcomes: ok, older
local function snapshot(keys, args)
  local stored = tonumber(redis.call('GETRANGE', keys[1], 4, 23)) or -1
  if stored > tonumber(string.sub(args[1], 5, 24)) then
    return 'older', tostring(stored)
  end
  redis.call('SET', keys[1], args[1])
  for at = 4, #args, 2 do
    redis.call('HSET', keys[4], args[at], args[at + 1])
  end
  redis.call('XTRIM', keys[2], 'MINID', args[2] .. '-0')
  redis.call('XTRIM', keys[3], 'MINID', args[3] .. '-0')
end

-- Delete old entries. keys: old entries; args: numbers
local function drop(keys, args)
  for at = 1, #args do
    redis.call('HDEL', keys[1], args[at])
  end
end

-- All may run on a full server: payloads fill it, and SET of a payload is refused by Redis itself.
local function register(name, callback)
  redis.register_function{function_name = name, callback = callback, flags = {'allow-oom'}}
end

register('rb_publish', publish)
register('rb_count', count)
register('rb_lead', lead)
register('rb_resign', resign)
register('rb_append', for_leader(append))
register('rb_tickets', for_leader(tickets))
register('rb_done', for_leader(done))
register('rb_snapshot', for_leader(snapshot))
register('rb_drop', for_leader(drop))

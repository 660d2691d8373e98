#!lua name=replaybuftq1

-- Functions of the store of one TransferQueue. A piece is what one put wrote of one sample: one value, one record.
-- keys: state (session, number of changes), records, births, deaths, pieces of each index, checkpoints
-- first args: session of the caller, number of changes that it knows. Every function changes nothing if a newer session
-- took over ('fenced') or if the server holds less than the caller knows ('lost').

local function named(keys)
  return {state = keys[1], records = keys[2], births = keys[3], deaths = keys[4], at = keys[5], checkpoints = keys[6],
          value = string.gsub(keys[1], 'state$', 'v:')}
end

local function guarded(callback)
  return function(keys, args)
    local store = named(keys)
    local found = redis.call('HMGET', store.state, 'session', 'changes')
    local session, changes = tonumber(found[1] or 0), tonumber(found[2] or 0)
    if session < tonumber(args[1]) or changes < tonumber(args[2]) then
      return {'lost', session, changes}
    elseif session > tonumber(args[1]) then
      return {'fenced', session, changes}
    end
    local detail = callback(store, {unpack(args, 3)})
    return {'ok', session, tonumber(redis.call('HGET', store.state, 'changes') or 0), detail}
  end
end

local function change(store)
  return redis.call('HINCRBY', store.state, 'changes', 1)
end

-- Whether a kept checkpoint may name a piece. A checkpoint is 'low cut': the controller's copy was made after change
-- `low` and before change `cut`; '' = not finished.
local function is_kept(store, born, died)
  for _, range in ipairs(redis.call('HVALS', store.checkpoints)) do
    local low, cut = string.match(range, '^(%d+) (%d*)$')
    if died > tonumber(low) and (cut == '' or born <= tonumber(cut)) then
      return true
    end
  end
  return false
end

local function drop(store, id)
  redis.call('UNLINK', store.value .. id)
  redis.call('HDEL', store.records, id)
  redis.call('ZREM', store.births, id)
  redis.call('ZREM', store.deaths, id)
end

-- The sample is cleared: delete a piece, or only note its death while a checkpoint may name it.
local function retire(store, id)
  local born = redis.call('ZSCORE', store.births, id)
  if born and not redis.call('ZSCORE', store.deaths, id) then
    local died = change(store)
    if is_kept(store, tonumber(born), died) then
      redis.call('ZADD', store.deaths, died, id)
    else
      drop(store, id)
    end
  end
end

local function add_at(store, index, id)
  local ids = redis.call('HGET', store.at, index)
  redis.call('HSET', store.at, index, ids and ids .. ' ' .. id or id)
end

-- A key that is put again and again must not fill the server: of many pieces of one sample, retire the older ones whose
-- every field was put again. The newest stay, because the controller learns of a put after the store.
local MANY, NEWEST = 16, 8

local function prune(store, index)
  local pieces, covered, left = {}, {}, {}
  for id in string.gmatch(redis.call('HGET', store.at, index), '%S+') do
    table.insert(pieces, id)
  end
  if #pieces < MANY then
    return
  end
  for n = #pieces, 1, -1 do
    local is_needed = n > #pieces - NEWEST
    local record = redis.call('HGET', store.records, pieces[n])
    for field in pairs(record and cjson.decode(record)[5] or {}) do
      is_needed = is_needed or not covered[field]
      covered[field] = true
    end
    if is_needed then
      table.insert(left, 1, pieces[n])
    else
      retire(store, pieces[n])
    end
  end
  redis.call('HSET', store.at, index, table.concat(left, ' '))
end

-- args: id, index, record of each piece, whose values were written with a TTL. A piece that is there is a repeat.
local function publish(store, args)
  for n = 1, #args, 3 do
    if redis.call('EXISTS', store.value .. args[n]) == 0 then
      return redis.error_reply('NOVALUE ' .. args[n])
    end
  end
  for n = 1, #args, 3 do
    local id = args[n]
    redis.call('PERSIST', store.value .. id)
    if redis.call('HSETNX', store.records, id, args[n + 2]) == 1 then
      redis.call('ZADD', store.births, change(store), id)
      add_at(store, args[n + 1], id)
      prune(store, args[n + 1])
    end
  end
end

-- args: indexes whose samples are cleared
local function clear(store, args)
  for _, index in ipairs(args) do
    for id in string.gmatch(redis.call('HGET', store.at, index) or '', '%S+') do
      retire(store, id)
    end
    redis.call('HDEL', store.at, index)
  end
end

-- args: name of the checkpoint. One checkpoint is written at a time: unfinished ones were given up.
local function begin(store, args)
  local found = redis.call('HGETALL', store.checkpoints)
  for n = 1, #found, 2 do
    if string.match(found[n + 1], ' $') then
      redis.call('HDEL', store.checkpoints, found[n])
    end
  end
  redis.call('HSET', store.checkpoints, args[1], change(store) .. ' ')
end

-- args: name of the checkpoint, how many of the newest to keep
local function finish(store, args)
  local low = string.match(redis.call('HGET', store.checkpoints, args[1]) or '', '^(%d+) $')
  if low then
    redis.call('HSET', store.checkpoints, args[1], low .. ' ' .. change(store))
  end
  local found, lows = redis.call('HGETALL', store.checkpoints), {}
  for n = 1, #found, 2 do
    table.insert(lows, {tonumber(string.match(found[n + 1], '^%d+')), found[n]})
  end
  table.sort(lows, function(a, b) return a[1] > b[1] end)
  for n = tonumber(args[2]) + 1, #lows do
    redis.call('HDEL', store.checkpoints, lows[n][2])
  end
end

-- Delete dead pieces that no kept checkpoint names. args: death after which to look, how many to look at.
-- returns the last death looked at; '' = all were
local function collect(store, args)
  local found = redis.call('ZRANGE', store.deaths, '(' .. args[1], '+inf', 'BYSCORE', 'LIMIT', 0, args[2], 'WITHSCORES')
  for n = 1, #found, 2 do
    local born = redis.call('ZSCORE', store.births, found[n])
    if not born or not is_kept(store, tonumber(born), tonumber(found[n + 1])) then
      drop(store, found[n])
    end
  end
  return #found == 2 * tonumber(args[2]) and found[#found] or ''
end

-- A restored controller names these pieces; others belong to no index any more. They come in several calls, and the last
-- one replaces all indexes at once. args: '1' = first call, '1' = last call; id, index of each piece
local function adopt(store, args)
  local fresh = {at = store.at .. ':new'}
  if args[1] == '1' then
    redis.call('DEL', fresh.at)
  end
  for n = 3, #args, 2 do
    redis.call('ZREM', store.deaths, args[n])
    add_at(fresh, args[n + 1], args[n])
  end
  if args[2] == '1' then
    redis.call('DEL', store.at)
    if redis.call('EXISTS', fresh.at) == 1 then
      redis.call('RENAME', fresh.at, store.at)
    end
  end
  change(store)
end

-- args: ids
local function retire_all(store, args)
  for _, id in ipairs(args) do
    retire(store, id)
  end
end

-- Begin a session: all older ones are fenced.
local function open(keys, args)
  local store = named(keys)
  return {redis.call('HINCRBY', store.state, 'session', 1), tonumber(redis.call('HGET', store.state, 'changes') or 0),
          redis.call('HLEN', store.records)}
end

redis.register_function{function_name = 'rbtq1_open', callback = open}
redis.register_function{function_name = 'rbtq1_publish', callback = guarded(publish)}
redis.register_function{function_name = 'rbtq1_begin', callback = guarded(begin)}
redis.register_function{function_name = 'rbtq1_adopt', callback = guarded(adopt)}
-- These free memory, so a full server runs them too.
redis.register_function{function_name = 'rbtq1_clear', callback = guarded(clear), flags = {'allow-oom'}}
redis.register_function{function_name = 'rbtq1_finish', callback = guarded(finish), flags = {'allow-oom'}}
redis.register_function{function_name = 'rbtq1_collect', callback = guarded(collect), flags = {'allow-oom'}}
redis.register_function{function_name = 'rbtq1_retire', callback = guarded(retire_all), flags = {'allow-oom'}}

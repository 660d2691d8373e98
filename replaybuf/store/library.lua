#!lua name=replaybuf1

-- The newest fencing token; '' if there is none, as in an emptied Redis.
local function newest_fence(key)
  return redis.call('GET', key) or ''
end

-- Number of an entry of a stream; 0 without an entry.
local function number_of(entry)
  return entry and tonumber(string.match(entry[1], '^%d+')) or 0
end

-- Numbers of the newest ledger entry and of the newest group, and the key of that entry ('' = it has none).
local function read_ends(run)
  local counts = redis.call('HMGET', run.counts, 'entries', 'stored', 'entry_key')
  return tonumber(counts[1] or 0), tonumber(counts[2] or 0), counts[3] or ''
end

-- Whether ledger entry `known` of the caller is in the ledger under its key ('' = unknown). `newest`, `newest_key`: what
-- Redis holds. A caller that is behind may know a trimmed entry: then it cannot be compared.
local function holds_entry(run, known, key, newest, newest_key)
  if key == '' or newest <= known then
    return newest >= known and (key == '' or key == newest_key)
  end
  local entry = redis.call('XRANGE', run.ledger, known .. '-0', known .. '-0')[1]
  return not entry or entry[2][4] == key
end

-- Whether group `known` of the caller is in the index, under the payload key `key` ('' = unknown).
-- A follower's newest group may be trimmed: then the first entry after it is newer. Trimming keeps the newest group.
local function holds_group(run, known, key)
  local entry = redis.call('XRANGE', run.index, known .. '-0', '+', 'COUNT', 1)[1]
  if key == '' or number_of(entry) ~= known then
    return number_of(entry) >= known
  end
  return string.find(entry[2][4] or '', key, 1, true) ~= nil
end

-- How long a caller's ends are kept that Redis lacks. Living servers show theirs at least once a second.
local LOST_MS = 30000

-- Return the ends that another caller has shown; nil without any, or if Redis knows that run to be deleted.
local function read_shown(run, incarnation)
  local shown = run.shown ~= '' and redis.call('GET', run.lost) or ''
  local its_incarnation, entry, entry_key, group, key = string.match(shown, '^(%d+) (%d+):(%d*) (%d+) (.*)$')
  if its_incarnation and tonumber(its_incarnation) >= incarnation then
    return {
      incarnation = tonumber(its_incarnation), entry = tonumber(entry), entry_key = entry_key,
      group = tonumber(group), payload_key = key,
    }
  end
end

-- Return the further ends of `one` and `other`, each stream for itself; those of `one` if both are as far, unless only the
-- other one's key is known. Ends of a later incarnation are further.
local function furthest(one, other)
  if one.incarnation ~= other.incarnation then
    return one.incarnation > other.incarnation and one or other
  end
  local entry, group = one, one
  if other.entry > one.entry or other.entry == one.entry and one.entry_key == '' then
    entry = other
  end
  if other.group > one.group or other.group == one.group and one.payload_key == '' then
    group = other
  end
  return {
    incarnation = one.incarnation, entry = entry.entry, entry_key = entry.entry_key,
    group = group.group, payload_key = group.payload_key,
  }
end

-- Whether Redis holds less than is known: fewer entries or groups, another one under a known number, or a run whose
-- deletion it does not know.
local function holds_less(run, incarnation, known, entries, stored, entry_key)
  if known.entry == 0 and known.group == 0 then
    return false
  end
  return incarnation < known.incarnation or stored < known.group
    or not holds_entry(run, known.entry, known.entry_key, entries, entry_key)
    or known.group > 0 and not holds_group(run, known.group, known.payload_key)
end

-- When a server first asked this process of Redis for leases or to write; 0 if it had no data. It is not stored: a restart
-- begins anew. Reads do not count: one connection may read before its server can use the others.
local serving_since_ms
-- The replication id under which it did. A global outlives a demotion, but each promotion gives a primary another id.
local serving_as
-- Runs that began just after that: no older copy has them.
local new_runs = {}
-- Time that every living server has to show what it knows, before the lead changes.
local SETTLE_MS = 2000
-- Time before a run is written: a leader that does not know the newest groups of the others must not go on without
-- them. A server that knows more notices it when it renews its leases, twice a second, and shows its ends.
local UNWRITTEN_MS = 1000
local LOOK_MS = 500

local function now_ms()
  local time = redis.call('TIME')
  return 1000 * time[1] + math.floor(time[2] / 1000)
end

local function replication_id()
  return string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
end

local function begin_serving()
  if not serving_since_ms then
    serving_since_ms, serving_as = redis.call('DBSIZE') > 0 and now_ms() or 0, replication_id()
  end
end

-- Return for how long nobody may take the lead, because this Redis may be an older one.
local function settles_in_ms()
  local id = replication_id()
  if id ~= serving_as then
    serving_since_ms, serving_as, new_runs = now_ms(), id, {}
  end
  serving_since_ms = math.min(serving_since_ms, now_ms()) -- the clock of Redis was set back
  return serving_since_ms + SETTLE_MS - now_ms()
end

-- Return for how long no run may be written. The replication id, which takes long to read, is read twice a second: to
-- become a replica and a primary again takes longer.
local looked_ms = 0
local function writes_in_ms()
  local now = now_ms()
  if math.abs(now - looked_ms) > LOOK_MS then
    looked_ms = now
    return settles_in_ms() - SETTLE_MS + UNWRITTEN_MS
  end
  return serving_since_ms + UNWRITTEN_MS - now
end

-- Wrap a function of one run: it changes nothing if Redis holds less than any caller knows to be stored (an older
-- copy, an emptied Redis, another history), if the caller knows a run of this name that was deleted since, or if a newer
-- leader exists.
-- first keys: fence, ledger, index, group ids, counts, lost, incarnation
-- first args: fencing token ('' = not a leader), ledger entry, its key, group, its payload key and incarnation that the
-- caller knows, '1' to show these ends to other callers ('' if Redis is private or may lose its last second)
-- returns {'older', newest entry, newest group, incarnation, known entry, known group, its payload key, known
-- incarnation, key of the known entry}, {'replaced', incarnation}, {'fenced', newest token}, or the callback's
-- {outcome, detail, incarnation}
local function guarded(callback)
  return function(keys, args)
    local run = {}
    for _, name in ipairs({'fence', 'ledger', 'index', 'ids', 'counts', 'lost', 'incarnation'}) do
      run[name] = table.remove(keys, 1)
    end
    for _, name in ipairs({'token', 'entry', 'entry_key', 'group', 'payload_key', 'known_incarnation', 'shown'}) do
      run[name] = table.remove(args, 1)
    end
    local incarnation = tonumber(redis.call('GET', run.incarnation) or 0)
    if tonumber(run.known_incarnation) < incarnation and (run.entry ~= '0' or run.group ~= '0') then
      return {'replaced', incarnation}
    end
    local entries, stored, entry_key = read_ends(run)
    local own, shown = {
      incarnation = tonumber(run.known_incarnation), entry = tonumber(run.entry), entry_key = run.entry_key,
      group = tonumber(run.group), payload_key = run.payload_key,
    }, read_shown(run, incarnation)
    if holds_less(run, incarnation, own, entries, stored, entry_key)
      or shown and holds_less(run, incarnation, shown, entries, stored, entry_key) then
      local known = shown and furthest(own, shown) or own
      if run.shown ~= '' and entries > 0 then -- for callers that know less; a deleted run has no entries
        local entry = known.entry .. ':' .. known.entry_key
        local ends = {known.incarnation, entry, known.group, known.payload_key}
        redis.call('SET', run.lost, table.concat(ends, ' '), 'PX', LOST_MS)
      end
      return {
        'older', entries, stored, incarnation, known.entry, known.group, known.payload_key, known.incarnation,
        known.entry_key,
      }
    end
    local newest = run.token ~= '' and newest_fence(run.fence) or ''
    if newest ~= run.token then
      return {'fenced', newest}
    end
    local outcome, detail = callback(keys, args, run, entries)
    return {outcome or 'ok', detail or '', incarnation}
  end
end

-- Wrap a function that writes: it changes no run just after a start or promotion of a Redis that several servers use,
-- but for runs that began since then.
local function writing(callback)
  return guarded(function(keys, args, run, entries)
    begin_serving()
    local left_ms = run.shown ~= '' and writes_in_ms() or 0
    if left_ms > 0 and entries == 0 then
      new_runs[run.ledger] = true
    elseif left_ms > 0 and not new_runs[run.ledger] then
      return 'starting', left_ms
    end
    return callback(keys, args, run)
  end)
end

-- Wrap a function that any server may call: it changes nothing in a deleted run, even for a server that has forgotten
-- what it knew of that run. Nobody would delete its keys again. first key: mark
local function kept(callback)
  return writing(function(keys, args, run)
    if redis.call('EXISTS', table.remove(keys, 1)) == 1 then
      return 'replaced', tonumber(redis.call('GET', run.incarnation) or 0)
    end
    return callback(keys, args, run)
  end)
end

-- Wrap a function that only a leader may call: it changes nothing without a token.
local function led(callback)
  return writing(function(keys, args, run)
    if run.token == '' then
      return 'fenced', newest_fence(run.fence)
    end
    return callback(keys, args, run)
  end)
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

-- Number of the newest ledger entry that changed what groups are checked against.
local function newest_rules(run)
  return tonumber(redis.call('HGET', run.counts, 'rules') or 0)
end

-- Put groups into the index, each unless its id, or its ticket's prompt, already has a group.
-- keys of each group: trimmed prompts of the id's adapter, and of the ticket's, payload (unless it has another slot)
-- args of each group: id, id of the ticket's prompt or '', numbers, strings, prompt index of the first id and of the
-- second, or ''
-- args behind these: newest ledger entry that the groups were checked against; direct writers check nothing
-- detail of each group: 1, number; 0, number of the first group (0 if its history is trimmed), and the payload is
-- deleted; -1, 0 if there is no payload: the server had no memory for it
-- outcomes: ok; outdated_check: nothing is stored, a later entry changed what groups are checked against
-- `before`: args in front of these
local function put_groups(keys, args, run, keys_each, before)
  local published = {}
  if (#args - before) % 6 == 1 and tonumber(table.remove(args)) < newest_rules(run) then
    return 'outdated_check', ''
  end
  for at = 0, (#args - before) / 6 - 1 do
    local done, prompt_done, payload = unpack(keys, keys_each * at + 1, keys_each * (at + 1))
    local id, prompt, numbers, strings, bit, prompt_bit = unpack(args, before + 6 * at + 1, before + 6 * at + 6)
    local has_prompt = prompt ~= '' and prompt ~= id
    local outcome, number = 0, find_number(run.ids, id, done, bit)
    if not number and has_prompt then
      number = find_number(run.ids, prompt, prompt_done, prompt_bit)
    end
    if number then
      if payload then
        redis.call('UNLINK', payload)
      end
    elseif payload and redis.call('PERSIST', payload) == 0 then
      outcome, number = -1, 0
    else
      outcome, number = 1, redis.call('HINCRBY', run.counts, 'stored', 1)
      redis.call('XADD', run.index, number .. '-0', 'n', numbers, 's', strings)
      redis.call('HSET', run.ids, id, number)
      if has_prompt then
        redis.call('HSET', run.ids, prompt, number)
      end
    end
    published[2 * at + 1], published[2 * at + 2] = outcome, number
  end
  return 'ok', published
end

local function publish(keys, args, run)
  return put_groups(keys, args, run, 3, 0)
end

-- The same for payloads in buckets of a cluster, which are durable already. An attempt that began before the last two
-- rounds is refused: its payloads may be deleted.
-- keys: those of `publish`, what is published of the buckets
-- args: round in which the attempt began, number of buckets, (bucket, its payloads ever written, how many of the newest
-- are of this attempt; 0 = may be lost, places of its groups from 0)..., those of `publish`
-- outcomes: ok, with the newest round as the last detail; outdated, with it as the detail; taken, with a bucket: a number
-- of this attempt is published already, so the bucket has lost a payload since
-- Numbers of groups that are stored already are not published: their payloads are not acknowledged.
local function publish_stored(keys, args, run)
  local buckets, count = keys[#keys], tonumber(args[2])
  local newest = tonumber(redis.call('HGET', run.counts, 'round') or 0)
  if tonumber(args[1]) < newest - 1 then
    return 'outdated', newest
  end
  for at = 3, 4 * count, 4 do
    local written, known = tonumber(args[at + 1]), tonumber(redis.call('HGET', buckets, args[at]) or 0)
    if known <= written and known > written - tonumber(args[at + 2]) then
      return 'taken', tonumber(args[at])
    end
  end
  local outcome, published = put_groups(keys, args, run, 2, 2 + 4 * count)
  if outcome ~= 'ok' then
    return outcome, published
  end
  for at = 3, 4 * count, 4 do
    local behind -- how many payloads of the attempt come behind its last stored one
    for place in string.gmatch(args[at + 3], '%d+') do
      behind = published[2 * place + 1] == 1 and 0 or behind and behind + 1
    end
    local number = behind and args[at + 1] - behind
    if number and number > tonumber(redis.call('HGET', buckets, args[at]) or 0) then
      redis.call('HSET', buckets, args[at], string.format('%d', number))
    end
  end
  published[#published + 1] = newest
  return outcome, published
end

-- Begin a round of append attempts; returns its number. Attempts of the one before may still be published.
local function begin_round(keys, args, run)
  return 'ok', redis.call('HINCRBY', run.counts, 'round', 1)
end

-- The score of a note is the round, and as its fraction the last 30 bits of the payload's number in the bucket.
local NUMBERS = 2 ^ 30

-- Note append attempts in a bucket of a cluster, before their payloads are written to it.
-- keys: attempts, written; args: how many payloads the bucket is known to have had, round, key of each payload
-- returns {1, how many payloads it has had now}, or {0, how many} and changes nothing, if that is less than known
local function note(keys, args)
  local written = tonumber(redis.call('GET', keys[2]) or 0)
  if written < tonumber(args[1]) then
    return {0, written}
  end
  for at = 3, #args do
    redis.call('ZADD', keys[1], args[2] + (written + at - 2) % NUMBERS / NUMBERS, args[at])
  end
  redis.call('SET', keys[2], written + #args - 2)
  return {1, written + #args - 2}
end

-- Take back append attempts that hide a loss: one of their payloads has a number that is published, so the payload that
-- had the number before is lost. A note is written and removed with its number, so it proves that the count includes it.
-- keys: attempts, written, payloads of the attempts in the order of their notes; args: published number
-- Only payloads whose numbers follow each other up to the published one, and on from there, are taken back.
-- returns how many payloads the bucket had before them, or -1 and changes nothing, if no payload has the number
local function take_back(keys, args)
  local published, taken, before, last = tonumber(args[1]) % NUMBERS, {}, -1, nil
  for at = 3, #keys do
    local score = redis.call('ZSCORE', keys[1], keys[at])
    local number = score and score * NUMBERS % NUMBERS
    if number and last and number ~= (last + 1) % NUMBERS then
      if before >= 0 then
        break
      end
      taken = {}
    end
    if number then
      taken[#taken + 1] = keys[at]
      last = number
      if number == published then
        before = args[1] - #taken
      end
    end
  end
  if before >= 0 then
    for _, payload in ipairs(taken) do
      redis.call('UNLINK', payload)
      redis.call('ZREM', keys[1], payload)
    end
    redis.call('INCRBY', keys[2], -#taken)
  end
  return before
end

-- Correct how many payloads a bucket has had; INCRBY itself is refused on a full server. keys: written; args: difference
local function correct_written(keys, args)
  return redis.call('INCRBY', keys[1], args[1])
end

-- Report the newest ledger entry, the newest group, and the key of that entry.
local function ends(keys, args, run)
  -- Errors for keys of another type: XREAD of the streams of many runs would fail for all of them.
  redis.call('XLEN', run.ledger)
  redis.call('XLEN', run.index)
  redis.call('HLEN', run.ids) -- only appends read it
  return 'ok', {read_ends(run)}
end

-- The same, with a write that changes nothing: the caller's wait for durability then covers all that it reads. A run
-- without entries has nothing to wait for, and may be deleted: it gets no key.
local function confirm(keys, args, run)
  local entries, stored, entry_key = read_ends(run)
  if entries > 0 then
    redis.call('HSET', run.counts, 'entries', entries)
  end
  return 'ok', {entries, stored, entry_key}
end

-- Append ledger entry `n` under a key: a random number of at most 18 digits, which identifies the history.
-- A repeat of the same entry is 'ok'. An entry that changes what groups are checked against notes the newest group then:
-- all later groups are checked against it.
-- keys: candidates; args: n, record, key, what the batch was chosen from or '', '1' if the entry changes these rules
-- outcomes: ok, taken, gap; detail: key of the entry and newest group, if noted; or number of the newest entry
local function append(keys, args, run)
  local n, id = tonumber(args[1]), args[1] .. '-0'
  local newest = number_of(redis.call('XREVRANGE', run.ledger, '+', '-', 'COUNT', 1)[1])
  if newest >= n then
    local stored = redis.call('XRANGE', run.ledger, id, id)[1]
    redis.call('SET', run.fence, run.token) -- a write: the caller's wait for durability then covers the stored entry
    if stored and stored[2][2] == args[2] then
      return 'ok', (stored[2][4] or '') .. ' ' .. (stored[2][6] or '')
    end
    return 'taken', tostring(newest)
  end
  if newest + 1 ~= n then
    return 'gap', tostring(newest)
  end
  local entry, group = {'r', args[2], 'k', args[3]}, ''
  if args[5] == '1' then
    group = select(2, read_ends(run))
    entry[5], entry[6] = 'g', group
    redis.call('HSET', run.counts, 'rules', n)
  end
  redis.call('XADD', run.ledger, id, unpack(entry))
  if args[4] and args[4] ~= '' then
    redis.call('XADD', keys[1], id, 'c', args[4])
  end
  redis.call('HSET', run.counts, 'entries', n, 'entry_key', args[3])
  return 'ok', args[3] .. ' ' .. group
end

-- Append ledger entry `n`, which adds late columns, and publish their frames. A repeat of the same entry is 'ok'.
-- keys of each column: of the attempt, of the column; args: n, record, key, name of each column
-- outcomes: those of append, and missing: the server had no memory for a frame
local function columns(keys, args, run)
  local first = number_of(redis.call('XREVRANGE', run.ledger, '+', '-', 'COUNT', 1)[1]) < tonumber(args[1])
  for at = 1, first and #keys or 0, 2 do
    if redis.call('EXISTS', keys[at]) == 0 then
      return 'missing'
    end
  end
  local outcome, detail = append({}, {args[1], args[2], args[3]}, run)
  for at = 1, first and outcome == 'ok' and #keys or 0, 2 do
    redis.call('RENAME', keys[at], keys[at + 1])
    redis.call('PERSIST', keys[at + 1])
    redis.call('HSET', run.counts, 'column:' .. args[3 + (at + 1) / 2], 1)
  end
  return outcome, detail
end

-- Record that a run is to be deleted. keys: mark; args: mark, which names this deletion
local function delete(keys, args)
  redis.call('SET', keys[1], args[1])
end

-- Delete keys of a deleted run, unless its mark has changed: another server has deleted all of them then, and the name
-- may belong to a restored run with the same keys.
-- keys: mark, keys to delete; args: mark as the caller read it; returns 1, or 0 if it has changed
local function erase(keys, args)
  if redis.call('GET', keys[1]) ~= args[1] then
    return 0
  end
  for at = 2, #keys do
    redis.call('UNLINK', keys[at])
  end
  return 1
end

-- Delete the last keys of a deleted run, count the deletion, and start the time after which its name is free.
-- keys: mark, names of runs, names of runs to delete, incarnation, keys; args: mark as the caller read it, run, time in s
-- returns 1, or 0 if the mark has changed
local function erase_last(keys, args)
  local runs, deleting, incarnation = table.remove(keys, 2), table.remove(keys, 2), table.remove(keys, 2)
  if erase(keys, args) == 0 then
    return 0
  end
  redis.call('INCR', incarnation)
  redis.call('SET', keys[1], 'deleted', 'EX', args[3])
  redis.call('SREM', runs, args[2])
  redis.call('SREM', deleting, args[2])
  return 1
end

-- Turn the mark of a restore that lost its lease before its run appeared into that of a deletion.
-- keys: mark, lead; args: mark as the caller read it, mark of the deletion; returns 1, or 0 if the restore goes on
local function abandon(keys, args)
  if redis.call('GET', keys[1]) ~= args[1] or redis.call('EXISTS', keys[2]) == 1 then
    return 0
  end
  redis.call('SET', keys[1], args[2])
  return 1
end

-- Give the lease to a holder; return its fencing token.
-- A token is a growing number and its holder, so that an emptied Redis does not accept tokens from before.
local function give_lead(run, lead, holder, ttl_ms)
  redis.call('SET', lead, holder, 'PX', ttl_ms)
  local before = tonumber(string.match(newest_fence(run.fence), '^%d+') or '0')
  local token = string.format('%d:%s', before + 1, holder)
  redis.call('SET', run.fence, token)
  return token
end

-- Take or renew the lease. keys: lead; args: holder, ttl in ms, '1' to take it from any holder
-- detail: 1, fencing token, newest ledger entry, newest group: no older leader adds to them; or 0, holder, ms left
local function lead(keys, args, run)
  begin_serving()
  local holder, entries, stored = redis.call('GET', keys[1]), read_ends(run)
  if holder == args[1] then
    redis.call('PEXPIRE', keys[1], args[2])
    return 'ok', {1, newest_fence(run.fence), entries, stored}
  end
  if holder and args[3] ~= '1' then
    if redis.call('PTTL', keys[1]) > tonumber(args[2]) then -- the clock of Redis was set back
      redis.call('PEXPIRE', keys[1], args[2])
    end
    return 'ok', {0, holder, redis.call('PTTL', keys[1])}
  end
  local left_ms = args[3] ~= '1' and entries > 0 and settles_in_ms() or 0
  if left_ms > 0 then
    return 'ok', {0, '', left_ms}
  end
  return 'ok', {1, give_lead(run, keys[1], args[1], args[2]), entries, stored}
end

-- Give the lead to another server, which alone can take it until the lease ends; the caller's later writes are fenced.
-- keys: lead; args: holder that is to lead, ttl in ms
-- outcomes: ok, settling: nobody may take the lead now
local function hand_over(keys, args, run)
  if settles_in_ms() > 0 then
    return 'settling'
  end
  give_lead(run, keys[1], args[1], args[2])
end

-- Renew the leases that the caller holds, read the others, and how far the streams reach: one call for many runs, which
-- changes nothing else and compares nothing.
-- keys: lead, counts and fence of each run; args: holder, ttl in ms, then for each run what the caller expects to read:
-- 'newest ledger entry, newest group, holder', or ''
-- returns a name of this process of Redis in its present role, the least time in ms that the leases as expected have
-- left, then for each other run: its place from 0, holder ('' = nobody, or a lease or fence of another type), ms left,
-- newest ledger entry, newest group
local function hold(keys, args)
  begin_serving()
  local ttl_ms = tonumber(args[2])
  local answers, least_ms = {replication_id() .. ':' .. serving_since_ms}, ttl_ms
  for at = 1, #keys, 3 do
    local place = (at - 1) / 3
    local holder, left_ms = redis.pcall('GET', keys[at]), 0
    local ends = redis.pcall('HMGET', keys[at + 1], 'entries', 'stored')
    if type(holder) ~= 'string' or type(redis.pcall('GET', keys[at + 2])) == 'table' then
      holder = ''
    else
      left_ms = holder == args[1] and ttl_ms or redis.call('PTTL', keys[at])
      if holder == args[1] or left_ms > ttl_ms then -- ours; or the clock of Redis was set back
        redis.call('PEXPIRE', keys[at], ttl_ms)
        left_ms = ttl_ms
      end
    end
    if (ends[1] or 0) .. ' ' .. (ends[2] or 0) .. ' ' .. holder == args[place + 3] then
      least_ms = math.min(least_ms, left_ms)
    else
      local entries, stored = tonumber(ends[1] or 0) or 0, tonumber(ends[2] or 0) or 0
      for _, answer in ipairs({place, holder, left_ms, entries, stored}) do
        answers[#answers + 1] = answer
      end
    end
  end
  table.insert(answers, 2, least_ms)
  return answers
end

-- Most servers that are announced: the others lead what they take, and nobody hands runs over to them.
local MOST_SERVERS = 256

-- Announce a server that lives, and forget those that have been silent for too long.
-- keys: servers; args: holder, release, ms of silence after which a server is forgotten
-- returns of each server, the caller first: holder, release, ms since it is announced, ms of silence
local function announce(keys, args)
  begin_serving() -- an announcement is no data of which this Redis could be an older copy
  local now, most_silent, count = now_ms(), tonumber(args[3]), 0
  local ahead = string.format('%.0f', tonumber(args[4]) - now) -- of the server's clock
  local own, others = {args[1], args[2], 0, 0, ahead}, {}
  local holders, values = redis.call('HKEYS', keys[1]), redis.call('HVALS', keys[1])
  for at, holder in ipairs(holders) do
    local since, seen, release, ahead_ms = string.match(values[at], '^(%d+) (%d+) (%S*) ?(-?%d*)$')
    -- The clock of Redis was set back if a time is in the future.
    local alive_ms, silent_ms = math.max(0, now - (since or 0)), math.max(0, now - (seen or 0))
    if silent_ms > most_silent then
      redis.call('HDEL', keys[1], holder)
    elseif holder == args[1] then
      own[3] = alive_ms
    else
      count = count + 1
      for _, part in ipairs({holder, release, alive_ms, silent_ms, ahead_ms}) do
        others[#others + 1] = part
      end
    end
  end
  if count < MOST_SERVERS then
    redis.call('HSET', keys[1], args[1], string.format('%.0f %.0f %s %s', now - own[3], now, args[2], ahead))
  end
  for _, part in ipairs(others) do
    own[#own + 1] = part
  end
  return own
end

-- Release the lease if the caller holds it. keys: lead; args: holder
local function resign(keys, args)
  if redis.call('GET', keys[1]) == args[1] then
    redis.call('DEL', keys[1])
  end
  return 1
end

-- Change tickets and counters. keys: tickets
-- args: number of tickets to drop, tickets, number to set, (ms left, ticket)..., (counter, increment)...
-- A deadline is of the clock of Redis: each server may have another one. 0 ms left: to be issued again.
local function tickets(keys, args, run)
  local drops = tonumber(args[1])
  for at = 2, drops + 1 do
    redis.call('ZREM', keys[1], args[at])
  end
  local counters = drops + 3 + 2 * tonumber(args[drops + 2])
  for at = drops + 3, #args, 2 do
    if at < counters then
      local left_ms = tonumber(args[at])
      redis.call('ZADD', keys[1], left_ms > 0 and string.format('%d', now_ms() + left_ms) or 0, args[at + 1])
    else
      redis.call('HINCRBY', run.counts, args[at], args[at + 1])
    end
  end
end

-- Replace the frame of a late column, unless it is another one by now. keys: column; args: frame that was read, frame
local function replace_column(keys, args)
  if redis.call('GET', keys[1]) == args[1] then
    redis.call('SET', keys[1], args[2])
    return 1
  end
  return 0
end

-- Return the clock of Redis in ms, and the tickets with their deadlines. keys: tickets
local function read_tickets(keys)
  return {string.format('%d', now_ms()), redis.call('ZRANGE', keys[1], 0, -1, 'WITHSCORES')}
end

-- Raise counters. args: (counter, increment)...
local function count(keys, args, run)
  for at = 1, #args, 2 do
    redis.call('HINCRBY', run.counts, args[at], args[at + 1])
  end
end

-- Replace payloads by the stubs of their files, each unless it is gone.
-- keys: spilled groups, payloads; args: URL, folder, (number, stub, bytes of the group that are then in files)...
-- outcomes: ok, other (files are in another folder); detail: 1 or 0 for each payload, or the other folder
local function spill(keys, args, run)
  local folder = redis.call('HGET', keys[1], 'folder')
  if not folder then
    redis.call('HSET', keys[1], 'url', args[1], 'folder', args[2])
  elseif folder ~= args[2] then
    return 'other', folder
  end
  local moved = {}
  for at = 2, #keys do
    local number, stub, bytes = unpack(args, 3 * at - 3, 3 * at - 1)
    moved[at - 1] = redis.call('SET', keys[at], stub, 'XX') and 1 or 0
    if moved[at - 1] == 1 then
      redis.call('HSET', keys[1], number, bytes)
    end
  end
  return 'ok', moved
end

-- Forget spilled groups that are freed. keys: spilled groups; args: numbers
local function forget(keys, args)
  redis.call('HDEL', keys[1], unpack(args))
end

-- Delete freed payloads. keys: payloads; args: ledger entry up to which all freed payloads are then deleted, or ''
local function free(keys, args, run)
  for at = 1, #keys do
    redis.call('UNLINK', keys[at])
  end
  if args[1] ~= '' then
    redis.call('HSET', run.counts, 'freed_through', args[1])
  end
end

-- Keep one bit per prompt that has a group, instead of the default id in the table of ids.
-- keys: trimmed prompts of the adapter
-- args: adapter, prefix of a prompt index in an id, (prompt index, number of its group)...
local function done(keys, args, run)
  -- Issued indexes only: the bitmap is as long as its highest index.
  local issued = tonumber(redis.call('HGET', run.counts, 'next:' .. args[1]) or 0)
  for at = 3, #args, 2 do
    local id = args[2] .. args[at]
    if tonumber(args[at]) < issued and redis.call('HGET', run.ids, id) == args[at + 1] then
      redis.call('SETBIT', keys[1], args[at], 1)
      redis.call('HDEL', run.ids, id)
    end
  end
end

-- Replace the snapshot and trim what it makes unnecessary, unless the stored snapshot is newer.
-- keys: snapshot, old entries, candidates
-- args: snapshot, first index number kept, first ledger entry kept, (number, old entry)...; outcomes: ok, newer
local function snapshot(keys, args, run)
  local stored = tonumber(redis.call('GETRANGE', keys[1], 4, 23)) or -1
  if stored > tonumber(string.sub(args[1], 5, 24)) then
    return 'newer', tostring(stored)
  end
  redis.call('SET', keys[1], args[1])
  for at = 4, #args, 2 do
    redis.call('HSET', keys[2], args[at], args[at + 1])
  end
  -- The newest group stays: it shows which history this is.
  local _, newest = read_ends(run)
  redis.call('XTRIM', run.index, 'MINID', math.min(args[2], newest) .. '-0')
  redis.call('XTRIM', run.ledger, 'MINID', args[3] .. '-0')
  redis.call('XTRIM', keys[3], 'MINID', args[3] .. '-0')
end

-- Delete old entries. keys: old entries; args: numbers
local function drop(keys, args)
  for at = 1, #args do
    redis.call('HDEL', keys[1], args[at])
  end
end

-- Append a result of an evaluation. keys: results; args: how many to keep, result
local function evaluate(keys, args)
  redis.call('XADD', keys[1], 'MAXLEN', args[1], '*', 'result', args[2])
end

-- Bytes that one step of samples counts for, beyond the samples: its name and its place in the hash.
local STEP_BYTES = 100
-- Most steps that one call deletes after a rewind; the samples of the next step delete more.
local MOST_UNDONE = 10000

-- Delete the samples of a step; return the bytes that they counted for.
local function drop_samples(key, step)
  local bytes = redis.call('HSTRLEN', key, step)
  return redis.call('HDEL', key, step) * (bytes + STEP_BYTES)
end

-- Keep the samples of a step, in place of those that it and later steps had before a rewind. The oldest steps go where
-- all are too large.
-- keys: samples; args: step, ledger entry of its batch, samples, most bytes of all
local function sample(keys, args, run)
  local step, kept = tonumber(args[1]), redis.call('HMGET', run.counts, 'sample_bytes', 'first_sample')
  local bytes = tonumber(kept[1] or 0) - drop_samples(keys[1], step) + #args[3] + STEP_BYTES
  for later = step + 1, step + MOST_UNDONE do
    local undone = drop_samples(keys[1], later)
    if undone == 0 then
      break
    end
    bytes = bytes - undone
  end
  redis.call('HSET', keys[1], step, args[3])
  local first = math.min(tonumber(kept[2] or step), step)
  while bytes > tonumber(args[4]) and first < step do
    bytes = bytes - drop_samples(keys[1], first)
    first = first + 1
  end
  -- Not below 0: a copy of the run may hold other samples than its counter says.
  redis.call('HSET', run.counts, 'sample_bytes', math.max(0, bytes), 'first_sample', first, 'sampled', args[2])
end

-- Set or forget a cursor of a reader. keys: cursors; args: name, cursor ('' = forget it)
local function cursor(keys, args)
  if args[2] == '' then
    redis.call('HDEL', keys[1], args[1])
  else
    redis.call('HSET', keys[1], args[1], args[2])
  end
end

-- Go on from what this Redis holds of a run, which is less than was acknowledged. As after a deletion of the run, whoever
-- knows more reads it again and writes nothing before. A Redis without the run has nothing to go on from.
-- keys: those of `guarded`, lead
-- args: newest entry and group here, incarnation, entry and group that are known, record, its key
-- returns the new incarnation, or 0 if these are other entries or groups, or another caller has shown that it knows more
local function accept_loss(keys, args)
  local run = {ledger = keys[2], index = keys[3], counts = keys[5], lost = keys[6], incarnation = keys[7]}
  local entries, stored = read_ends(run)
  if entries ~= tonumber(args[1]) or stored ~= tonumber(args[2]) then
    return 0
  end
  local shown = {string.match(redis.call('GET', run.lost) or '', '^(%d+) (%d+):%d* (%d+) ')}
  for at = 1, #shown do
    if tonumber(shown[at]) > tonumber(args[at + 2]) then
      return 0
    end
  end
  if entries > 0 then
    redis.call('XADD', run.ledger, (entries + 1) .. '-0', 'r', args[6], 'k', args[7])
    redis.call('HSET', run.counts, 'entries', entries + 1, 'entry_key', args[7])
  end
  local incarnation = math.max(tonumber(redis.call('GET', run.incarnation) or 0), tonumber(args[3])) + 1
  redis.call('SET', run.incarnation, incarnation)
  redis.call('UNLINK', run.lost, keys[8])
  return incarnation
end

-- Write keys of a run that is restored, and renew the lease. Nothing is written unless the caller still holds the lease
-- that it took, the run is not listed, and no older run of the name is being deleted.
-- keys: lead, names of runs, mark, key of each command
-- args: holder, ttl in ms, run, (command, number of words after its key, words...)...; returns {1, replies} or {0, {}}
local function restore(keys, args)
  local held, mark = redis.call('GET', keys[1]) == args[1], redis.call('GET', keys[3]) or ''
  if not held or redis.call('SISMEMBER', keys[2], args[3]) == 1 or string.find(mark, '^deleting') then
    return {0, {}}
  end
  redis.call('PEXPIRE', keys[1], args[2])
  local at, replies = 4, {}
  for number = 4, #keys do
    local last = at + 1 + tonumber(args[at + 1])
    replies[number - 3] = redis.call(args[at], keys[number], unpack(args, at + 2, last))
    at = last + 1
  end
  return {1, replies}
end

-- All may run on a full server: payloads fill it, and SET of a payload is refused by Redis itself.
local function register(name, callback)
  redis.register_function{function_name = name, callback = callback, flags = {'allow-oom'}}
end

register('rb_publish', kept(publish))
register('rb_publish_stored', kept(publish_stored))
register('rb_begin_round', led(begin_round))
register('rb_ends', guarded(ends))
register('rb_confirm', guarded(confirm))
register('rb_append', led(append))
register('rb_columns', led(columns))
register('rb_replace_column', replace_column)
register('rb_lead', guarded(lead))
register('rb_tickets', led(tickets))
register('rb_read_tickets', read_tickets)
register('rb_count', kept(count))
register('rb_free', led(free))
register('rb_spill', led(spill))
register('rb_forget', led(forget))
register('rb_done', led(done))
register('rb_accept_loss', accept_loss)
register('rb_snapshot', led(snapshot))
register('rb_drop', led(drop))
register('rb_evaluate', kept(evaluate))
register('rb_sample', led(sample))
register('rb_cursor', led(cursor))
register('rb_note', note)
register('rb_take_back', take_back)
register('rb_correct_written', correct_written)
register('rb_hand_over', led(hand_over))
register('rb_hold', hold)
register('rb_announce', announce)
register('rb_resign', resign)
register('rb_delete', led(delete))
register('rb_erase', erase)
register('rb_erase_last', erase_last)
register('rb_abandon', abandon)
redis.register_function('rb_restore', restore) -- refused on a full server, as SET of a payload is

"""Every Redis key of replaybuf, with its type and lifetime.

| key                          | type   | lifetime                   | content                                        |
|------------------------------|--------|----------------------------|------------------------------------------------|
| `rb:runs`                    | set    | forever                    | names of all runs                              |
| `rb:deleting`                | set    | until their keys are gone  | names of runs being deleted, or restored       |
| `rb:servers`                 | hash   | until a server is silent   | holder of its leases -> since, seen, release   |
| `rb:{run}:idx`               | stream | until trimmed              | one entry `<n>-0` per group, n = its number    |
| `rb:{run}:old`               | hash   | until the group is freed   | number -> entry that trimming had to keep      |
| `rb:{run}:gid`               | hash   | the run's                  | group_id -> number (deduplication)             |
| `rb:{run}:done:<adapter>`    | bitmap | the run's                  | prompt indexes whose id trimming removed       |
| `rb:{run}:led`               | stream | until trimmed              | the ledger, ids `<n>-0`, each with a key       |
| `rb:{run}:candidates`        | stream | until trimmed              | what each batch was chosen from, by entry       |
| `rb:{run}:snap`              | string | the run's                  | snapshot of the fold at a ledger entry         |
| `rb:{run}:evals`             | stream | newest 10,000 entries      | results of evaluations                         |
| `rb:{run}:samples`           | hash   | newest 16 MiB              | step -> rollouts that stay readable            |
| `rb:{run}:cursors`           | hash   | until forgotten            | name of a reader's cursor -> what is done      |
| `rb:{run}:spill`             | hash   | until the groups are freed | `url`, `folder`, number of each spilled group  |
| `rb:{run}:tickets`           | zset   | while a ticket is out      | ticket -> deadline in ms of Redis; 0 = again   |
| `rb:{run}:counts`            | hash   | the run's                  | counters; `entries`, `entry_key`, `stored`      |
| `rb:{run}:fence`             | string | the run's                  | fencing token of the leader                    |
| `rb:{run}:lead`              | string | lease                      | holder of the lease                            |
| `rb:{run}:lost`              | string | 30 s, then shown again     | known ends that this Redis lacks               |
| `rb:{run}:incarnation`       | string | forever                    | how often a run of this name was deleted       |
| `rb:{run}:deleted`           | string | a day after its keys went  | the run is deleted, the name is not free yet   |
| `rb:p:{run:group}:<nonce>`   | string | TTL until published        | frame of one group, or stub of a spilled one   |
| its payload's key`:<column>` | string | the payload's              | frame of one late column                       |

Under Redis Cluster a payload is in one of 64 buckets of its run, each of which has one slot:

| key                              | type   | lifetime                | content                                       |
|----------------------------------|--------|-------------------------|-----------------------------------------------|
| `rb:b:{run/NN}:<group>:<nonce>`  | string | until freed             | as `rb:p:`, without a TTL                     |
| `rb:{run/NN}:attempts`           | zset   | the run's               | keys not surely published -> round, number    |
| `rb:{run/NN}:written`            | string | the run's               | how many payloads were ever written           |
| `rb:{run}:buckets`               | hash   | the run's               | bucket -> `written`, as last published        |

All keys of a run except payloads share one hash tag, so one function can use them all. The nonce gives every append
attempt its own payload: a retry never touches published bytes. A late column is written under a key with a nonce of its
own too, and renamed when it is published.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterable, Sequence

import crc32c

RUNS = "rb:runs"
DELETING = "rb:deleting"
SERVERS = "rb:servers"
DEPLOYMENT = "rb:deployment"
ORPHAN_TTL_S = 3600
"""Lifetime of a payload without an index entry."""
BUCKETS = 64
"""Parts into which a cluster divides the payloads of a run, by the id of the group."""
NONCE_BYTES = 8


def _of_run(part: str) -> Callable[[str], str]:
    """Return a function that builds this key of a run."""
    return lambda run: f"rb:{{{run}}}:{part}"


# The table above says what each key holds.
index = _of_run("idx")
group_ids = _of_run("gid")
old_entries = _of_run("old")
snapshot = _of_run("snap")
ledger = _of_run("led")
candidates = _of_run("candidates")
evaluations = _of_run("evals")
samples = _of_run("samples")
cursors = _of_run("cursors")
spill = _of_run("spill")
tickets = _of_run("tickets")
counts = _of_run("counts")
fence = _of_run("fence")
lead = _of_run("lead")
lost = _of_run("lost")
incarnation = _of_run("incarnation")
deleted = _of_run("deleted")
buckets = _of_run("buckets")
no_names = _of_run("none")
"""Never exists: the place of a list that is in another slot."""


def prompts_done(run: str, adapter: str) -> str:
    """Build the key of the bitmap of prompts whose group is trimmed."""
    return f"rb:{{{run}}}:done:{adapter}"


def new_entry() -> int:
    """Build a new key for a ledger entry. Counters are whole numbers of at most 18 digits, and it is one of them."""
    return int(secrets.token_hex(7), 16)


@functools.lru_cache(maxsize=1024)
def guarded(run: str) -> tuple[str, ...]:
    """List the first keys of each function that works on one run, in the order of `library.lua`."""
    return (fence(run), ledger(run), index(run), group_ids(run), counts(run), lost(run), incarnation(run))


def all_of(run: str, adapters: Iterable[str]) -> list[str]:
    """List every key of a run, except its payloads and what stays when it is deleted."""
    control = (index, group_ids, old_entries, snapshot, ledger, tickets, counts, fence, lead, lost)
    one_each = (*control, candidates, evaluations, samples, cursors, spill, buckets)
    return [*(key(run) for key in one_each), *(prompts_done(run, adapter) for adapter in adapters)]


def payload(run: str, group_id: str) -> str:
    """Build a new key for the frame of one append attempt."""
    return payloads(run, [group_id])[0]


def payloads(run: str, group_ids: Sequence[str]) -> list[str]:
    """Build such a key for each of several groups."""
    nonces, size = secrets.token_hex(NONCE_BYTES * len(group_ids)), 2 * NONCE_BYTES
    names: list[str] = []
    for place, group_id in enumerate(group_ids):
        tag = f"{run}:{group_id}".replace("{", "(").replace("}", ")")
        names.append(f"rb:p:{{{tag}}}:{nonces[size * place : size * (place + 1)]}")
    return names


def bucket_of(group_id: str) -> int:
    """Return the bucket of a group."""
    return int(crc32c.crc32c(group_id.encode())) % BUCKETS


def payload_in_bucket(run: str, group_id: str) -> str:
    """Build a new key for the frame of one append attempt, in the bucket of its group."""
    return f"{_bucketed(run)}{bucket_of(group_id):02d}}}:{group_id}:{secrets.token_hex(NONCE_BYTES)}"


def bucket_of_payload(run: str, key: str) -> int | None:
    """Return the bucket of a payload or late column of a run; None if it is in no bucket."""
    prefix = _bucketed(run)
    return int(key[len(prefix) : len(prefix) + 2]) if key.startswith(prefix) else None


def group_of_payload(run: str, key: str) -> str:
    """Return the id of the group whose append attempt has this payload, in a bucket."""
    return key[len(_bucketed(run)) + len("NN}:") : -len(":") - 2 * NONCE_BYTES]


def attempts(run: str, bucket: int) -> str:
    """Build the key of the append attempts of a bucket that may not be published."""
    return f"rb:{{{run}/{bucket:02d}}}:attempts"


def written(run: str, bucket: int) -> str:
    """Build the key of the number of payloads that were ever written to a bucket."""
    return f"rb:{{{run}/{bucket:02d}}}:written"


def payload_prefixes(run: str) -> tuple[str, str]:
    """List how the keys of a run's payloads begin."""
    return named_payload(run, ""), _bucketed(run)


def _bucketed(run: str) -> str:
    return f"rb:b:{{{run}/"


def payload_name(run: str, key: str) -> str | None:
    """Return what follows the run in the key of one of its payloads, or the whole key of one in a bucket.

    None for any other key.
    """
    plain, bucketed = payload_prefixes(run)
    if key.startswith(bucketed):
        return key
    return key.removeprefix(plain) if key.startswith(plain) else None


def named_payload(run: str, name: str) -> str:
    """Build the key of a payload of a run from its name."""
    # No name of the first kind has a brace before that of its tag's end.
    return name if name.startswith(_bucketed(run)) else f"rb:p:{{{run}:{name}"


def late_column(payload_key: str, column: str) -> str:
    """Build the key of a late column of the group with this payload."""
    return f"{payload_key}:{column}"


def late_attempt(payload_key: str, column: str) -> str:
    """Build a new key for the frame of one attempt to add a late column."""
    return f"{late_column(payload_key, column)}:{secrets.token_hex(8)}"

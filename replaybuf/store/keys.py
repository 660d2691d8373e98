"""Every Redis key of replaybuf, with its type and its life.

| key                          | type   | life                       | content                                        |
|------------------------------|--------|----------------------------|------------------------------------------------|
| `rb:runs`                    | set    | for good                   | names of all runs                              |
| `rb:{run}:idx`               | stream | until trimmed              | one entry `<n>-0` per group, n = its number    |
| `rb:{run}:old`               | hash   | until the group is freed   | number -> entry, of few groups behind the trim |
| `rb:{run}:gid`               | hash   | of the run                 | group_id -> number (deduplication)             |
| `rb:{run}:done:<adapter>`    | bitmap | of the run                 | prompt indexes whose id left `gid` by trimming |
| `rb:{run}:led`               | stream | until trimmed              | the ledger, ids `<n>-0`                        |
| `rb:{run}:snap`              | string | of the run                 | snapshot of the fold at a ledger entry         |
| `rb:{run}:evals`             | stream | of the run, newest 10,000  | results of evaluations                         |
| `rb:{run}:tickets`           | zset   | while a ticket is out      | ticket -> deadline in ms; 0 = to issue again   |
| `rb:{run}:counts`            | hash   | of the run                 | counters; `next:<adapter>` = next prompt index |
| `rb:{run}:fence`             | string | of the run                 | fencing token of the leader                    |
| `rb:{run}:lead`              | string | lease                      | who leads                                      |
| `rb:p:{run:group}:<nonce>`   | string | TTL until it is published  | frame of one group                             |

The keys of a run but the payloads share one hash tag, so that one function may touch them all; payloads hash by group,
so a cluster spreads them. The nonce makes every attempt at an append its own payload: a retry never touches the bytes
of one that was published.
"""

from __future__ import annotations

import secrets

RUNS = "rb:runs"
ORPHAN_TTL_S = 3600
"""Life of a payload that no index entry points at yet."""


def index(run: str) -> str:
    """Stream of groups."""
    return f"rb:{{{run}}}:idx"


def group_ids(run: str) -> str:
    """Hash of deduplication."""
    return f"rb:{{{run}}}:gid"


def old_entries(run: str) -> str:
    """Hash of index entries that trimming removed from the stream and a group still needs."""
    return f"rb:{{{run}}}:old"


def prompts_done(run: str, adapter: str) -> str:
    """Bitmap of prompt indexes that have a group whose history is trimmed."""
    return f"rb:{{{run}}}:done:{adapter}"


def snapshot(run: str) -> str:
    """Snapshot of the fold."""
    return f"rb:{{{run}}}:snap"


def ledger(run: str) -> str:
    """Stream of decisions."""
    return f"rb:{{{run}}}:led"


def evaluations(run: str) -> str:
    """Stream of results of evaluations."""
    return f"rb:{{{run}}}:evals"


def tickets(run: str) -> str:
    """Sorted set of tickets by deadline."""
    return f"rb:{{{run}}}:tickets"


def counts(run: str) -> str:
    """Hash of counters."""
    return f"rb:{{{run}}}:counts"


def fence(run: str) -> str:
    """Fencing token of the leader."""
    return f"rb:{{{run}}}:fence"


def lead(run: str) -> str:
    """Lease of the leader."""
    return f"rb:{{{run}}}:lead"


def payload(run: str, group_id: str) -> str:
    """Build a fresh key for the frame of one attempt at an append."""
    tag = f"{run}:{group_id}".replace("{", "(").replace("}", ")")
    return f"rb:p:{{{tag}}}:{secrets.token_hex(8)}"

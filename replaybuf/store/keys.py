"""Every Redis key of replaybuf, with its type and its life.

| key                          | type   | life                       | content                                        |
|------------------------------|--------|----------------------------|------------------------------------------------|
| `rb:runs`                    | set    | for good                   | names of all runs                              |
| `rb:{run}:idx`               | stream | until trimmed              | one entry `<n>-0` per group, n = its number    |
| `rb:{run}:gid`               | hash   | of the run                 | group_id -> number (deduplication)             |
| `rb:{run}:led`               | stream | until trimmed              | the ledger, ids `<n>-0`                        |
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


def ledger(run: str) -> str:
    """Stream of decisions."""
    return f"rb:{{{run}}}:led"


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

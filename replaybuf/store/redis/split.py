"""A primary that restarted and has replicas of an older history: a failover would lose what it confirms. Pure."""

from __future__ import annotations

import re

from replaybuf.errors import counted

LINK_DOWN_FACTOR = 11
"""Ten times, and a first time until the primary counts as down."""
_FOLLOWS = re.compile(r"^slave\d+:.*\bstate=online,offset=[1-9]", re.MULTILINE)
"""A replica that has loaded what it got: until then its offset is 0."""


def find_split(info: str, *, replicas: int, down_after_s: float) -> str | None:
    """Return why a primary must not be used yet, by its reply to INFO: it restarted without its replicas.

    A restart begins a history with new, low offsets. A replica that has not synchronized since then keeps the higher
    offset of the old history, so a failover promotes it before one that confirmed newer writes. Sentinel promotes no
    replica whose link was down for ten times `down_after_s`, a cluster none whose link was down for ten times its node
    timeout and 10 s. `replicas`: those that are seen alive.
    """
    facts = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    up_s, window_s = int(facts["uptime_in_seconds"]), LINK_DOWN_FACTOR * down_after_s
    promoted = bool(facts["master_replid2"].strip("0"))
    following = len(_FOLLOWS.findall(info))
    if facts["role"] != "master" or promoted or up_s > window_s or following >= replicas:
        return None
    return (
        f"restarted {up_s} s ago, and {following} of {counted(replicas, 'replica')} follow it since then; one "
        f"that does not may be promoted without newer writes, for {window_s:g} s"
    )

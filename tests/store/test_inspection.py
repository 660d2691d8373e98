"""What nodes of a cluster say of themselves, taken together. Pure."""

from __future__ import annotations

import dataclasses

from replaybuf.store.redis.durability import ServerSettings
from replaybuf.store.redis.inspection import Inspection, find_faults

GOOD = ServerSettings(True, "always", False, "noeviction", waitaof=True, fails_over=True)


def node(port: int, version: str = "9.1.2", settings: ServerSettings = GOOD) -> Inspection:
    return Inspection(f"10.0.0.1:{port}", {"valkey_version": version, "redis_version": "7.2.4"}, settings)


def test_nodes_of_different_versions_are_named_with_one_of_each() -> None:
    """A replica of an older version would take over with other functions."""
    assert find_faults([node(1), node(2)]) == []
    (fault,) = find_faults([node(1), node(2), node(3, "8.0.1")])
    assert fault == "mixed versions: 10.0.0.1:2 has valkey 9.1.2, 10.0.0.1:3 has valkey 8.0.1"


def test_each_node_that_loses_data_is_named_with_its_setting() -> None:
    """A server that does not show a setting is not refused for it."""
    unknown = dataclasses.replace(GOOD, appendonly=None, policy=None)
    lossy = dataclasses.replace(GOOD, appendonly=False, policy="allkeys-lru")
    assert find_faults([node(1, settings=unknown)]) == []
    without_aof, evicting = find_faults([node(1), node(2, settings=lossy)])
    assert without_aof == "10.0.0.1:2: appendonly is 'no': set appendonly yes"
    assert evicting == "10.0.0.1:2: maxmemory-policy is 'allkeys-lru': set noeviction"

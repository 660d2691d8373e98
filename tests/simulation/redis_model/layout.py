"""Who serves which slot of a modelled cluster: shards of a primary and replicas, as one node knows them. Pure."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

from redis.crc import key_slot

from replaybuf.store.redis.cluster_map import SLOTS

SHARDS = 3
SHARE: int = -(-SLOTS // SHARDS)
FIRSTS: tuple[int, ...] = (*range(0, SLOTS, SHARE), SLOTS)
"""The first slot of each shard at the start, and the number of slots."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """One state of the cluster; a higher `version` is newer. A node is of the shard `number % SHARDS`, for ever.

    - `primaries`, `epochs`: number of the primary of each shard, and of its configuration
    - `moved`: slot -> shard, of slots that were moved
    - `failed`: nodes that most primaries miss
    - `replicas`: of each primary
    """

    version: int = 0
    primaries: tuple[int, ...] = tuple(range(SHARDS))
    epochs: tuple[int, ...] = tuple(range(1, SHARDS + 1))
    moved: Mapping[int, int] = dataclasses.field(default_factory=dict)
    failed: frozenset[int] = frozenset()
    replicas: int = 1
    _texts: dict[int, str] = dataclasses.field(default_factory=dict, init=False, compare=False)
    """What nodes answered, by number."""

    @property
    def nodes(self) -> range:
        """Numbers of all nodes."""
        return range((1 + self.replicas) * SHARDS)

    def shard_of(self, slot: int) -> int:
        """Return the shard that serves a slot."""
        return self.moved.get(slot, slot // SHARE)

    def owner_of(self, slot: int) -> int:
        """Return the number of the primary of a slot."""
        return self.primaries[self.shard_of(slot)]

    def is_primary(self, number: int) -> bool:
        """Return whether a node is the primary of its shard."""
        return self.primaries[number % SHARDS] == number

    def promote(self, number: int) -> Layout:
        """Let a replica be the primary of its shard."""
        return self._with_epoch(number % SHARDS, primaries=_replace(self.primaries, number % SHARDS, number))

    def move(self, slot: int, shard: int) -> Layout:
        """Let another shard serve a slot."""
        return self._with_epoch(shard, moved={**self.moved, slot: shard})

    def mark_failed(self, failed: frozenset[int]) -> Layout:
        """Let most primaries miss these nodes."""
        return dataclasses.replace(self, version=self.version + 1, failed=failed)

    def _with_epoch(self, shard: int, **changed: object) -> Layout:
        epochs = _replace(self.epochs, shard, max(self.epochs) + 1)
        return dataclasses.replace(self, version=self.version + 1, epochs=epochs, **changed)  # type: ignore[arg-type]

    def ranges(self, shard: int) -> list[str]:
        """Return the slots of a shard as CLUSTER NODES shows them."""
        left = [slot for slot in self.moved if FIRSTS[shard] <= slot < FIRSTS[shard + 1] and self.moved[slot] != shard]
        bounds = [FIRSTS[shard] - 1, *sorted(left), FIRSTS[shard + 1]]
        pairs = [(before + 1, after - 1) for before, after in itertools.pairwise(bounds)]
        pairs += [(slot, slot) for slot, own in self.moved.items() if own == shard and not _in(slot, shard)]
        return [f"{first}-{last}" if first < last else str(first) for first, last in pairs if first <= last]

    def describe(self, asked: int) -> str:
        """Return what node `asked` answers to CLUSTER NODES."""
        if asked not in self._texts:
            self._texts[asked] = "".join(f"{self._line(number, asked)}\n" for number in self.nodes)
        return self._texts[asked]

    def _line(self, number: int, asked: int) -> str:
        shard, primary = number % SHARDS, self.is_primary(number)
        flags = ["myself"] * (number == asked) + ["master" if primary else "slave"] + ["fail"] * (number in self.failed)
        host, port = address_of(number)
        own = [
            id_of(number),
            f"{host}:{port}@{port + 10_000}",
            ",".join(flags),
            "-" if primary else id_of(self.primaries[shard]),
            "0",
            "0",
            str(self.epochs[shard]),
            "connected",
            *(self.ranges(shard) if primary else ()),
        ]
        return " ".join(own)


def _in(slot: int, shard: int) -> bool:
    return FIRSTS[shard] <= slot < FIRSTS[shard + 1]


def _replace(numbers: tuple[int, ...], at: int, number: int) -> tuple[int, ...]:
    return (*numbers[:at], number, *numbers[at + 1 :])


def id_of(number: int) -> str:
    """Return the id of a node."""
    return f"{number:040x}"


def address_of(number: int) -> tuple[str, int]:
    """Return the host and port of a node."""
    return f"node-{chr(ord('a') + number)}", 7000 + number


slot_of = functools.lru_cache(maxsize=10_000)(key_slot)
"""Returns the slot of a key."""
KEYLESS = frozenset(
    [b"PING", b"INFO", b"CONFIG", b"FUNCTION", b"CLUSTER", b"ASKING", b"WAIT", b"WAITAOF", b"TIME", b"DBSIZE", b"ROLE"]
)
ALL_KEYS = frozenset([b"DEL", b"UNLINK", b"EXISTS", b"MGET"])
"""Commands whose words are all keys."""


def keys_of(words: Sequence[bytes]) -> Sequence[bytes]:
    """Return the keys of a command."""
    name = words[0].upper()
    if name in KEYLESS:
        return ()
    if name == b"FCALL":
        return words[3 : 3 + int(words[2])]
    if name == b"XREAD":
        names = words[[word.upper() for word in words].index(b"STREAMS") + 1 :]
        return names[: len(names) // 2]
    if name == b"RENAME":
        return words[1:3]
    return words[1:] if name in ALL_KEYS else words[1:2]

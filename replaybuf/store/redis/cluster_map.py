"""What the nodes of a cluster answer to CLUSTER NODES, and what their answers together mean. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from replaybuf.store.redis.sentinel_answers import Address

SLOTS = 16_384
_MOST_SHOWN = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One node, as another one sees it.

    - `failed`: most primaries miss it (`fail`), or the answering node does (`fail?`)
    - `epoch`: of its configuration; the owner of a slot is the claimant with the highest
    - `slots`: ranges of slots that it serves, first and last
    - `id`, `primary_id`: its name in the cluster, and that of the primary of a replica
    """

    address: Address
    primary: bool
    failed: bool
    epoch: int
    slots: tuple[tuple[int, int], ...]
    id: str = ""
    primary_id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterView:
    """What the nodes said last.

    - `owners`: the primary of each slot; None = nobody serves it
    - `primaries`: those that own slots; `replicas`: those that do not take writes
    - `down`: nodes that most of the asked miss
    - `trouble`: which slots cannot be used, and why; None if all can
    - `followers`: how many replicas of each primary are not down
    """

    owners: tuple[Address | None, ...] = (None,) * SLOTS
    primaries: tuple[Address, ...] = ()
    replicas: tuple[Address, ...] = ()
    down: frozenset[Address] = frozenset()
    trouble: str | None = None
    followers: Mapping[Address, int] = dataclasses.field(default_factory=dict)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All known nodes."""
        return self.primaries + self.replicas


def parse_nodes(text: str, asked: Address) -> list[Node]:
    """Parse a reply to CLUSTER NODES of the node at `asked`: a node that knows no address of its own has this host."""
    nodes = []
    for line in text.splitlines():
        node_id, where, flags, primary_id, _, _, epoch, _, *slots = line.split()
        host, _, port = where.partition(",")[0].partition("@")[0].rpartition(":")
        marks = flags.split(",")
        if "noaddr" in marks or "handshake" in marks:
            continue
        ranges = tuple(_parse_range(slot) for slot in slots if not slot.startswith("["))
        failed = "fail" in marks or "fail?" in marks
        address = host or asked[0], int(port)
        nodes.append(Node(address, "master" in marks, failed, int(epoch), ranges, node_id, primary_id))
    return nodes


def _parse_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def combine(answers: Sequence[Sequence[Node]], failure: str = "") -> ClusterView:
    """Combine what several nodes answered; `failure`: why the last one did not."""
    if not answers:
        return ClusterView(trouble=f"no node of the cluster answers{failure and f' ({failure})'}")
    owners: list[Address | None] = [None] * SLOTS
    starts = {0}
    """Slots at which the owner may change."""
    for node in sorted((node for answer in answers for node in answer), key=lambda node: node.epoch):
        for first, last in node.slots if node.primary else ():
            owners[first : last + 1] = [node.address] * (last + 1 - first)
            starts |= {first, last + 1}
    distinct = {owners[slot] for slot in starts if slot < SLOTS}
    missed = [node.address for answer in answers for node in answer if node.failed]
    known = sorted({node.address for answer in answers for node in answer})
    down = frozenset(address for address in known if missed.count(address) > len(answers) // 2)
    primaries = tuple(sorted(owner for owner in distinct if owner))
    replicas = tuple(address for address in known if address not in primaries)
    followers = _count_followers(answers, down)
    usable = distinct.isdisjoint({None, *down})
    trouble = None if usable else _find_trouble(owners, down)
    return ClusterView(tuple(owners), primaries, replicas, down, trouble, followers)


def _count_followers(answers: Sequence[Sequence[Node]], down: frozenset[Address]) -> dict[Address, int]:
    """Return the number of replicas of each primary that are not down, the highest of all answers."""
    most: Counter[Address] = Counter()
    for answer in answers:
        addresses = {node.id: node.address for node in answer}
        following = [node for node in answer if not node.primary and node.address not in down]
        most |= Counter(addresses[node.primary_id] for node in following if node.primary_id in addresses)
    return dict(most)


def _find_trouble(owners: Sequence[Address | None], down: frozenset[Address]) -> str:
    lacking = [
        f"{describe(slot for slot, owner in enumerate(owners) if owner == address)} of {name(address)}, which is down "
        "and has no successor yet"
        for address in sorted(down & set(owners))
    ]
    if None in owners:
        lacking.append(f"{describe(slot for slot, owner in enumerate(owners) if owner is None)}, which nobody owns")
    return f"the cluster does not serve {'; '.join(lacking)}"


def describe(slots: Iterable[int]) -> str:
    """Describe slots by their ranges: `slots 0-5460, 7000`."""
    ranges: list[list[int]] = []
    for slot in slots:
        if ranges and slot == ranges[-1][1] + 1:
            ranges[-1][1] = slot
        else:
            ranges.append([slot, slot])
    shown = [f"{first}-{last}" if first < last else str(first) for first, last in ranges[:_MOST_SHOWN]]
    return f"slots {', '.join(shown)}{', ...' if len(ranges) > _MOST_SHOWN else ''}"


def name(address: Address) -> str:
    """Return an address as text."""
    return f"{address[0]}:{address[1]}"

"""What the answers of cluster nodes mean together."""

from __future__ import annotations

from replaybuf.store.redis.cluster_map import Node, combine, describe, parse_nodes

A, B, C = ("10.0.0.1", 7000), ("10.0.0.2", 7000), ("10.0.0.3", 7000)
LINES = """\
a1 :7000@17000 myself,master - 0 0 1 connected 0-8000 8002 [8001->-b1]
b1 10.0.0.2:7000@17000,host master,fail - 0 0 2 connected 8001 8003-16383
c1 10.0.0.3:7000@17000 slave a1 0 0 1 connected
d1 :0@0 master,noaddr - 0 0 0 disconnected
"""


def node(address: tuple[str, int], epoch: int, *slots: tuple[int, int], failed: bool = False) -> Node:
    return Node(address, bool(slots), failed, epoch, slots)


def test_the_answer_of_a_node_names_all_nodes_with_an_address() -> None:
    """A node that knows no address of its own has the one that was asked."""
    assert parse_nodes(LINES, A) == [
        Node(A, True, False, 1, ((0, 8000), (8002, 8002)), "a1", "-"),
        Node(B, True, True, 2, ((8001, 8001), (8003, 16383)), "b1", "-"),
        Node(C, False, False, 1, (), "c1", "a1"),
    ]


def test_replicas_that_are_not_down_are_counted_for_each_primary() -> None:
    """A node that has not heard of a replica yet does not hide it."""
    known = parse_nodes(LINES, A)
    assert combine([known, known[:2]]).followers == {A: 1}
    assert combine([[*known[:2], Node(C, False, True, 1, (), "c1", "a1")]]).followers == {}


def test_the_newest_claim_of_a_slot_counts_and_not_the_majority() -> None:
    old = [node(A, 1, (0, 8191)), node(B, 2, (8192, 16383)), node(C, 0)]
    new = [node(A, 1, failed=True), node(B, 2, (8192, 16383)), node(C, 3, (0, 8191))]
    view = combine([old, old, new])
    assert (view.owners[0], view.owners[-1]) == (C, B)
    assert (view.primaries, view.replicas, view.trouble) == ((B, C), (A,), None)


def test_slots_without_an_owner_and_of_a_lost_primary_are_named() -> None:
    nodes = [node(A, 1, (0, 99), (200, 8191), failed=True), node(B, 2, (8192, 16383))]
    trouble = combine([nodes]).trouble
    assert trouble and "slots 0-99, 200-8191 of 10.0.0.1:7000, which is down" in trouble
    assert "slots 100-199, which nobody owns" in trouble
    assert combine([nodes, [*nodes[1:], node(A, 1, (0, 8191))], nodes[1:]]).down == frozenset()
    assert combine([]).trouble == "no node of the cluster answers"


def test_ranges_of_slots_are_short() -> None:
    assert describe([1, 2, 3, 7, 9, 11, 13]) == "slots 1-3, 7, 9, 11, ..."

"""Large containers are freed in pieces by a thread, so that freeing a batch does not hold the GIL."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from replaybuf.service.bodies import release
from replaybuf.service.bodies.assembly import FetchedGroups


class Item:
    """Records the thread that frees it, and counts what is freed."""

    freed: ClassVar[list[int | None]] = []
    all_freed = threading.Event()

    def __init__(self, of: int) -> None:
        self.of = of

    def __del__(self) -> None:
        Item.freed.append(threading.get_ident())
        if len(Item.freed) == self.of:
            Item.all_freed.set()


def freed_by(containers: list[Any]) -> set[int | None]:
    """Release the containers and return the threads that freed their items."""
    Item.freed, Item.all_freed = [], threading.Event()
    containers += [[Item(2 * release.SMALL + 2) for _ in range(release.SMALL + 1)]]
    containers += [{n: Item(2 * release.SMALL + 2) for n in range(release.SMALL + 1)}]
    fetched = FetchedGroups(containers[0], containers[1], {})
    containers.clear()
    del fetched
    assert Item.all_freed.wait(30)
    return set(Item.freed)


def test_the_groups_of_a_large_batch_are_freed_by_another_thread() -> None:
    """By the owner itself, 100,000 groups took 0.3 s at once."""
    assert threading.get_ident() not in freed_by([])


def test_a_small_batch_is_freed_at_once() -> None:
    Item.freed, Item.all_freed = [], threading.Event()
    items: Any = [Item(0) for _ in range(8)]
    fetched = FetchedGroups(items, {}, {})
    del items, fetched
    assert Item.freed == [threading.get_ident()] * 8


def test_a_container_is_emptied_in_pieces() -> None:
    """Between two pieces the interpreter may switch to the event loop."""
    items: release.Container = list(range(release.PIECE + 5))
    release._remove_piece(items)
    assert len(items) == 5
    table: release.Container = dict.fromkeys(range(release.PIECE + 5))
    release._remove_piece(table)
    assert len(table) == 5

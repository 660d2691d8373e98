"""Large containers are freed in pieces by a thread, so that freeing a batch does not hold the GIL."""

from __future__ import annotations

import threading
from typing import ClassVar

from replaybuf.service.bodies import release


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


def freed_by(size: int) -> set[int | None]:
    """Release a list and a table of so many items; return the threads that freed them."""
    Item.freed, Item.all_freed = [], threading.Event()
    containers: list[release.Container] = [
        [Item(2 * size) for _ in range(size)],
        {n: Item(2 * size) for n in range(size)},
    ]
    release.release(*containers)
    containers.clear()
    assert Item.all_freed.wait(30)
    return set(Item.freed)


def test_large_containers_are_freed_by_another_thread() -> None:
    """By their owner itself, those of a batch of 16,384 groups took 0.1 s at once."""
    assert threading.get_ident() not in freed_by(release.SMALL + 1)


def test_small_containers_are_freed_at_once() -> None:
    assert freed_by(8) == {threading.get_ident()}


def test_a_container_is_emptied_in_pieces() -> None:
    """Between two pieces the interpreter may switch to the event loop."""
    items: release.Container = list(range(release.PIECE + 5))
    release._remove_piece(items)
    assert len(items) == 5
    table: release.Container = dict.fromkeys(range(release.PIECE + 5))
    release._remove_piece(table)
    assert len(table) == 5

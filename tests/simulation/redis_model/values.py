"""Values of a modelled Redis: keys, lifetimes, and an undo log of what is not on the disk yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

Words = Sequence[bytes]
"""A command, or its arguments."""
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class NoModel(NotImplementedError):
    """A command, or an option of one, has no model yet: add it to the commands and to their contract test."""


class Stream(list[tuple[tuple[int, int], list[bytes]]]):
    """Entries of a stream: id, fields and values in turn. `last`: the highest id ever."""

    def __init__(self, entries: Any = (), last: tuple[int, int] = (0, 0)) -> None:
        super().__init__(entries)
        self.last = last

    def copy(self) -> Stream:
        """Copy the list; entries never change."""
        return Stream(self, self.last)


class SortedSet(dict[bytes, float]):
    """Members with their scores."""

    def copy(self) -> SortedSet:
        """Copy all members."""
        return SortedSet(self)


Value = bytes | dict[bytes, bytes] | set[bytes] | Stream | SortedSet
Saved = dict[bytes, tuple[Any, int | None]]
"""Values with their ends of life in ms of the server's clock."""


class Values:
    """All keys of a server. `write` must be called before a value changes. `replicas`: how many follow it.

    `_transactions`: for each write that is not on the disk, or that a replica lacks, what the keys held before. A
    transaction is a command or a function with all its commands, as in an append-only file.
    """

    def __init__(self, now_ms: Callable[[], int], *, replicas: int = 0) -> None:
        self.now_ms = now_ms
        self._synced = 0
        self.replicated = [0] * replicas
        """How many transactions since the start each replica has."""
        self._values: dict[bytes, Any] = {}
        self._ends_ms: dict[bytes, int] = {}
        self._transactions: list[list[tuple[bytes, Any, int | None]]] = []
        self._open: list[tuple[bytes, Any, int | None]] = []
        self.written = 0
        """Transactions since the start."""
        self.changes = 0
        """Counts the changes of keys and of their ends."""

    # ------------------------------------------------------------------ keys

    def get(self, key: bytes, kind: type[Any]) -> Any:
        """Return the value of a key, None without one. Raises `ResponseError` for another type."""
        if key in self._ends_ms:
            self._expire(key)
        value = self._values.get(key)
        if value is not None and type(value) is not kind:
            raise ResponseError(WRONG_TYPE)
        return value

    def peek(self, key: bytes) -> Any:
        """Return the value of a key, whatever it is."""
        if key in self._ends_ms:
            self._expire(key)
        return self._values.get(key)

    def write(self, key: bytes, kind: type[Any]) -> Any:
        """Return the value of a key to change it, a new empty one without a value."""
        value = self.get(key, kind)
        self._save(key)
        if value is None:
            value = self._values[key] = kind()
        elif not isinstance(value, bytes):
            value = self._values[key] = value.copy()  # the saved one stays as it is
        return value

    def put(self, key: bytes, value: Any, ends_ms: int | None) -> None:
        """Replace a value and its lifetime."""
        self._save(key)
        self._values[key] = value
        self.set_end(key, ends_ms)

    def keep_end(self, key: bytes, value: Any) -> None:
        """Replace a value, but not its lifetime."""
        self.put(key, value, self.end_of(key))

    def drop_empty(self, key: bytes) -> None:
        """Delete a container without content, as Redis does."""
        if not self._values.get(key):
            self._remove(key)

    def delete(self, key: bytes) -> bool:
        """Delete a key; return whether it was there."""
        if self.peek(key) is None:
            return False
        self._save(key)
        self._remove(key)
        return True

    def end_of(self, key: bytes) -> int | None:
        """Return when a key ends, in ms; None = never."""
        return self._ends_ms.get(key)

    def set_end(self, key: bytes, ends_ms: int | None) -> None:
        """Set or remove the end of a key. Call `write` or `touch` before."""
        if ends_ms is None:
            self._ends_ms.pop(key, None)
        else:
            self._ends_ms[key] = ends_ms

    def touch(self, key: bytes) -> None:
        """Note that the lifetime of a key changes."""
        self._save(key)

    def names(self) -> list[bytes]:
        """List the keys."""
        for key in list(self._ends_ms):
            self._expire(key)
        return list(self._values)

    def count(self) -> int:
        """Count the keys."""
        return len(self.names())

    def take(self, key: bytes) -> tuple[Any, int | None]:
        """Remove a key, as for another server; return its value and its end."""
        held = self._values[key], self._ends_ms.get(key)
        self.delete(key)
        self.commit()
        return held

    def _expire(self, key: bytes) -> None:
        end_ms = self._ends_ms.get(key)
        if end_ms is not None and end_ms <= self.now_ms():
            self._save(key)
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        self._values.pop(key, None)
        self._ends_ms.pop(key, None)

    # ------------------------------------------------------------------ durability

    def _save(self, key: bytes) -> None:
        self.changes += 1
        self._open.append((key, self._values.get(key), self._ends_ms.get(key)))

    def commit(self) -> bool:
        """End a transaction; return whether it wrote."""
        if not self._open:
            return False
        self._transactions.append(self._open)
        self._open = []
        self.written += 1
        return True

    def synced(self, through: int) -> None:
        """Record that the first `through` transactions since the start are on the disk."""
        self._synced = max(self._synced, through)
        self._forget_old()

    def replicate(self, replica: int, through: int) -> None:
        """Record that a replica has the first `through` transactions."""
        self.replicated[replica] = max(self.replicated[replica], through)
        self._forget_old()

    def _forget_old(self) -> None:
        everywhere = min(self._synced, *self.replicated) if self.replicated else self._synced
        del self._transactions[: len(self._transactions) - (self.written - everywhere)]

    @property
    def unsynced(self) -> int:
        """Count transactions that a crash may lose."""
        return self.written - self._synced

    def unreplicated(self, replica: int) -> int:
        """Count transactions that a replica lacks."""
        return self.written - self.replicated[replica]

    def lose(self, count: int) -> None:
        """Undo the last `count` transactions."""
        self.changes += 1
        self.written -= count
        self.replicated = [min(through, self.written) for through in self.replicated]
        for _ in range(count):
            for key, value, ends_ms in reversed(self._transactions.pop()):
                if value is None:
                    self._remove(key)
                else:
                    self._values[key] = value
                    self.set_end(key, ends_ms)

    def copy(self, lacking: int = 0) -> Saved:
        """Copy everything, without the last `lacking` transactions."""
        saved = {key: (_copy(value), self._ends_ms.get(key)) for key, value in self._values.items()}
        for transaction in reversed(self._transactions[len(self._transactions) - lacking :]):
            for key, value, ends_ms in reversed(transaction):
                if value is None:
                    saved.pop(key, None)
                else:
                    saved[key] = _copy(value), ends_ms
        return saved

    def load(self, saved: Saved) -> None:
        """Replace everything."""
        self.changes += 1
        self._values = {key: _copy(value) for key, (value, _) in saved.items()}
        self._ends_ms = {key: end for key, (_, end) in saved.items() if end is not None}
        self._transactions, self._open = [], []
        self._synced, self.replicated = self.written, [self.written] * len(self.replicated)


def _copy(value: Any) -> Any:
    return value if isinstance(value, bytes) else value.copy()

"""The store: every command replaybuf sends to Redis, a module per concern.

Nothing here decides anything. Calls are safe to repeat: a publish is recognised by group id, a ledger append by its
number, a payload has a key of its own per attempt. What goes wrong is told as in `connection`; besides, a lost lease
raises `NotLeader`, a Redis that forgot what it had acknowledged `DataLost`.

What only a leader may do is a function that checks its fencing token first (`library.lua`). These writes have no fence,
and do no harm from a leader that was held up, and goes on after another one took over:

    SET, PERSIST, UNLINK of a payload   its key is of one attempt at an append; to persist what is gone does nothing
    UNLINK of payloads that are freed   a fenced record freed them, and no later one brings a freed group back
    `freed_through` set                 it may go back: who leads next then deletes again what is gone already
    counters raised (`rb_count`)        they add up what each server did answer
    names of runs, evaluations          they only grow; the name "" that is taken out to see a write is never there
    `rb_lead`, `rb_resign`              they are asked by the holder, and compare him
"""

from __future__ import annotations

from typing import Any

from replaybuf.store.durability import STRICT, Wanted
from replaybuf.store.evaluations import EvaluationCommands
from replaybuf.store.groups import GroupCommands
from replaybuf.store.leases import LeaseCommands
from replaybuf.store.ledger import LedgerCommands
from replaybuf.store.snapshots import SnapshotCommands
from replaybuf.store.tickets import TicketCommands


class Store(GroupCommands, LedgerCommands, SnapshotCommands, TicketCommands, EvaluationCommands, LeaseCommands):
    """Commands on one Redis or Valkey server; see the module docstring. Build with `await Store.open(url)`."""

    @classmethod
    async def open(cls, url: str, wanted: Wanted = STRICT, **options: Any) -> Store:
        """Connect, check that the server is fit, load the function library; `options` are those of `Connection`.

        Raises `UnsupportedServer` for one that is too old, `ServiceUnavailable` where it cannot be reached.
        """
        store = cls(url, wanted, **options)
        try:
            await store.prepare()
        except BaseException:
            await store.close()
            raise
        return store

"""The journal of a run, where the order of two things decides."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from replaybuf.errors import DataLost
from replaybuf.service.run.journal import Journal
from replaybuf.store import Ends, Store
from replaybuf.store.durability import STRICT
from tests.builders import config_record


class Answering:
    """Stands for the store: its answer is on the way while the journal goes on."""

    def __init__(self) -> None:
        self.journal = Journal("r", cast(Store, self))
        self.grows = False
        self.connection = self.streams = self
        self.policy = STRICT

    async def read_end(self, run: str) -> Ends:
        """Tell where the streams end, as they are now."""
        reported = Ends(self.journal.state.entries, 0)
        if self.grows:
            self.journal.state.apply(reported.entry + 1, config_record())
        return reported


def test_a_write_during_the_check_of_the_ends_is_not_a_loss() -> None:
    """The answer is older than the write."""
    store = Answering()
    store.grows = True
    asyncio.run(store.journal.check_kept())
    assert store.journal.lost is None


def test_an_entry_known_before_the_check_is_missed() -> None:
    """A ledger that ends before it has lost something."""
    store = Answering()
    store.journal.state.apply(1, config_record())
    store.journal.state.apply(2, config_record())
    reported = Ends(1, 0)
    store.streams.read_end = lambda run: asyncio.sleep(0, reported)  # type: ignore[method-assign]
    with pytest.raises(DataLost, match="ledger ends at entry 1"):
        asyncio.run(store.journal.check_kept())
    assert store.journal.lost

"""The journal of a run: folding of what an append published."""

from __future__ import annotations

import asyncio
import time
from unittest import mock

import pytest

from replaybuf.errors import LedgerGap
from replaybuf.service.run.journal import Journal
from replaybuf.store import EmbeddedServer, Ends, Store, keys
from replaybuf.wire.ledger import AckRecord
from tests.builders import config_record
from tests.store.test_store import to_append


def test_published_groups_are_folded_in_order_with_those_that_others_published_between(server: EmbeddedServer) -> None:
    """A repeat of a group that is not folded yet, and groups of other producers, are read from the stream."""

    async def main() -> None:
        store, other = await Store.open(server.url), await Store.open(server.url)

        async def publish(writer: Store, *ids: str) -> None:
            results = await writer.groups.append("mixed", [to_append(name) for name in ids], {"": 0}, time.time())
            if writer is store:
                await journal.fold_published(results)

        try:
            journal = Journal("mixed", store)
            await publish(store, "a", "b")
            await publish(other, "c", "d")
            await publish(store, "e", "d", "f", "f")
            await publish(other, "g")
            await publish(store, "g", "a")
            ids = [strings.group_id for chunk in journal.unsettled for strings in chunk.strings]
            assert ids == ["a", "b", "c", "d", "e", "f", "g"]
            assert journal.ends.group == 7
            await journal.pull()
            assert journal.ends.group == 7
        finally:
            await store.close()
            await other.close()

    asyncio.run(main())


def test_nothing_of_a_run_is_read_of_which_nothing_is_confirmed(server: EmbeddedServer) -> None:
    """Another server is creating it, and Redis may still lose the first record: a server that read it would miss it."""

    async def main() -> None:
        store = await Store.open(server.url)

        async def read_confirmed_end(run: str) -> Ends:
            return Ends(0, 0)

        try:
            token = (await store.runs.take_lease("begins", "here", 60.0)).token
            await store.ledger.append("begins", str(token), 1, AckRecord(step=0, epoch=1))
            await store.groups.append("begins", [to_append("a")], {"": 0}, time.time())
            store.streams.read_confirmed_end = read_confirmed_end  # type: ignore[method-assign]
            journal = Journal("begins", store)
            await journal.load()
            await journal.pull()
            assert journal.ends == Ends(0, 0)
        finally:
            await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("moment", ["before the load", "within the load"])
def test_a_server_that_opens_a_run_knows_its_ends(server: EmbeddedServer, moment: str) -> None:
    """Also if it is deleted and restored meanwhile: else the server would notice neither a loss nor a deletion."""

    async def main() -> None:
        store, other, name = await Store.open(server.url), await Store.open(server.url), f"opened-{moment.split()[0]}"
        read = store.snapshots.read

        async def restore() -> None:
            await other.connection.client.incr(keys.incarnation(name))

        async def read_later(run: str) -> bytes | None:
            await restore()
            return await read(run)

        try:
            token = (await other.runs.take_lease(name, "here", 60.0)).token
            await other.ledger.append(name, str(token), 1, config_record())
            await store.runs.exists(name)
            journal = Journal(name, store)
            if moment == "before the load":
                await restore()
                await journal.load()
            else:
                with mock.patch.object(store.snapshots, "read", read_later), pytest.raises(LedgerGap, match=name):
                    await journal.load()
                journal = Journal(name, store)
                await journal.load()
            known = store.connection.known.of(name)
            assert (known.entry, known.incarnation) == (1, 1)
        finally:
            await store.close()
            await other.close()

    asyncio.run(main())

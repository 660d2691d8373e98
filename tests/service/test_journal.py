"""The journal of a run: folding of what an append published."""

from __future__ import annotations

import asyncio
import time

from replaybuf.service.run.journal import Journal
from replaybuf.store import EmbeddedServer, Store
from tests.store.test_store import to_append


def test_published_groups_are_folded_in_order_with_those_that_others_published_between(server: EmbeddedServer) -> None:
    """A repeat of a group that is not folded yet, and groups of other producers, are read from the stream."""

    async def main() -> None:
        store, other = await Store.open(server.url), await Store.open(server.url)

        async def publish(writer: Store, *ids: str) -> None:
            results = await writer.groups.append("mixed", [to_append(name) for name in ids], {"": 0}, time.time())
            if writer is store:
                await journal.ingest(results)

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

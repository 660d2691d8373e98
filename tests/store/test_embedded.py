"""The embedded Valkey by itself: where its folder may lie, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from replaybuf.errors import ServiceUnavailable
from replaybuf.store import EmbeddedServer, Store
from tests.store.test_store import to_append


@pytest.mark.parametrize("name", ["with space", "quo'te\"s", "per%20cent?#", "ümlaut", "long " * 30])
def test_a_data_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    """What is stored in it is there after a restart."""

    async def main() -> None:
        for stored in (True, False):
            embedded = EmbeddedServer(tmp_path / name)
            await embedded.start()
            store = await Store.open(embedded.url)
            try:
                (result,) = await store.append("r", [to_append("a")], 0, time.time())
                assert (result.stored, result.number) == (stored, 1)
            finally:
                await store.close()
                await embedded.stop()

    asyncio.run(main())


def test_a_server_that_does_not_start_is_told_with_its_own_last_words(tmp_path: Path) -> None:
    """Here its append-only file is broken."""
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("no manifest\n")

    async def main() -> None:
        embedded = EmbeddedServer(tmp_path)
        with pytest.raises(ServiceUnavailable, match=r"ended with exit code 1.*manifest"):
            try:
                await embedded.start()
            finally:
                await embedded.stop()

    asyncio.run(main())

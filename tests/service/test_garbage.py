"""Full garbage collections happen at times of our choice: they visit every group of a large batch."""

from __future__ import annotations

import asyncio
import gc
import weakref
from unittest.mock import patch

from replaybuf.service import garbage
from replaybuf.service.garbage import collect_garbage


class Cycle:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.own = self


def test_python_starts_no_full_collection_while_the_service_works() -> None:
    before = gc.get_threshold()

    async def main() -> None:
        collecting = asyncio.create_task(collect_garbage())
        await asyncio.sleep(0)
        assert gc.get_threshold() == (*before[:2], garbage.NEVER)
        collecting.cancel()
        await asyncio.wait([collecting])

    asyncio.run(main())
    assert gc.get_threshold() == before


def test_garbage_of_long_life_is_collected_after_a_while() -> None:
    async def main() -> None:
        cycle = Cycle()
        gone = asyncio.Event()
        reference = weakref.ref(cycle, lambda _: gone.set())
        gc.collect(1)  # it is old now
        del cycle
        with patch.object(garbage, "PERIOD_S", 0.0):
            collecting = asyncio.create_task(collect_garbage())
            await asyncio.wait_for(gone.wait(), 30)
        assert reference() is None
        collecting.cancel()

    asyncio.run(main())

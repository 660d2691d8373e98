"""Group commit: concurrent appends share writes, and each caller gets its own results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from replaybuf.errors import NoRoom, NotLeader, ReplaybufError
from replaybuf.service.run.append.group_commit import APPEND_CHUNK, GroupCommit
from replaybuf.store import AppendResult, PendingGroup
from replaybuf.store.chunks import CHUNK_BYTES
from tests.store.test_store import to_append
from tests.waiting import until


class Disk:
    """Stands for the store: keeps each write until it is released. Ids in `full` meet a full server."""

    def __init__(self) -> None:
        self.writes: list[list[str]] = []
        self.checked_at: list[int] = []
        self.full: set[str] = set()
        self.error: ReplaybufError | None = None
        self.free = asyncio.Event()

    async def write(self, items: list[PendingGroup], checked_at: int) -> list[AppendResult]:
        """Answer as the store does."""
        self.writes.append([item.group_id for item in items])
        self.checked_at.append(checked_at)
        await self.free.wait()
        if self.error:
            raise self.error
        if self.full & set(self.writes[-1]):
            raise NoRoom("full", name="maxmemory")
        return [AppendResult(item.group_id, True, len(self.writes)) for item in items]


def on_a_disk(work: Callable[[Disk, GroupCommit], Awaitable[None]]) -> None:
    """Run `work` on a new disk, whose first write is held."""

    async def main() -> None:
        disk = Disk()
        await work(disk, GroupCommit(disk.write))

    asyncio.run(main())


def start(commit: GroupCommit, *ids: str, checked_at: int = 3, nbytes: int = 0) -> asyncio.Task[list[AppendResult]]:
    """Append groups as one caller."""
    items = [to_append(name) for name in ids]
    if nbytes:
        items = [PendingGroup(item.group, item.group_id, "", bytes(nbytes), 0) for item in items]
    return asyncio.create_task(commit.append(items, checked_at))


def test_a_caller_alone_is_written_at_once_and_those_who_come_meanwhile_together() -> None:
    """Eight callers take two writes; each gets the results of its own groups."""

    async def work(disk: Disk, commit: GroupCommit) -> None:
        callers = [start(commit, "first")]
        await until(lambda: disk.writes)
        callers += [start(commit, f"a{n}", f"b{n}") for n in range(7)]
        await asyncio.sleep(0)
        disk.free.set()
        results = await asyncio.gather(*callers)
        assert len(disk.writes) == 2
        expected = [["first"], *([f"a{n}", f"b{n}"] for n in range(7))]
        assert [[result.group_id for result in own] for own in results] == expected
        assert await commit.append([], 3) == []

    on_a_disk(work)


def test_a_write_is_bounded_and_as_old_as_its_oldest_check() -> None:
    """By groups and by bytes; a caller above the bound is written alone."""

    async def work(disk: Disk, commit: GroupCommit) -> None:
        callers = [start(commit, "first")]
        await until(lambda: disk.writes)
        callers += [start(commit, *(f"{caller}{n}" for n in range(APPEND_CHUNK // 2))) for caller in "abc"]
        callers += [start(commit, name, nbytes=CHUNK_BYTES // 2 + 1) for name in ("x", "y")]
        callers += [start(commit, "other", checked_at=2)]
        await asyncio.sleep(0)
        disk.free.set()
        await asyncio.gather(*callers)
        assert [len(write) for write in disk.writes] == [1, APPEND_CHUNK, APPEND_CHUNK // 2 + 1, 2]
        assert disk.checked_at == [3, 3, 3, 2]

    on_a_disk(work)


def test_a_full_server_refuses_only_the_callers_whose_groups_do_not_fit() -> None:
    """The others, who repeat stored groups, are written alone and answered."""

    async def work(disk: Disk, commit: GroupCommit) -> None:
        disk.full = {"new"}
        first = start(commit, "first")
        await until(lambda: disk.writes)
        callers = [start(commit, "repeat"), start(commit, "new"), start(commit, "again")]
        await asyncio.sleep(0)
        disk.free.set()
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert [isinstance(result, NoRoom) for result in results] == [False, True, False]
        assert (await first)[0].stored

    on_a_disk(work)


@pytest.mark.parametrize("ending", ["cancelled", "failed"])
def test_a_caller_that_is_cancelled_or_fails_leaves_the_next_ones_alone(ending: str) -> None:
    """Those who came during its write are written; the error of a write reaches all of its callers."""

    async def work(disk: Disk, commit: GroupCommit) -> None:
        callers = [start(commit, "first"), start(commit, "second")]
        await until(lambda: disk.writes)
        if ending == "cancelled":
            callers[0].cancel()
        else:
            disk.error = NotLeader("fenced", name="leader")
        disk.free.set()
        ended = await asyncio.gather(*callers, return_exceptions=True)
        expected = [asyncio.CancelledError, list] if ending == "cancelled" else [NotLeader, NotLeader]
        assert [type(outcome) for outcome in ended] == expected
        disk.error = None
        assert (await start(commit, "later"))[0].group_id == "later"

    on_a_disk(work)

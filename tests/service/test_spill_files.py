"""Files of freed groups are deleted by the leader itself, whatever fails or happens during its work.

Each test lets one await of the spill's work fail or wait. At the end all groups are freed, and no file is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replaybuf.errors import NoRoom, ServiceUnavailable
from replaybuf.service.bodies.assembly import fetch_groups
from replaybuf.service.http.guard.connection_table import ConnectionLimits, ConnectionTable
from replaybuf.service.options import ServeOptions
from replaybuf.service.report.status import group_counts
from replaybuf.service.run import spill
from replaybuf.service.run.served_run import Run
from replaybuf.service.server import _Server
from replaybuf.service.traffic import Traffic
from replaybuf.store import EmbeddedServer
from replaybuf.wire.config import BatchSpec, Limits, SpillSpec, StrategySpec
from replaybuf.wire.contract import AttachRequest
from tests.led_run import append, on_a_run, train
from tests.service.test_spill import files

FRAME_BYTES = 1_400
"""A little more than a small group takes."""
CALLS = 14
"""Calls to Redis and the folder, of a deletion and the move after it."""

TRIES = 5


class Awaits:
    """The awaits of a run's spill, counted from `start` on. `before` and `after` are called around number `at`."""

    def __init__(self, run: Run) -> None:
        self.before = self.after = _nothing
        self._left = -1
        store, folder = run.journal.store, run.spill.files
        for owner, names in (
            (folder, ("_do",)),
            (store.spill, ("find_spilled", "forget", "record")),
            (store.groups, ("read_entries", "read_payloads", "free_payloads")),
        ):
            for name in names:
                setattr(owner, name, self._around(getattr(owner, name)))

    def start(self, at: int) -> None:
        """Count from here on."""
        self._left = at

    @property
    def passed(self) -> bool:
        """Whether number `at` was reached."""
        return self._left < 0

    def _around(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def around(*words: Any, **named: Any) -> Any:
            self._left -= 1
            here = self._left == -1
            if here:
                await self.before()
            answer = await call(*words, **named)
            if here:
                await self.after()
            return answer

        return around


async def _nothing() -> None:
    """Do nothing."""


async def _uncalled(scope: Any, receive: Any, send: Any) -> None:
    """Answer nothing."""


async def cut() -> None:
    """Fail as a connection does."""
    raise ServiceUnavailable("the connection was cut")


def on_a_spilling_run(
    server: EmbeddedServer, folder: Path, work: Callable[[Run, int], Awaitable[None]], groups: int = 12
) -> None:
    """Do `work` with a run of some groups, most of them in files, and its epoch. Then free all, and look for files."""

    async def fill_and_work(_: object, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest())).epoch
        await fill(run, range(groups))
        assert len(files(folder)) >= groups - 4
        await work(run, epoch)
        await train(run, epoch, range(run.state.step, run.state.stored))
        await run.trainer_calls.checkpoint(run.state.step, epoch, 1)
        await free(run)
        await do(run)
        assert group_counts(run.state)["live"] == 0 and not files(folder)
        run.close()

    on_a_run(
        server,
        fill_and_work,
        batch=BatchSpec(groups_per_batch=1),
        strategy=StrategySpec(name="one-step-off-policy", options={"max_staleness": 100}),
        limits=Limits(max_bytes_in_memory=4 * FRAME_BYTES, max_group_bytes=FRAME_BYTES),
        spill=SpillSpec(url=f"file://{folder}"),
    )


async def fill(run: Run, numbers: range) -> None:
    """Store groups; move frames while there is no room."""
    for number in numbers:
        for _ in range(TRIES):
            try:
                await append(run, f"g{number}")
                break
            except NoRoom:
                await do(run)
        else:
            raise AssertionError(f"no room for g{number}: {run.spill.failing}")


async def free(run: Run) -> None:
    """Delete what checkpoints freed."""
    await run.journal.free_payloads(run.spill.forget)


async def do(run: Run) -> None:
    """Do the work of the background, once what goes on is done."""
    await ended(run)
    run.spill._next_s = 0.0
    run.spill.start()
    await ended(run)


async def ended(run: Run) -> None:
    """Wait until nothing goes on in the background."""
    if run.spill._task:
        await run.spill._task


async def use(run: Run, epoch: int, steps: range) -> None:
    """Train steps, and free their groups."""
    await train(run, epoch, steps)
    await run.trainer_calls.checkpoint(steps.stop, epoch, 1)


@pytest.mark.parametrize("most_doomed", [spill.MOST_DOOMED, 1])
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("at", range(CALLS))
def test_a_failure_leaves_no_file_of_a_freed_group(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, done: bool, most_doomed: int
) -> None:
    """Of a call to Redis or the folder, which was done or not; with few doomed paths the folder is swept."""
    monkeypatch.setattr(spill, "MOST_DOOMED", most_doomed)

    async def work(run: Run, epoch: int) -> None:
        await use(run, epoch, range(8))
        awaits = Awaits(run)
        awaits.before, awaits.after = (_nothing, cut) if done else (cut, _nothing)
        awaits.start(at)
        with contextlib.suppress(ServiceUnavailable):
            await free(run)
        await do(run)
        await fill(run, range(12, 20))
        assert awaits.passed

    on_a_spilling_run(server, tmp_path, work)


@pytest.mark.parametrize("most_doomed", [spill.MOST_DOOMED, 1])
@pytest.mark.parametrize("at", range(9))
def test_groups_that_are_freed_during_a_deletion_leave_no_file(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, most_doomed: int
) -> None:
    """A checkpoint frees more groups while the folder answers, or a move is on its way."""
    monkeypatch.setattr(spill, "MOST_DOOMED", most_doomed)

    async def work(run: Run, epoch: int) -> None:
        await use(run, epoch, range(8))
        await free(run)
        awaits = Awaits(run)

        async def free_more() -> None:
            await use(run, epoch, range(8, 12))
            await free(run)

        awaits.after = free_more
        awaits.start(at)
        await do(run)
        monkeypatch.setattr(spill, "MOST_DOOMED", 100)  # no later sweep makes up for this one
        await do(run)
        await fill(run, range(12, 20))
        assert awaits.passed

    on_a_spilling_run(server, tmp_path, work)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("at", range(6))
def test_a_move_that_failed_leaves_no_file_when_its_groups_are_freed_next(
    server: EmbeddedServer, tmp_path: Path, at: int, done: bool
) -> None:
    """Redis does not name the files then, or its answer was lost; no second move comes before the checkpoint."""

    async def work(run: Run, _: int) -> None:
        await do(run)
        awaits = Awaits(run)
        awaits.before, awaits.after = (_nothing, cut) if done else (cut, _nothing)
        awaits.start(at)
        for number in range(12, 20):
            with contextlib.suppress(NoRoom):
                await append(run, f"g{number}")
            await ended(run)
            if awaits.passed:
                break
        assert awaits.passed

    on_a_spilling_run(server, tmp_path, work)


def test_a_lost_answer_to_the_first_move_leaves_one_folder(server: EmbeddedServer, tmp_path: Path) -> None:
    """Redis has recorded the run's folder; the next move uses it."""

    async def work(run: Run, _: int) -> None:
        awaits = Awaits(run)
        awaits.after = cut
        awaits.start(1)
        await fill(run, range(12))
        assert awaits.passed and run.spill.failing is None

    on_a_spilling_run(server, tmp_path, work, groups=0)


@pytest.mark.parametrize("most_doomed", [spill.MOST_DOOMED, 1])
def test_a_leader_that_was_replaced_meanwhile_deletes_no_file(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_doomed: int
) -> None:
    """What it knows to be freed may be another group by now: an accepted loss gives numbers again."""
    monkeypatch.setattr(spill, "MOST_DOOMED", most_doomed)

    async def work(run: Run, epoch: int) -> None:
        await use(run, epoch, range(8))
        await free(run)
        before = files(tmp_path)
        store = run.journal.store
        await store.runs.take_lease(run.name, "another server", 60.0, force=True)
        await do(run)
        assert files(tmp_path) == before
        lease = await store.runs.take_lease(run.name, "here", 60.0, force=True)
        await run.lead(str(lease.token))
        await do(run)
        assert len(files(tmp_path)) < len(before)

    on_a_spilling_run(server, tmp_path, work)


def test_a_server_that_answers_its_last_calls_reads_spilled_frames(server: EmbeddedServer, tmp_path: Path) -> None:
    """It leads for up to 5 s more: a stub that it took for a frame would become a dead letter."""

    async def work(run: Run, _: int) -> None:
        service: Any = SimpleNamespace(runs={run.name: run})
        ending = _Server(service, _uncalled, ConnectionTable(ConnectionLimits.of(ServeOptions()), Traffic()), None)
        ending.servers, ending.lifespan = [], ending.config.lifespan_class(ending.config)
        await ending.shutdown()
        numbers = range(1, run.state.stored + 1)
        assert (await fetch_groups(run.journal.store, run.name, numbers, run.state.pool.columns)).broken == {}
        assert run.journal.closed  # nobody waits for news any more

    on_a_spilling_run(server, tmp_path, work)

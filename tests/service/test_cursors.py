"""Cursors of readers beside the trainer: at least once, durable, bounded, and never in the trainer's way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from replaybuf import Client
from replaybuf.client.exports import export
from replaybuf.errors import Conflict, Gone, NoRoom, NotFound, NotLeader
from replaybuf.kernel.decide import cursors
from replaybuf.kernel.decide.cursors import find_kept
from replaybuf.kernel.decide.trimming import decide_trim
from replaybuf.kernel.state import cursors as pages
from replaybuf.kernel.state.cursors import Cursor, Position, find_page
from replaybuf.service.clock import Clock
from replaybuf.service.run.cursors import LONGEST_TICK_S
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.answer.cursors import CursorGap, CursorList
from replaybuf.wire.contract import AttachRequest
from tests.conftest import RunClient, ServeProcess, group
from tests.led_run import LEASE_S, append, on_a_run, train
from tests.service.test_counted import samples
from tests.waiting import eventually


def page(run: RunClient, name: str = "c", **query: Any) -> dict[str, Any]:
    """Read a page of a cursor."""
    reply = run.get(f"cursors/{name}", **query)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def ids(answer: dict[str, Any]) -> list[str]:
    return [entry["group_id"] for entry in answer["groups"]]


def done(run: RunClient, answer: dict[str, Any], name: str = "c") -> dict[str, Any]:
    """Report a page as done."""
    reply = run.post(f"cursors/{name}", position=answer["position"])
    assert reply.status_code == 200, reply.text
    state: dict[str, Any] = reply.json()
    return state


class HandClock:
    """Monotonic clock of a run, moved by hand."""

    def __init__(self, run: Run) -> None:
        self.now_s = time.monotonic()
        run.journal.clock = Clock(monotonic=lambda: self.now_s)


def start(run: RunClient, *names: str, per_batch: int = 1) -> int:
    """Create the run, store groups, attach."""
    strategy = {"name": "one-step-off-policy", "options": {"max_staleness": 99}}
    run.put(batch={"groups_per_batch": per_batch}, strategy=strategy)
    if names:
        run.append(*map(group, names))
    return run.attach()


def test_a_page_comes_again_until_it_is_done(run: RunClient) -> None:
    start(run, "a", "b", "c")
    first = page(run, limit=2)
    assert ids(first) == ["a", "b"] and page(run, limit=2) == first
    assert first["groups"][0]["rollouts"][0]["completion_ids"] == [3, 3, 3] and first["gap"] is None
    assert done(run, first) == {"name": "c", "kind": "stored", "position": first["position"], "lag": 1}
    last = page(run)
    assert ids(last) == ["c"] and done(run, last)["lag"] == 0
    assert ids(page(run)) == [] and done(run, first)["position"] == last["position"]
    assert run.get("cursors").json()["cursors"] == [
        {"name": "c", "kind": "stored", "position": last["position"], "lag": 0}
    ]
    for _ in range(2):
        assert run.http.delete(f"{run.path}/cursors/c").status_code == 204
    assert run.get("cursors").json() == {"cursors": []} and ids(page(run)) == ["a", "b", "c"]


def test_trained_groups_come_in_the_order_of_their_steps_once_they_are_acked(run: RunClient) -> None:
    epoch = start(run, "a", "b", "c", "d", per_batch=2)
    assert page(run, kind="trained")["groups"] == []
    run.train(epoch, range(1))
    run.batch(1, epoch)
    first = page(run, limit=1)
    assert [(entry["group_id"], entry["step"]) for entry in first["groups"]] == [("a", 0)]
    assert done(run, first)["lag"] == 1
    run.ack(1, epoch)
    assert [(entry["group_id"], entry["step"]) for entry in page(run)["groups"]] == [("b", 0), ("c", 1), ("d", 1)]


def test_a_reader_waits_for_the_first_group(service: ServeProcess, run: RunClient) -> None:
    start(run)
    group_ids: list[str] = []

    def read() -> None:
        with Client(service.url, run.run) as client:
            group_ids.extend(group.group_id for group in client.read_cursor("c", wait_ms=20_000).groups)

    page(run)
    reader = threading.Thread(target=read)
    reader.start()
    run.append(group("late"))
    reader.join()
    assert group_ids == ["late"]


def test_a_rewind_says_which_steps_are_void(run: RunClient) -> None:
    epoch = start(run, "a", "b", "c", "d")
    run.train(epoch, range(3))
    read = page(run, kind="trained")
    assert ids(read) == ["a", "b", "c"] and read["rewound_to"] is None
    done(run, read)
    epoch = run.attach(3, on_resume="redeliver")
    assert page(run)["rewound_to"] is None
    epoch = run.attach(1, on_resume="redeliver")
    assert page(run) == {"groups": [], "position": page(run)["position"], "gap": None, "rewound_to": None}
    epoch = run.attach(1, on_resume="resample")
    assert page(run)["rewound_to"] == 1
    run.train(epoch, range(1, 2))
    again = page(run)
    assert again["rewound_to"] == 1 and [entry["step"] for entry in again["groups"]] == [1]
    done(run, again)
    done(run, read)  # late: of the history that is void
    run.train(epoch, range(2, 3))
    following = page(run)
    assert following["rewound_to"] is None and [entry["step"] for entry in following["groups"]] == [2]


def test_a_position_survives_kill_9_and_a_checkpoint_keeps_bytes(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    run = connect(own_service.url, "kept")
    epoch = start(run, "a", "b", "c", "d")
    done(run, page(run, "s", limit=1), "s")
    page(run, "t", kind="trained")
    run.train(epoch, range(3))
    done(run, page(run, "t", limit=2), "t")
    own_service.kill()
    run = connect(own_service.start().url, "kept")
    epoch = run.attach(3)
    assert run.post("checkpoints", epoch=epoch, step=3).status_code == 200
    assert {name: run.get(f"groups/{name}").json()["state"] for name in "abc"} == {
        "a": "retired",
        "b": "in_batches",
        "c": "in_batches",
    }
    own_service.kill()
    run = connect(own_service.start().url, "kept")
    stored, trained = page(run, "s"), page(run, "t")
    assert ids(stored) == ["b", "c", "d"] and ids(trained) == ["c"]
    assert all(entry["rollouts"] for entry in stored["groups"]) and stored["gap"] is None
    done(run, stored, "s"), done(run, trained, "t")
    epoch = run.attach(3)
    run.train(epoch, range(3, 4))
    done(run, page(run, "t"), "t")
    assert run.post("checkpoints", epoch=epoch, step=4).status_code == 200
    assert run.state()["groups"]["retired"] == 4


def test_a_cursor_that_fell_behind_gets_a_gap_and_the_metric_counts_it(server: EmbeddedServer) -> None:
    """Bytes are kept within a bound; beyond it the newest groups keep theirs."""

    async def work(_: Store, run: Run) -> None:
        epoch = (await run.trainer_calls.attach(AttachRequest(resume_step=0))).epoch
        await run.cursors.open("s", "stored")
        await run.cursors.open("t", "trained")
        for step in range(4):
            await append(run, f"g{step}", version=step)
            await train(run, epoch, range(step, step + 1))
        size = int(run.state.index["frame_bytes"][0])
        with patch.object(cursors, "KEPT_BYTES", 2 * size):
            await run.trainer_calls.checkpoint(4, epoch, 1)
        assert run.state.index["number"][run.state.index["state"] == 1].tolist() == [3, 4]
        async with run.journal.decision():
            trim = decide_trim(run.state, kept_groups=1, kept_entries=1)
            assert trim is not None
            await run.journal.append(trim)
        stored, trained = await run.cursors.page("s", 100, 0.0), await run.cursors.page("t", 100, 0.0)
        assert [item.number for item in stored.items] == [2, 3, 4] and stored.gap == CursorGap(groups=1)
        assert [item.step for item in trained.items] == [3] and trained.gap == CursorGap(steps=3)

    on_a_run(server, work)


def test_freed_groups_are_listed_without_rollouts_and_counted(run: RunClient) -> None:
    epoch = start(run, "a", "b")
    run.train(epoch, range(1))
    run.post("checkpoints", epoch=epoch, step=1)
    eventually(lambda: run.get("groups/a").json()["rollouts"] is None, 20.0)
    late = page(run)
    assert ids(late) == ["a", "b"] and late["groups"][0]["rollouts"] is None
    assert late["gap"] == {"groups": 0, "steps": 0, "freed": 1}
    assert page(run) == late and samples(run, "replaybuf_cursor_groups_missed_total") == {(): 1.0}
    assert samples(run, "replaybuf_cursor_lag_groups") == {("c",): 2.0}


@pytest.mark.parametrize(
    ("position", "status"), [("t0.0.0", 422), ("s3", 422), ("s-1", 422), ("", 422), ("x" * 300, 422), ("s1", 200)]
)
def test_a_position_of_another_cursor_or_behind_the_end_is_refused(run: RunClient, position: str, status: int) -> None:
    start(run, "a", "b")
    page(run)
    reply = run.post("cursors/c", position=position)
    assert reply.status_code in (status, 400) and (status == 200 or "position" in reply.json()["detail"]), reply.text
    assert run.get("cursors").json()["cursors"][0]["lag"] == (1 if status == 200 else 2)


def test_wrong_cursors_get_one_clear_answer(service: ServeProcess, run: RunClient) -> None:
    start(run, "a")
    with Client(service.url, run.run) as client:
        with pytest.raises(NotFound, match="no cursor 'c'"):
            client.advance_cursor("c", "s1")
        client.read_cursor("c", "trained")
        with pytest.raises(Conflict, match="over trained groups"):
            client.read_cursor("c", "stored")
        for n in range(cursors.MOST_CURSORS - 1):
            client.read_cursor(f"c{n}")
        with pytest.raises(Conflict, match="the maximum is 16: delete one"):
            client.read_cursor("one more")
        client.delete_cursor("c0")
        client.read_cursor("one more")
        assert len(client.list_cursors()) == cursors.MOST_CURSORS
    assert run.get("cursors/c", kind="all").status_code == 422
    assert run.get("cursors/" + "x" * 257).status_code == 422


def test_a_cursor_with_a_lifetime_is_forgotten_after_so_long_without_use(server: EmbeddedServer) -> None:
    """A named one is not, whatever time passes; and time in which the server stood still does not count."""

    async def work(store: Store, led: Run) -> None:
        clock, opened = HandClock(led), led.cursors
        await opened.open("named", "stored")
        await opened.open("mine", "stored", 120)
        for _ in range(3):
            clock.now_s += 1_000.0  # stood still
            await opened.expire()
        for _ in range(20):
            clock.now_s += LONGEST_TICK_S
            await opened.expire()
        await append(led, "a")
        await opened.page("mine", 1, 0.0)  # used
        for _ in range(24):
            clock.now_s += LONGEST_TICK_S
            await opened.expire()
        assert [cursor.name for cursor in (await opened.list_all()).cursors] == ["mine", "named"]
        clock.now_s += LONGEST_TICK_S
        await opened.expire()
        assert [cursor.name for cursor in (await opened.list_all()).cursors] == ["named"]
        assert len(await store.cursors.read(led.name)) == 1

    on_a_run(server, work)


def test_the_new_leader_forgets_a_cursor_that_its_reader_left(server: EmbeddedServer) -> None:
    """Nobody asks for the cursors after the takeover: the tick alone reads them."""

    async def work(store: Store, led: Run) -> None:
        await led.cursors.open("left", "stored", 120)
        await led.cursors.take_over()
        clock = HandClock(led)
        for _ in range(30):
            clock.now_s += LONGEST_TICK_S
            await led.tick()
        assert await store.cursors.read(led.name) == []

    on_a_run(server, work)


def test_beyond_the_maximum_the_longest_unused_cursor_with_a_lifetime_gives_way(server: EmbeddedServer) -> None:
    """One that was just used does not: two readers would take each other's place for ever. Nor does a named one."""

    async def work(_: Store, led: Run) -> None:
        clock = HandClock(led)
        for number in range(cursors.MOST_CURSORS - 2):
            await led.cursors.open(f"named-{number}", "stored")
        for name in ("killed", "used"):
            await led.cursors.open(name, "stored", 600)
        with pytest.raises(NoRoom, match="try again") as caught:
            await led.cursors.open("new", "stored", 600)
        assert caught.value.retry_after_s == cursors.GIVES_WAY_S
        for _looks in range(2):
            await led.cursors.expire()
            clock.now_s += LONGEST_TICK_S
        await led.cursors.expire()
        await led.cursors.page("used", 1, 0.0)
        await led.cursors.open("new", "stored", 600)
        names = {cursor.name for cursor in (await led.cursors.list_all()).cursors}
        assert "killed" not in names and {"new", "used", "named-0"} <= names and len(names) == cursors.MOST_CURSORS

    on_a_run(server, work)


def test_the_lifetime_of_a_cursor_is_listed_and_bounded(run: RunClient) -> None:
    start(run, "a")
    page(run, lifetime_s=300)
    assert run.get("cursors").json()["cursors"][0]["lifetime_s"] == 300
    for wrong in (0, 119, 86_401):
        assert run.get("cursors/d", lifetime_s=wrong).status_code == 422


def test_an_export_leaves_no_cursor_for_ever(
    service: ServeProcess, run: RunClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cursor has a lifetime. If it was forgotten meanwhile, the export fails instead of reading groups again."""
    start(run, "a", "b", "c")
    monkeypatch.setattr(export, "PAGE_GROUPS", 2)
    seen: list[int | None] = []
    with Client(service.url, run.run) as client:

        def look(*_: int) -> None:
            seen.extend(cursor.lifetime_s for cursor in client.list_cursors())

        export.export_run(client, run.run, tmp_path / "whole", look)
        assert seen == [export.CURSOR_LIFETIME_S] * 2 and client.list_cursors() == []

        def advance(name: str, position: str) -> None:
            Client.advance_cursor(client, name, position)
            Client.delete_cursor(client, name)

        monkeypatch.setattr(client, "advance_cursor", advance)
        with pytest.raises(Gone, match="export again"):
            export.export_run(client, run.run, tmp_path / "cut", look)
        assert not (tmp_path / "cut").exists() and client.list_cursors() == []


def test_a_page_ends_at_its_bytes(run: RunClient, server: EmbeddedServer) -> None:
    async def work(_: Store, run: Run) -> None:
        await append(run, "a", "b", "c")
        cursor = Cursor("c", "stored", Position())
        with patch.object(pages, "PAGE_BYTES", 1):
            first_page = find_page(run.state, cursor, 100)
        assert [item.number for item in first_page.items] == [1] and first_page.position.number == 1
        assert find_kept(run.state, [], 0) == (None, None)

    on_a_run(server, work)


def test_readers_may_come_and_go_while_a_page_is_made(server: EmbeddedServer) -> None:
    """As a reader does that repeats a call after its timeout: all of them get the page."""

    async def work(__: Store, run: Run) -> None:
        await append(run, "a")
        await run.cursors.open("c", "stored")
        readers = []
        for _ in range(30):
            readers.append(asyncio.create_task(run.cursors.page("c", 10, 0.0)))
            await asyncio.sleep(0)
        pages = await asyncio.wait_for(asyncio.gather(*readers), 30.0)
        assert all(len(page.items) == 1 for page in pages)

    on_a_run(server, work)


@pytest.mark.parametrize("knows", [True, False])
def test_a_former_leader_returns_no_page(server: EmbeddedServer, knows: bool) -> None:
    """Its successor may have recorded that these groups are done."""

    async def work(store: Store, run: Run) -> None:
        await append(run, "a")
        await run.cursors.open("c", "stored")
        await store.runs.take_lease(run.name, "successor", LEASE_S, force=True)
        if knows:
            run.journal.become_follower("http://successor")
        with pytest.raises(NotLeader):
            await run.cursors.page("c", 1, 0.0)
        assert not run.journal.leading

    on_a_run(server, work)


def test_a_reply_from_before_a_write_does_not_undo_it(server: EmbeddedServer) -> None:
    """A checkpoint that read no cursor while one was created would free what its reader has not seen."""

    async def work(store: Store, run: Run) -> None:
        read, write, written = store.cursors.read, store.cursors.write, asyncio.Event()
        looks: list[asyncio.Task[CursorList]] = []

        async def read_late(name: str) -> list[bytes]:
            raw = await read(name)
            await written.wait()
            return raw

        async def write_beside_a_look(*args: str | bytes) -> None:
            looks.append(asyncio.create_task(run.cursors.list_all()))
            await asyncio.sleep(0)
            await write(*args)  # type: ignore[arg-type]

        await run.cursors.list_all()
        with (
            patch.object(store.cursors, "read", read_late),
            patch.object(store.cursors, "write", write_beside_a_look),
        ):
            await run.cursors.open("c", "stored")
            written.set()
            assert [cursor.name for cursor in (await looks[0]).cursors] == ["c"]
        assert [cursor.name for cursor in (await run.cursors.list_all()).cursors] == ["c"]

    on_a_run(server, work)

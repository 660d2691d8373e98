"""Bounded streams and tables: what is freed stays visible for a while, then goes; nothing that is needed ever does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import redis

from replaybuf.errors import NotLeader
from replaybuf.kernel.decide import records as decide
from replaybuf.kernel.rows.index import DEAD, ENTRY
from replaybuf.kernel.state.snapshot import encode_snapshot, take
from replaybuf.service.host import Service
from replaybuf.service.http.guard.auth import Tokens
from replaybuf.service.http.routes import application
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store, keys
from tests.conftest import group

KEPT_GROUPS = 20


class Trial:
    """A run in this process over real HTTP routes and a real Valkey; it keeps the history of 20 groups."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.service = Service(store, url="http://t", embedded=True)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(application(self.service, Tokens(None))),
            base_url=f"http://t/v1/runs/{name}/",
            follow_redirects=True,
        )
        self.epoch = 0

    @property
    def run(self) -> Run:
        return self.service.runs[self.name]

    async def create(self, **options: Any) -> None:
        strategy = {"name": "one-step-off-policy", "options": {"max_staleness": options.pop("max_staleness", 1)}}
        body = {"batch": {"groups_per_batch": 2}, "strategy": strategy} | options
        assert (await self.http.put("", json=body)).status_code == 201
        self.run.trimming.kept_groups = KEPT_GROUPS
        self.epoch = (await self.post("attach", dp_world_size=1, resume_step=0))["epoch"]

    async def post(self, call: str, **body: Any) -> dict[str, Any]:
        reply = await self.http.post(call, json=body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    async def produce(self, ids: list[str] | None = None) -> list[str]:
        """Append two groups with ids of their own, or on tickets."""
        version = self.run.state.published[""]
        if ids is None:
            answer = await self.post("tickets", producer="p", count=2)
            groups = [group(None, version, ticket=ticket["ticket"]) for ticket in answer["tickets"]]
        else:
            groups = [group(group_id, version) for group_id in ids]
        results = (await self.post("groups", groups=groups))["results"]
        assert [result["status"] for result in results] == ["stored"] * len(groups)
        return [result["group_id"] for result in results]

    async def train(self, step: int) -> None:
        reply = await self.http.get(f"batches/{step}", params={"epoch": self.epoch})
        assert reply.status_code == 200, reply.text
        await self.post(f"batches/{step}/ack", epoch=self.epoch)
        await self.post("policy", epoch=self.epoch, version=step + 1)
        await self.post("checkpoints", epoch=self.epoch, step=step + 1)
        await self.run.tick()

    async def steps(self, first: int, count: int, named: bool = False) -> None:
        for step in range(first, first + count):
            await self.produce([f"own-{2 * step}", f"own-{2 * step + 1}"] if named else None)
            await self.train(step)

    async def restarted(self) -> Trial:
        """Read the run anew, as another server would."""
        again = Trial(self.store, self.name)
        await again.service.start()
        again.run.trimming.kept_groups = KEPT_GROUPS
        again.epoch = self.epoch
        return again


def attempt(server: EmbeddedServer, name: str, work: Callable[[Trial], Awaitable[None]]) -> None:
    """Run `work` on a run of its own."""

    async def main() -> None:
        store = await Store.open(server.url)
        trial = Trial(store, name)
        try:
            await work(trial)
        finally:
            await trial.http.aclose()
            await store.close()

    asyncio.run(main())


def client_of(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(server.socket_path))


def test_streams_and_ids_stay_bounded_and_the_state_is_the_same_after_a_restart(server: EmbeddedServer) -> None:
    """A hundred groups through a run that keeps the history of twenty."""

    async def work(trial: Trial) -> None:
        await trial.create()
        await trial.steps(0, 50)
        with client_of(server) as client:
            assert client.xlen(keys.index("bound")) <= 40
            assert client.xlen(keys.ledger("bound")) <= 50 * 4 // 2 + 20
            assert client.xlen(keys.candidates("bound")) <= 30
            assert client.hlen(keys.group_ids("bound")) <= 40
            assert client.bitcount(keys.prompts_done("bound", "")) >= 60
            assert len(client.keys("rb:p:{bound*")) == 0
        again = await trial.restarted()
        counts, before = (await again.http.get("")).json(), (await trial.http.get("")).json()
        reported = ("step", "epoch", "generation", "published_version", "groups", "tokens", "tickets", "config")
        assert [counts[name] for name in reported] == [before[name] for name in reported]
        assert counts["groups"]["stored"] == counts["groups"]["retired"] == 100
        await again.steps(50, 3)

    attempt(server, "bound", work)


def test_trimmed_groups_are_gone_and_recently_freed_ones_are_reported(server: EmbeddedServer) -> None:
    """410 names what was trimmed; the ledger begins at its first kept entry."""

    async def work(trial: Trial) -> None:
        await trial.create()
        await trial.steps(0, 50)
        assert (await trial.http.get("batches/1/explain")).status_code == 410
        for path, code in (("groups/p1", 410), ("batches/1/record", 410), ("groups/p99", 200), ("groups/p777", 404)):
            assert (await trial.http.get(path)).status_code == code, path
        assert "record of step 1 is trimmed" in (await trial.http.get("batches/1/record")).json()["detail"]
        assert (await trial.http.get("batches/49/record")).json()["state"] == "acked"
        assert (await trial.http.get("groups/p99")).json()["state"] == "retired"
        first = (await trial.http.get("ledger", params={"limit": 1})).json()["records"][0]["entry"]
        assert first == trial.run.state.trimmed_entries + 1 > 1
        page = (await trial.http.get("groups", params={"limit": 5})).json()
        assert [item["number"] for item in page["groups"]] == [trial.run.state.trimmed + k for k in range(1, 6)]

    attempt(server, "failed-prompt", work)


def test_a_failed_prompt_is_reported_after_its_record_is_trimmed(server: EmbeddedServer) -> None:
    """By the server that trimmed it and by one that starts from the snapshot."""

    async def work(trial: Trial) -> None:
        await trial.create(tickets={"max_attempts": 1})
        (ticket,) = (await trial.post("tickets", producer="p", count=1))["tickets"]
        reply = await trial.http.delete(f"tickets/{ticket['ticket']}", params={"reason": "reward_failed: boom"})
        assert reply.status_code == 200
        await trial.steps(0, 50, named=True)
        records = (await trial.http.get("ledger", params={"limit": 1000})).json()["records"]
        assert records and "TICKET" not in {record["type"] for record in records}
        for item in (trial, await trial.restarted()):
            reported = (await item.http.get("failed-prompts")).json()
            assert reported["failed"] == 1
            (failed,) = reported["failed_prompts"]
            assert (failed["prompt_index"], failed["attempts"], failed["reason"]) == (0, 1, "reward_failed: boom")
            assert failed["adapter"] == "" and failed["at_s"] > 0

    attempt(server, "reasons", work)


@pytest.mark.parametrize("restart", [False, True])
def test_a_late_duplicate_of_a_trimmed_group_is_still_a_duplicate(server: EmbeddedServer, restart: bool) -> None:
    """By its ticket, by its default id without one, by an id of its own; a name that was never taken is stored."""

    async def work(trial: Trial) -> None:
        await trial.create()
        ticket = (await trial.post("tickets", producer="p", count=2))["tickets"][0]["ticket"]
        late = [group(None, ticket=ticket), group("p1", prompt_index=1), group("named"), group("p4000000000")]
        await trial.post("groups", groups=[late[0], group("p1x"), group("named")])
        await trial.post("groups", groups=[group(None, ticket=ticket.replace("t0-0-", "t0-1-"))])
        for step in range(45):
            if step > 1:
                await trial.produce()
            await trial.train(step)
        assert trial.run.state.trimmed > 4
        again = await trial.restarted() if restart else trial
        results = (await again.post("groups", groups=late))["results"]
        assert [result["status"] for result in results] == ["duplicate", "duplicate", "duplicate", "stored"]
        assert again.run.state.stored == trial.run.state.stored + restart
        with client_of(server) as client:
            assert len(client.keys(f"rb:p:{{{trial.name}*")) == 1, "losers leave no bytes"

    attempt(server, f"late-{restart:d}", work)


def test_an_old_live_group_survives_trimming(server: EmbeddedServer) -> None:
    """It does not keep the stream; after a restart it is browsed, then buried and purged, and its entry goes."""

    async def work(trial: Trial) -> None:
        await trial.create()
        await trial.post("groups", groups=[group("bad")])
        await trial.post("groups", groups=[group("good-1"), group("good-2")])
        with client_of(server) as client:
            client.unlink(*client.keys("rb:p:{*:bad}:*"))
        await trial.train(0)  # "bad" is found out and becomes a dead letter
        await trial.steps(1, 40)
        with client_of(server) as client:
            assert client.hkeys(keys.old_entries("aside")) == [b"1"]
            assert client.xlen(keys.index("aside")) < 40
        again = await trial.restarted()
        assert (await again.http.get("groups/bad")).json()["state"] == "dead_lettered"
        (letter,) = (await again.http.get("dead-letters")).json()["dead_letters"]
        assert (letter["group_id"], letter["reason"]) == ("bad", "missing_payload")
        assert (await again.http.delete("dead-letters")).json() == {"purged": 1}
        assert (await again.restarted()).run.state.count(DEAD) == 0
        again = await again.restarted()
        await again.steps(41, 12)
        with client_of(server) as client:
            assert client.hlen(keys.old_entries("aside")) == 0
        assert (await again.http.get("groups/bad")).status_code == 410
        assert (await again.http.get("")).json()["groups"]["dead_lettered"] == 1

    attempt(server, "aside", work)


def test_the_next_leader_finishes_an_interrupted_trimming(server: EmbeddedServer) -> None:
    """The TRIM record stands in the ledger; the entries are still there and go with the next snapshot."""

    async def work(trial: Trial) -> None:
        await trial.create()
        trial.run.trimming.kept_groups = 10_000
        await trial.steps(0, 40)
        trial.run.trimming.kept_groups = KEPT_GROUPS
        await trial.run.trimming._trim()
        with client_of(server) as client:
            assert client.xlen(keys.index("died")) == 80
        again = await trial.restarted()
        assert again.run.state.trimmed == trial.run.state.trimmed > 0
        await again.steps(40, 5)
        with client_of(server) as client:
            assert client.xlen(keys.index("died")) <= 90 - again.run.state.trimmed
        assert (await again.http.get("groups/p0")).status_code == 410

    attempt(server, "died", work)


def test_a_fenced_leader_overwrites_no_snapshot_and_trims_nothing(server: EmbeddedServer) -> None:
    """Nor does a snapshot that is older than the one that stands there."""

    async def work(trial: Trial) -> None:
        await trial.create()
        await trial.steps(0, 3)
        token, raw = trial.run.journal.token or "", encode_snapshot(take(trial.run.state))
        assert await trial.store.snapshots.write("fenced", token, raw, 1, 1, {})
        later = raw.replace(b"%020d" % trial.run.state.entries, b"%020d" % (trial.run.state.entries + 5))
        await trial.store.snapshots.write("fenced", token, later, 1, 1, {})
        assert not await trial.store.snapshots.write("fenced", token, raw, 5, 5, {})
        assert await trial.store.snapshots.read("fenced") == later
        await trial.store.runs.take_lease("fenced", "another", 5000, force=True)
        with client_of(server) as client:
            client.hset(keys.old_entries("fenced"), "7", b"entry")
        for call in (
            trial.store.snapshots.write("fenced", token, raw, 3, 3, {}),
            trial.store.snapshots.mark_prompts_done("fenced", token, [("", 0, 1)]),
            trial.store.snapshots.delete_old_entries("fenced", token, [7]),
        ):
            with pytest.raises(NotLeader):
                await call
        with client_of(server) as client:
            assert client.xlen(keys.index("fenced")) == 6
            assert client.hkeys(keys.old_entries("fenced")) == [b"7"]
            client.delete(keys.old_entries("fenced"))
            assert client.hexists(keys.group_ids("fenced"), "p0")

    attempt(server, "fenced", work)


def test_a_follower_behind_a_trimmed_stream_loads_the_run_again(server: EmbeddedServer) -> None:
    """No history is kept: of what it missed, only the newest group is in the stream."""

    async def work(trial: Trial) -> None:
        await trial.create()
        trial.run.trimming.kept_groups = 0
        await trial.steps(0, 2, named=True)
        follower = Trial(trial.store, trial.name)
        follower.service = Service(trial.store, url="http://f", embedded=False, history_groups=0)
        await follower.service.start()
        read_first = follower.run
        assert not read_first.journal.leading and read_first.state.stored == 4
        with client_of(server) as client:
            while trial.run.state.stored == 4 or client.xlen(keys.index(trial.name)) > 1:
                await trial.steps(trial.run.state.step, 1, named=True)
        await follower.service._work(read_first, read_first.read_streams)
        await follower.service._discover()
        assert follower.run is not read_first
        assert encode_snapshot(take(follower.run.state)) == encode_snapshot(take(trial.run.state))

    attempt(server, "lagging", work)


@pytest.mark.parametrize("leads_again", [False, True])
def test_an_overtaken_trimming_deletes_no_entry_kept_since(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, leads_again: bool
) -> None:
    """It was held up behind its snapshot; also where its server leads again by now, and has not its old token."""
    name = f"overtaken-{leads_again:d}"

    async def append_broken(trial: Trial, group_id: str) -> None:
        """Store a group that is found out when it is selected: a dead letter stays in the index."""
        await trial.post("groups", groups=[group(group_id, trial.run.state.published[""])])
        with client_of(server) as client:
            client.unlink(*client.keys(f"rb:p:{{{name}:{group_id}}}:*"))

    async def overtake(old: Trial) -> None:
        new = Trial(await Store.open(server.url), name)
        try:
            await new.service.start()
            new.run.trimming.kept_groups, new.epoch = KEPT_GROUPS, old.epoch
            await append_broken(new, "second")
            if leads_again:
                old.run.journal.become_follower(None)
            for _ in range(40):
                await new.steps(new.run.state.step, 1, named=True)
                if leads_again:
                    await old.run.read_streams()
        finally:
            await new.http.aclose()
            await new.store.close()
        if leads_again:
            await old.service._leadership.seek(old.run, force=True)

    async def work(trial: Trial) -> None:
        await trial.create()
        await append_broken(trial, "first")
        write, overtaken = trial.store.snapshots.write, asyncio.Event()

        async def held_up(*arguments: Any) -> bool:
            written = await write(*arguments)
            if arguments[-1]:
                overtaken.set()
                await overtake(trial)
            return written

        monkeypatch.setattr(trial.store.snapshots, "write", held_up)
        with contextlib.suppress(NotLeader):
            while not overtaken.is_set():
                await trial.steps(trial.run.state.step, 1, named=True)
        again = await trial.restarted()
        assert [(await again.http.get(f"groups/{item}")).json()["state"] for item in ("first", "second")] == [
            "dead_lettered"
        ] * 2

    attempt(server, name, work)


def test_only_prompts_that_were_issued_get_a_bit(server: EmbeddedServer) -> None:
    """A forged ticket with a huge index must not make Redis allocate a huge bitmap."""

    async def work(trial: Trial) -> None:
        await trial.create()
        await trial.steps(0, 1)
        token = trial.run.journal.token or ""
        with client_of(server) as client:
            client.hset(keys.group_ids("bits"), "p4000000000", 2)
            await trial.store.snapshots.mark_prompts_done(
                "bits", token, [("", 4_000_000_000, 2), ("", 0, 9), ("", 1, 2)]
            )
            assert client.strlen(keys.prompts_done("bits", "")) == 1
            assert sorted(client.hkeys(keys.group_ids("bits"))) == [b"p0", b"p4000000000"]

    attempt(server, "bits", work)


def publish_raw(server: EmbeddedServer, run: str, values: bytes, strings: bytes) -> None:
    """Publish an entry past every check, as a foreign producer could."""
    done = keys.prompts_done(run, "")
    names = [*keys.guarded(run), keys.deleted(run), done, done, "payload"]
    with client_of(server) as client:
        client.set("payload", b"", ex=60)
        group_id = f"raw-{time.time_ns()}"
        client.fcall("rb_publish", len(names), *names, "", 0, "", 0, "", 0, "", group_id, "", values, strings, "", "")


def write_past_the_function(server: EmbeddedServer, run: str, **fields: bytes) -> None:
    """Write the next entry of the index stream by hand."""
    with client_of(server) as client:
        number = client.hincrby(keys.counts(run), "stored", 1)
        client.xadd(keys.index(run), fields, id=f"{number}-0")


def test_a_malformed_index_entry_is_a_dead_letter(server: EmbeddedServer) -> None:
    """Wrong sizes, wrong fields, strings that do not decode: counted, listed, the same after a restart."""

    async def work(trial: Trial) -> None:
        await trial.create()
        fine = np.zeros(1, ENTRY)
        fine["tokens"], fine["rollouts"] = 10, 2
        publish_raw(server, "garbage", b"short", b"x")
        publish_raw(server, "garbage", fine.tobytes(), b"\xc1 no msgpack")
        write_past_the_function(server, "garbage", what=b"is this")
        write_past_the_function(server, "garbage", s=b"1", n=fine.tobytes())
        no_tokens = msgspec.msgpack.encode(["g", "p", "", keys.payload("garbage", "g"), None, b""])
        publish_raw(server, "garbage", bytes(ENTRY.itemsize), no_tokens)
        await trial.steps(0, 2)
        groups = (await trial.http.get("")).json()["groups"]
        assert (groups["stored"], groups["dead_lettered"], groups["retired"]) == (9, 5, 4)
        letters = (await trial.http.get("dead-letters")).json()["dead_letters"]
        assert [(item["number"], item["reason"]) for item in letters] == [(n, "bad_index_entry") for n in range(1, 6)]
        again = await trial.restarted()
        assert (await again.http.get("")).json()["groups"] == groups
        await again.steps(2, 40)
        assert (await again.http.delete("dead-letters")).json() == {"purged": 5}
        await again.run.tick()
        groups = (await (await again.restarted()).http.get("")).json()["groups"]
        assert (groups["stored"], groups["dead_lettered"], groups["retired"]) == (89, 5, 84)

    attempt(server, "garbage", work)


def test_many_dead_letters_are_purged_in_pieces(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fold of one record for all of them would hold the event loop."""
    monkeypatch.setattr(decide, "PURGED_AT_ONCE", 2)

    async def work(trial: Trial) -> None:
        await trial.create()
        for _ in range(5):
            publish_raw(server, "pieces", b"short", b"x")
        await trial.steps(0, 1)
        assert (await trial.http.delete("dead-letters")).json() == {"purged": 5}
        records = (await trial.http.get("ledger")).json()["records"]
        assert [len(record["numbers"]) for record in records if record["type"] == "PURGE"] == [2, 2, 1]

    attempt(server, "pieces", work)


@pytest.mark.parametrize("restart", [False, True])
def test_a_direct_append_above_the_token_budget_is_a_dead_letter(server: EmbeddedServer, restart: bool) -> None:
    """No batch could ever hold it; it would sit there live for ever. A server that died before it said so says it."""

    async def work(trial: Trial) -> None:
        await trial.create(batch={"tokens_per_batch": 50}, max_staleness=1)
        fine = np.zeros(1, ENTRY)
        fine["tokens"], fine["rollouts"], fine["longest_tokens"] = 51, 2, 26
        strings = msgspec.msgpack.encode(["big", "p", "", keys.payload(trial.name, "big"), None, b""])
        publish_raw(server, trial.name, fine.tobytes(), strings)
        again = await trial.restarted() if restart else trial
        if restart:
            await again.post("attach", dp_world_size=1, resume_step=0)
        await again.run.arrivals.pull()
        (letter,) = (await again.http.get("dead-letters")).json()["dead_letters"]
        assert letter["reason"] == "over_budget"
        assert (await again.http.get("")).json()["groups"]["live"] == 0

    attempt(server, f"big-{restart:d}", work)


def test_a_snapshot_is_written_after_enough_ledger_entries(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart then reads the snapshot and the records behind it alone."""
    monkeypatch.setattr("replaybuf.service.run.trimming.SNAPSHOT_ENTRIES", 40)

    async def work(trial: Trial) -> None:
        await trial.create()
        trial.run.trimming.kept_groups = 10_000
        await trial.steps(0, 30)
        snapshot = trial.run.journal.snapshot
        assert snapshot is not None and snapshot.entries > trial.run.state.entries - 60
        with client_of(server) as client:
            client.xtrim(keys.ledger("tail"), minid=f"{snapshot.entries + 1}-0")
        again = await trial.restarted()
        assert again.run.state.entries == trial.run.state.entries
        assert (await again.http.get("")).json()["groups"]["retired"] == 60

    attempt(server, "tail", work)

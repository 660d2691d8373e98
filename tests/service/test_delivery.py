"""How a batch body goes out: codings, validators, chunks, one writing for all who ask, prepared ahead."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import zstandard

from replaybuf.client.client import Client
from replaybuf.client.http_reply import Reply
from replaybuf.errors import NotAcceptable
from replaybuf.packing import batches
from replaybuf.service.bodies import assembly
from replaybuf.service.bodies import writer as bodies
from replaybuf.service.bodies.writer import Part
from replaybuf.service.http.reply.sending import CHUNK_BYTES, BodyResponse, coding_for, matches
from replaybuf.service.run import next_batch
from replaybuf.service.run.append.group_check import Incoming
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.batch import read_batch
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec
from replaybuf.wire.contract import AttachRequest
from replaybuf.wire.group import group_from_json
from tests.builders import arriving, rollout, wire_group
from tests.conftest import RunClient, ServeProcess, group
from tests.service.test_server import metric

LEASE_S = 60.0


# ---------------------------------------------------------------------- codings and validators


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ([], "identity"),
        ([""], "identity"),
        (["gzip, br"], "identity"),
        (["*"], "identity"),
        (["zstd"], "zstd"),
        (["ZSTD"], "zstd"),
        (["gzip", "zstd"], "zstd"),
        (["gzip;q=1.0, zstd;q=0.1"], "zstd"),
        (["zstd;q=0"], "identity"),
        (["zstd;q=0.000, *"], "identity"),
        (["zstd;q=0.5, identity"], "identity"),
        (["zstd, identity;q=0.5"], "zstd"),
        (["zstd;q=0.5, identity;q=0.5"], "zstd"),
        (["identity;q=0, *;q=0.2"], "zstd"),
        (["zstd, *;q=0"], "zstd"),
        (["identity, *;q=0"], "identity"),
        (["zstd;q=2"], "identity"),
        (["zstd;level=3"], "identity"),
        (["zstd ; q=0.8"], "zstd"),
    ],
)
def test_the_coding_follows_the_weights_of_accept_encoding(accepted: list[str], coding: str) -> None:
    """Compression costs time: it must be asked for by name, or be all that is left."""
    assert coding_for(accepted) == coding


@pytest.mark.parametrize("accepted", ["identity;q=0", "*;q=0", "gzip, identity;q=0", "zstd;q=0, identity;q=0, *"])
def test_a_request_that_accepts_no_coding_gets_the_list(accepted: str) -> None:
    with pytest.raises(NotAcceptable, match="identity or zstd"):
        coding_for([accepted])


@pytest.mark.parametrize(
    ("values", "known"),
    [
        ([], False),
        (['"a"'], True),
        (['"b"'], False),
        (['"b", "a"'], True),
        (['W/"a"'], True),
        (["*"], True),
        (["a"], False),
    ],
)
def test_if_none_match_matches_the_etag(values: list[str], known: bool) -> None:
    assert matches(values, '"a"') is known


def test_a_compressed_body_has_the_same_content_and_another_etag(run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("a", tokens=4000))
    url = f"{run.path}/batches/0?epoch={epoch}"
    plain = run.http.get(url, headers={"accept-encoding": "identity"})
    with run.http.stream("GET", url, headers={"accept-encoding": "zstd"}) as reply:
        raw = b"".join(reply.iter_raw())
    assert "content-encoding" not in plain.headers and plain.headers["vary"] == "Accept, Accept-Encoding"
    assert (reply.headers["content-encoding"], reply.headers["vary"]) == ("zstd", "Accept, Accept-Encoding")
    assert int(reply.headers["content-length"]) == len(raw) < len(plain.content)
    assert zstandard.ZstdDecompressor().decompress(raw) == plain.content
    assert plain.headers["etag"] != reply.headers["etag"]
    refused = run.http.get(url, headers={"accept-encoding": "identity;q=0"})
    assert (refused.status_code, refused.json()["type"]) == (406, "urn:replaybuf:problem:not-acceptable")


def test_a_request_with_the_current_etag_gets_304(run: RunClient) -> None:
    """The validator of another rank, layout or coding is another one."""
    run.put(batch={"groups_per_batch": 1, "seq_len": 16})
    epoch = run.attach(dp_world_size=2)
    run.append(group("a"))

    def ask(rank: int, etag: str = "", **headers: str) -> httpx.Response:
        return run.http.get(
            f"{run.path}/batches/0",
            params={"epoch": epoch, "dp_rank": rank},
            headers={"if-none-match": etag, "accept-encoding": "identity"} | headers,
        )

    etag = ask(0).headers["etag"]
    again = ask(0, etag)
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert (ask(1, etag).status_code, ask(0, etag, **{"accept-encoding": "zstd"}).status_code) == (200, 200)
    epoch = run.attach(dp_world_size=2)
    assert ask(0, etag).status_code == 304
    epoch = run.attach(dp_world_size=2, pad_to_multiple_of=8)
    assert ask(0, etag).status_code == 200


def test_a_client_requests_compression_only_if_configured(
    run: RunClient, service: ServeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("a", tokens=4000))
    fetches = []
    for compress in (False, True):
        with Client(service.url, run.run, compress=compress) as client:
            transport = client._transports[service.url]
            replies: list[Reply] = []
            monkeypatch.setattr(transport, "send", lambda sent, t=transport.send, r=replies: r.append(t(sent)) or r[-1])
            fetches.append((client.fetch_batch(0, epoch), [reply.headers.get("content-encoding") for reply in replies]))
    assert fetches[0][0] == fetches[1][0]
    assert (fetches[0][1], fetches[1][1]) == ([None], ["zstd"])


def test_other_requests_run_between_two_chunks_of_a_body() -> None:
    """Even where the socket takes all at once and never makes the sender wait."""
    data = memoryview(bytes(5 * CHUNK_BYTES + 1))
    events: list[str] = []

    async def send(message: Any) -> None:
        if message.get("body"):
            events.append("chunk")
            assert isinstance(message["body"], memoryview) and message["body"].nbytes <= CHUNK_BYTES

    async def others() -> None:
        while events.count("chunk") < 6:
            events.append("turn")
            await asyncio.sleep(0)

    async def main() -> None:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            tasks.create_task(others())
            tasks.create_task(BodyResponse(data, {})({"type": "http", "method": "GET"}, None, send))  # type: ignore[arg-type]

    asyncio.run(main())
    assert ["chunk", "chunk"] not in [events[at : at + 2] for at in range(len(events))]
    assert events.count("chunk") == 6


# ---------------------------------------------------------------------- one writing, prepared ahead


Work = Callable[["Here"], Awaitable[None]]
OnARun = Callable[[Work], None]
_names = itertools.count()


class Here:
    """A run led in this process, two groups per batch, a trainer attached with two ranks; counts what is fetched."""

    def __init__(self, store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = run
        self.epoch = 0
        self.frames_fetched = 0
        self.fetching = asyncio.Event()
        self.written: list[int] = []
        frames, write_body = store.groups.read_frames, batches.write_body

        async def counted_frames(name: str, sizes: Any) -> Any:
            self.frames_fetched += len(sizes)
            self.fetching.set()
            return await frames(name, sizes)

        def counted_write(run_name: str, batch: Any, rank: int) -> memoryview:
            self.written.append(rank)
            return write_body(run_name, batch, rank)

        monkeypatch.setattr(store.groups, "read_frames", counted_frames)
        monkeypatch.setattr(bodies, "write_body", counted_write)

    async def attach(self, **options: Any) -> None:
        """Attach a trainer of two ranks."""
        self.epoch = (await self.run.trainer_calls.attach(AttachRequest(dp_world_size=2, **options))).epoch

    async def append(self, *group_ids: str) -> None:
        """Store small groups."""
        groups = [group_from_json(wire_group(rollout(), group_id=name)) for name in group_ids]
        await self.run.appends.append(arriving(Incoming(entry) for entry in groups))

    async def bodies(self, step: int) -> list[bytes]:
        """Fetch the bodies of both ranks."""
        parts = [await self.run.batches.part(step, self.epoch, rank, 0.0) for rank in (0, 1)]
        assert all(isinstance(part, Part) for part in parts), parts
        return [bytes(await part.body()) for part in parts if isinstance(part, Part)]

    async def prepare(self) -> None:
        """Let the service prepare what it can."""
        await self.run.batches.next_batch.work()

    @property
    def outcomes(self) -> dict[str, int]:
        """What came of preparing, so far."""
        return dict(self.run.batches.next_batch.outcomes)


@pytest.fixture
def here(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> OnARun:
    """Do some work on a run of the test's own."""

    def do(work: Work) -> None:
        async def main() -> None:
            store, name = await Store.open(server.url), f"delivery-{next(_names)}"
            try:
                token = (await store.runs.take_lease(name, "here", LEASE_S)).token
                strategy = StrategySpec(options={"max_staleness": 5})
                config = RunConfig(batch=BatchSpec(groups_per_batch=2), strategy=strategy)
                made = Here(store, await Run.create(name, store, str(token), config), monkeypatch)
                await made.attach()
                await work(made)
            finally:
                await store.close()

        asyncio.run(main())

    return do


def test_concurrent_requests_of_a_rank_write_its_body_once(here: OnARun) -> None:
    """And one reading, where the batch is not at hand any more; who leaves early takes it from nobody."""

    async def work(made: Here) -> None:
        await made.append("a", "b")
        first = await made.bodies(0)
        made.run.batches.forget()
        made.written.clear()
        made.frames_fetched = 0
        parts = await asyncio.gather(*(made.run.batches.part(0, made.epoch, rank, 0.0) for rank in (0, 1, 0, 1)))
        assert made.frames_fetched == 2
        asked = [asyncio.create_task(part.body()) for part in parts if isinstance(part, Part)]
        await asyncio.sleep(0)
        asked[0].cancel()
        got = await asyncio.gather(*asked[1:])
        assert [bytes(body) for body in got] == [first[1], first[0], first[1]]
        assert sorted(made.written) == [0, 1]

    here(work)


def test_a_prepared_batch_has_the_same_bytes_as_after_a_restart(
    here: OnARun,
) -> None:
    """Nothing is written down before the trainer asks; then nothing is left to fetch or to write."""

    async def work(made: Here) -> None:
        await made.append("a", "b", "c", "d")
        await made.bodies(0)
        entries = made.run.state.entries
        await made.prepare()
        assert (made.run.state.entries, made.run.state.next_step) == (entries, 1)
        made.frames_fetched, made.written = 0, []
        ready = await made.bodies(1)
        assert (made.frames_fetched, made.written) == (0, [])
        assert made.outcomes == {"miss": 1, "hit": 1}
        made.run.batches.forget()
        assert await made.bodies(1) == ready

    here(work)


def test_no_body_is_written_for_a_trainer_that_takes_plans(here: OnARun) -> None:
    """Neither for the plan nor ahead of it; what is prepared is the batch. One who takes a body gets them prepared."""

    async def work(made: Here) -> None:
        await made.append("a", "b", "c", "d", "e", "f")
        for step in (0, 1):
            part = await made.run.batches.part(step, made.epoch, 0, 0.0, as_body=False)
            assert isinstance(part, Part) and b'"rows"' in await part.plan()
            await made.run.trainer_calls.ack(step, made.epoch, None)
            await made.prepare()
        assert (made.written, made.outcomes) == ([], {"miss": 1, "hit": 1})
        await made.bodies(1)
        made.run.batches.next_batch.drop()
        made.run.batches.next_batch._seen = None
        made.written.clear()
        await made.prepare()
        assert sorted(made.written) == [0, 1]

    here(work)


def test_groups_of_an_incomplete_batch_are_fetched_early(here: OnARun) -> None:
    """When the last one arrives it is the only one to be fetched."""

    async def work(made: Here) -> None:
        await made.append("a", "b", "c")
        await made.bodies(0)
        await made.prepare()
        made.frames_fetched = 0
        await made.append("d")
        ready = await made.bodies(1)
        assert made.frames_fetched == 1
        assert made.outcomes == {"miss": 1, "partial": 1}
        assert read_batch(ready[0]).meta.batch_groups == 2

    here(work)


def test_preparation_and_decision_fetch_a_group_once(here: OnARun) -> None:
    """The decision waits for what is on its way; what it fetches itself is not prepared beside it."""

    async def work(made: Here) -> None:
        await made.append("a", "b", "c", "d")
        await made.bodies(0)
        made.frames_fetched = 0
        made.fetching.clear()
        preparing = asyncio.create_task(made.prepare())
        await made.fetching.wait()
        await made.bodies(1)
        await preparing
        assert made.frames_fetched == 2

        await made.append("e", "f")
        await made.run.trainer_calls.ack(0, made.epoch, None)
        made.frames_fetched = 0
        made.fetching.clear()
        deciding = asyncio.create_task(made.bodies(2))
        await made.fetching.wait()
        await made.prepare()
        await deciding
        assert made.frames_fetched == 2

    here(work)


def test_an_attach_drops_the_prepared_batch(here: OnARun) -> None:
    """It was packed for another layout; before the new trainer is served nothing is prepared for it."""

    async def work(made: Here) -> None:
        await made.append("a", "b", "c", "d")
        await made.bodies(0)
        await made.prepare()
        await made.attach(pad_to_multiple_of=8)
        await made.prepare()
        made.written.clear()
        (body, _) = await made.bodies(1)
        assert len(read_batch(body).micro_batches[0].input_ids) % 8 == 0
        assert made.outcomes == {"miss": 2}

    here(work)


def test_a_batch_beyond_the_look_ahead_is_not_prepared(here: OnARun) -> None:
    """Its groups are there; once the step before the last served one is acked, they are fetched."""

    async def work(made: Here) -> None:
        await made.append("a", "b", "c", "d", "e", "f")
        for step in (0, 1):
            await made.bodies(step)
        made.frames_fetched = 0
        await made.prepare()
        assert made.frames_fetched == 0
        await made.run.trainer_calls.ack(0, made.epoch, None)
        await made.prepare()
        assert made.frames_fetched == 2

    here(work)


def test_a_fault_during_preparation_is_left_to_the_decision(
    here: OnARun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, buries no group and changes no state."""

    async def work(made: Here) -> None:
        await made.append("a", "b", "c", "d")
        await made.bodies(0)

        def broken(*_: Any) -> Any:
            raise ValueError("no such thing")

        with monkeypatch.context() as patched:
            patched.setattr(assembly, "pack_batch", broken)
            await made.prepare()
        assert "next batch not prepared" in caplog.text
        assert made.run.state.totals.dead_lettered.total() == 0
        assert len(await made.bodies(1)) == 2
        assert made.outcomes == {"miss": 2}

    here(work)


def test_metrics_count_the_outcome_of_preparation(run: RunClient) -> None:
    """With every outcome, from the first scrape on."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("a"))
    run.batch(0, epoch)
    text = run.http.get("/metrics").text
    reported = {
        outcome: metric(text, "replaybuf_batches_prepared_total", run=run.run, outcome=outcome)
        for outcome in next_batch.OUTCOMES
    }
    assert reported == {"hit": 0, "partial": 0, "miss": 1}

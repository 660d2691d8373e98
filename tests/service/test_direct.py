"""Direct mode: a rank gets the plan of its body and builds it from Redis; the bytes are those of the service."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest

from replaybuf.client import direct
from replaybuf.client.client import Client
from replaybuf.client.direct import DirectBodies
from replaybuf.client.reader import BatchReader, ReaderOptions
from replaybuf.errors import Fenced, Invalid, Malformed, RunFinished
from replaybuf.store import PendingGroup, Store
from replaybuf.wire.batch import read_batch
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.frame import encode_frame, stored_checksum
from replaybuf.wire.group import Group, GroupJson, group_from_json
from replaybuf.wire.plan import MEDIA_TYPE, Plan
from tests.conftest import RunClient, ServeProcess, group
from tests.valkeys import Valkey

_names = itertools.count()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """The Redis of this module's service, within reach of a trainer."""
    with Valkey(tmp_path_factory.mktemp("valkey") / "data") as server:
        yield server


@pytest.fixture(scope="module")
def serving(valkey: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A service on that Redis."""
    server = ServeProcess(tmp_path_factory.mktemp("direct") / "data", "--redis-url", valkey.url).start()
    yield server
    server.end()


@pytest.fixture
def run(serving: ServeProcess, connect: Callable[[str, str], RunClient]) -> RunClient:
    """A run of the test's own, not created yet."""
    return connect(serving.url, f"direct-{next(_names)}")


@pytest.fixture
def client(run: RunClient) -> Iterator[Client]:
    """A client of that run."""
    with Client(str(run.http.base_url), run.run) as made:
        yield made


@pytest.fixture
def bodies(client: Client, valkey: Valkey) -> Iterator[DirectBodies]:
    """Direct mode on that run."""
    made = DirectBodies(client, valkey.url)
    yield made
    made.close()


def one_group(run: RunClient, **options: Any) -> int:
    """Create the run with a batch of one group, attach, and return the epoch."""
    run.put(batch={"groups_per_batch": 1, "seq_len": 64})
    epoch = run.attach(**options)
    run.append(group("a", rollouts=4))
    return epoch


def varied(number: int) -> dict[str, Any]:
    """A group of three rollouts; some have reference, teacher and old-policy logprobs."""
    made = group(f"g{number}", rollouts=3, tokens=400 + 3 * number)
    for rollout in made["rollouts"]:
        logprobs = [-0.25 * (1 + number)] * len(rollout["completion_ids"])
        rollout["ref_logprobs"] = logprobs if number % 2 else None
        rollout["teacher_logprobs"] = logprobs if number % 3 == 0 else None
        rollout["old_logprobs"] = logprobs if number % 4 == 0 else None
        rollout["completion_mask"] = [int(t % 4 != 2) for t in range(len(logprobs))]
    return made


def frame_of(made: dict[str, Any]) -> Group:
    """The same group as columns."""
    return group_from_json(msgspec.convert(made, GroupJson))


def payload_keys(valkey: Valkey, run: RunClient) -> list[bytes]:
    """The payloads of a run, of one group each."""
    return sorted(cast(list[bytes], valkey.client.keys(f"rb:p:{{{run.run}:*")))


# ---------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "one-step-off-policy", "options": {"max_staleness": 5}},
        {"name": "replay", "options": {"max_uses": 2, "order": "prioritized", "importance": 1.0}},
    ],
    ids=lambda strategy: strategy["name"],
)
def test_bodies_built_from_redis_are_those_of_the_service(
    run: RunClient, client: Client, bodies: DirectBodies, valkey: Valkey, world: int, strategy: dict[str, Any]
) -> None:
    """For every rank: truncated rollouts, padding, optional columns, sampling weights, compressed frames."""
    run.put(
        batch={"groups_per_batch": 4, "seq_len": 800, "pad_to_multiple_of": 8, "overlong": "truncate"},
        strategy=strategy,
    )
    epoch = run.attach(dp_world_size=world, seq_len=408)
    client.append([frame_of(varied(number)) for number in range(0, 8, 2)], compress=True)
    client.append([frame_of(varied(number)) for number in range(1, 8, 2)])
    codecs = [b"zstd" in cast(bytes, valkey.client.get(key)) for key in payload_keys(valkey, run)]
    assert sorted(codecs) == [False] * 4 + [True] * 4
    for step in range(2):
        for rank in range(world):
            body = bodies.fetch(step, epoch, rank)
            assert isinstance(body, memoryview)
            assert bytes(body) == client.fetch_batch(step, epoch, rank)
        run.ack(step, epoch)
        run.publish(step + 1, epoch)
    assert isinstance(body, memoryview)
    weighted = read_batch(body).micro_batches[0].sampling_weights is not None
    assert weighted == (strategy["name"] == "replay")
    assert (bodies.built, bodies.fallbacks) == (2 * world, 0)


def test_a_plan_is_the_same_after_a_restart_of_the_service(
    run: RunClient, client: Client, bodies: DirectBodies, serving: ServeProcess, valkey: Valkey
) -> None:
    """And so is its ETag, and the body built from it."""
    epoch = one_group(run, dp_world_size=2)
    path, headers = f"{run.path}/batches/0?epoch={epoch}&dp_rank=1", {"accept": MEDIA_TYPE}
    before, body = run.http.get(path, headers=headers), bodies.fetch(0, epoch, 1)
    serving.kill()
    serving.start()
    with Client(serving.url, run.run) as again, RunClient(serving.url, run.run).http as http:
        after = http.get(path, headers=headers)
        assert (after.content, after.headers["etag"]) == (before.content, before.headers["etag"])
        assert bodies.build(msgspec.json.decode(after.content, type=Plan)) == body == again.fetch_batch(0, epoch, 1)


def test_a_reader_in_direct_mode_returns_the_batches_of_the_run(run: RunClient, client: Client, valkey: Valkey) -> None:
    run.put(batch={"groups_per_batch": 1}, max_steps=2)
    attached = client.attach()
    run.append(group("a"), group("b"))
    options = ReaderOptions(poll_s=0.05, direct_redis_url=valkey.url)
    with BatchReader(client, attached.epoch, attached.step, options) as reader:
        for step, batch in enumerate(reader):
            assert batch.meta.step == step
            reader.ack()
            client.publish_policy(step + 1, attached.epoch)
        assert reader._direct is not None and reader._direct.built == 2


# ---------------------------------------------------------------------- the call


def test_the_accept_header_selects_the_plan(run: RunClient) -> None:
    """With an ETag of its own; who has it is answered 304. It tells each group's payload and checksum."""
    epoch = one_group(run)

    def ask(accept: str, **headers: str) -> Any:
        return run.http.get(f"{run.path}/batches/0", params={"epoch": epoch}, headers={"accept": accept} | headers)

    body, planned = ask("*/*"), ask(MEDIA_TYPE)
    assert body.headers["content-type"] == "application/vnd.safetensors"
    assert planned.headers["content-type"] == MEDIA_TYPE
    assert planned.headers["vary"] == body.headers["vary"] == "Accept, Accept-Encoding"
    assert planned.headers["etag"] != body.headers["etag"]
    again = ask(MEDIA_TYPE, **{"if-none-match": planned.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    reported = planned.json()
    assert reported["meta"] == msgspec.to_builtins(read_batch(body.content).meta)
    assert sorted(map(tuple, itertools.chain(*reported["rows"]))) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    (planned_group,) = reported["groups"]
    assert planned_group["group_id"] == "a" and planned_group["payload_key"].startswith("rb:p:")
    for accept in (f"{MEDIA_TYPE};q=0", f"application/vnd.safetensors, {MEDIA_TYPE};q=0.5"):
        assert ask(accept).headers["content-type"] == "application/vnd.safetensors"


def test_a_plan_waits_and_fails_like_a_body(run: RunClient, client: Client, bodies: DirectBodies) -> None:
    """202 with the reason, 409 for an older epoch, 410 after the end, 422 outside the world."""
    run.put(batch={"groups_per_batch": 1}, max_steps=1)
    epoch = client.attach().epoch
    waiting = bodies.fetch(0, epoch)
    assert isinstance(waiting, WaitingAnswer) and waiting.reason == "no_producers"
    run.append(group("a"))
    assert isinstance(client.fetch_plan(0, epoch), Plan)
    run.ack(0, epoch)
    with pytest.raises(RunFinished):
        bodies.fetch(1, epoch)
    with pytest.raises(Invalid):
        bodies.fetch(0, epoch, 1)
    client.attach()
    with pytest.raises(Fenced):
        bodies.fetch(0, epoch)


# ---------------------------------------------------------------------- never a wrong batch


@pytest.mark.parametrize("fault", ["missing", "flipped", "cut", "other", "empty"])
def test_a_frame_that_is_not_the_planned_one_is_never_trained_on(
    run: RunClient, client: Client, bodies: DirectBodies, valkey: Valkey, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """The body comes over HTTP instead, from the frames that the service checked, and the log says why."""
    epoch = one_group(run)
    right = client.fetch_batch(0, epoch)
    (key,) = payload_keys(valkey, run)
    frame = cast(bytes, valkey.client.get(key))
    run.append(group("b"))
    (other,) = set(payload_keys(valkey, run)) - {key}
    wrong = {
        "flipped": frame[:-1] + bytes([frame[-1] ^ 1]),
        "cut": frame[:-8],
        "other": cast(bytes, valkey.client.get(other)),
        "empty": b"",
    }
    if fault == "missing":
        valkey.client.delete(key)
    else:
        valkey.client.set(key, wrong[fault])
    assert bodies.fetch(0, epoch) == right
    assert (bodies.built, bodies.fallbacks) == (0, 1)
    assert "comes over HTTP" in caplog.text and key.decode() in caplog.text


def test_bodies_come_over_http_while_redis_is_unavailable(
    run: RunClient, client: Client, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not asked again for a while, so that a trainer does not wait for its timeout at every step."""
    epoch = one_group(run)
    bodies = DirectBodies(client, f"unix://{tmp_path}/none.sock")
    for _ in range(2):
        assert bodies.fetch(0, epoch) == client.fetch_batch(0, epoch)
    assert (bodies.built, bodies.fallbacks) == (0, 2)
    assert len([line for line in caplog.messages if "comes over HTTP" in line or "come over HTTP" in line]) == 1
    bodies.close()


def test_direct_mode_ignores_plans_of_another_release(
    run: RunClient, client: Client, bodies: DirectBodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bodies may be laid out otherwise: only it may write them."""
    epoch = one_group(run)
    monkeypatch.setattr(direct, "__version__", "0.0.0")
    plan = client.fetch_plan(0, epoch)
    assert isinstance(plan, Plan)
    with pytest.raises(Malformed, match="bodies may differ"):
        bodies.build(plan)
    assert bodies.fetch(0, epoch) == client.fetch_batch(0, epoch)
    assert bodies.fallbacks == 1


def test_direct_mode_needs_only_permission_to_read_payloads(run: RunClient, client: Client, valkey: Valkey) -> None:
    """As docs/trainers.md tells the operator to make it; it may neither write nor read anything else."""
    epoch = one_group(run)
    rules = ["on", ">secret", "resetkeys", "%R~rb:p:*", "resetchannels", "-@all", "+get"]
    valkey.client.execute_command("ACL", "SETUSER", "ranks", *rules)  # type: ignore[no-untyped-call]
    bodies = DirectBodies(client, f"unix://ranks:secret@{valkey.socket_path}")
    assert bodies.fetch(0, epoch) == client.fetch_batch(0, epoch)
    assert bodies.built == 1
    (key,) = payload_keys(valkey, run)
    for command in (("SET", key, b""), ("GET", "rb:runs"), ("DEL", key)):
        with pytest.raises(Exception, match=r"NOPERM|permission"):
            bodies._redis.execute_command(*command)  # type: ignore[no-untyped-call]
    bodies.close()


def test_metadata_that_is_no_json_is_null_in_answers(run: RunClient, valkey: Valkey) -> None:
    """A program that writes to Redis itself may store any msgpack."""
    run.put(batch={"groups_per_batch": 1, "tokens_per_batch": None})

    odd = frame_of(group("odd", rollouts=2, metadata={}))
    odd.metadata["at"] = msgspec.msgpack.Ext(1, b"x")
    frame = encode_frame(odd)

    async def write() -> None:
        store = await Store.open(valkey.url)
        try:
            await store.groups.append(
                run.run, [PendingGroup(odd, "odd", "", frame, stored_checksum(frame))], {"": 0}, time.time()
            )
        finally:
            await store.close()

    asyncio.run(write())
    epoch = run.attach(metadata=True)
    assert read_batch(run.batch(0, epoch, wait_ms=9_000).content).meta.group_metadata == [None]
    assert run.get("groups/odd").json()["metadata"] is None


def test_an_invalid_url_is_rejected_without_showing_its_password(client: Client) -> None:
    with pytest.raises(Invalid, match="redis_url") as caught:
        DirectBodies(client, "http://user:secret@host")
    assert "secret" not in str(caught.value)

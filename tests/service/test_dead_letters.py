"""Stored groups that turn out unusable never stop a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import redis

from replaybuf.client import AsyncClient, Client
from replaybuf.wire.batch import read_batch
from tests.conftest import RunClient, ServeProcess, group


def spoil(server: ServeProcess, group_id: str, frame: bytes | list[str] | None) -> None:
    """Replace the payload of a group behind the service's back, by a list too; None deletes it."""
    with redis.Redis(unix_socket_path=server.valkey_socket) as client:
        (key,) = client.keys(f"rb:p:{{*:{group_id}}}:*")
        client.delete(key)
        if isinstance(frame, list):
            client.rpush(key, *frame)
        elif frame is not None:
            client.set(key, frame)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (None, "missing_payload"),
        (["not", "a", "string"], "missing_payload"),
        (b"not a frame at all, but long enough", "broken_frame"),
    ],
)
def test_a_corrupt_payload_is_a_dead_letter_and_the_batch_does_without_it(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient], frame: bytes | list[str] | None, reason: str
) -> None:
    """The group is listed with its reason and counted; purging lets its bytes go, not the count."""
    run = connect(own_service.url, "r")
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("bad"), group("good"))
    spoil(own_service, "bad", frame)
    assert read_batch(run.batch(0, epoch).content).meta.group_ids == ["good"]
    (letter,) = run.get("dead-letters").json()["dead_letters"]
    assert (letter["group_id"], letter["state"], letter["reason"]) == ("bad", "dead_lettered", reason)
    assert run.http.delete(f"{run.path}/dead-letters").json() == {"purged": 1}
    assert run.get("dead-letters").json() == {"dead_letters": [], "next": None}
    assert run.get("groups/bad").json()["state"] == "dead_lettered"
    assert run.state()["groups"]["dead_lettered"] == 1


def test_dead_letters_come_in_pages_and_both_clients_read_and_purge_them(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """A direct writer with a fault can leave a million of them."""
    run = connect(own_service.url, "r")
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(*(group(name) for name in ("a", "b", "c", "good")))
    for name in "abc":
        spoil(own_service, name, None)
    assert run.batch(0, epoch).status_code == 200
    pages, after = [], 0
    with Client(own_service.url, "r") as client:
        for _ in range(2):
            listed = client.list_dead_letters(limit=2, after=after)
            pages.append([letter.group_id for letter in listed.dead_letters])
            after = listed.next or 0
    assert pages == [["a", "b"], ["c"]] and after == 0

    async def purge() -> int:
        async with AsyncClient(own_service.url, "r") as client:
            assert len((await client.list_dead_letters()).dead_letters) == 3
            return await client.purge_dead_letters()

    assert asyncio.run(purge()) == 3
    assert run.get("dead-letters").json() == {"dead_letters": [], "next": None}
    refused = run.get("dead-letters", limit=0)
    assert (refused.status_code, refused.json()["name"]) == (422, "limit")


def batch_with_a_broken_group(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> tuple[RunClient, int]:
    """Serve a batch of the groups "bad" and "fine", break the frame of "bad", start the service again."""
    run = connect(own_service.url, "r")
    run.put(batch={"groups_per_batch": 2})
    epoch = run.attach()
    run.append(group("bad"), group("fine"), group("more"))
    assert run.batch(0, epoch).status_code == 200
    with redis.Redis(unix_socket_path=own_service.valkey_socket) as client:
        (key,) = client.keys("rb:p:{*:bad}:*")
        last = 8 * client.strlen(key) - 1
        client.setbit(key, last, 1 - client.getbit(key, last))
    own_service.kill()
    return connect(own_service.start().url, "r"), epoch


def test_a_frame_that_breaks_after_assembly_is_a_dead_letter_with_a_reason(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """410 says what to do: other bytes than those that were trained on are never served; a resample does without it."""
    run, epoch = batch_with_a_broken_group(own_service, connect)
    for _ in range(2):
        response = run.batch(0, epoch)
        assert (response.status_code, response.json()["value"]) == (410, "bad")
        assert "bad_checksum; attach with on_resume = resample at step 0" in response.json()["detail"]
    (letter,) = run.get("dead-letters").json()["dead_letters"]
    reported = ("group_id", "state", "reason", "batches")
    assert [letter[name] for name in reported] == ["bad", "dead_lettered", "bad_checksum", [0]]
    assert [record["type"] for record in run.get("ledger").json()["records"]].count("DEAD_LETTER") == 1
    assert "batch cannot be served run=r step=0" in own_service.log()
    assert counts(run) == {"stored": 3, "live": 1, "in_batches": 1, "retired": 0, "dead_lettered": 1}
    epoch = run.attach(resume_step=0, on_resume="resample")
    assert read_batch(run.batch(0, epoch).content).meta.group_ids == ["fine", "more"]
    assert run.http.delete(f"{run.path}/dead-letters").json() == {"purged": 1}
    assert counts(run) == {"stored": 3, "live": 0, "in_batches": 2, "retired": 0, "dead_lettered": 1}


def test_a_broken_group_of_an_acked_batch_stays_a_dead_letter(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """It is not retired with the others, and its bytes are the operator's to let go."""
    run, epoch = batch_with_a_broken_group(own_service, connect)
    assert run.batch(0, epoch).status_code == 410
    assert run.http.delete(f"{run.path}/dead-letters").json() == {"purged": 0}
    assert run.ack(0, epoch).status_code == 200
    assert run.post("checkpoints", epoch=epoch, step=1).status_code == 200
    assert counts(run) == {"stored": 3, "live": 1, "in_batches": 0, "retired": 1, "dead_lettered": 1}
    assert run.http.delete(f"{run.path}/dead-letters").json() == {"purged": 1}


def counts(run: RunClient) -> dict[str, int]:
    """Where the groups stand, but for evicted ones."""
    groups = run.state()["groups"]
    return {name: groups[name] for name in ("stored", "live", "in_batches", "retired", "dead_lettered")}

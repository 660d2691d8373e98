"""Stored groups that turn out unusable never stop a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from replaybuf.batch import read_batch
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
def test_a_spoiled_payload_is_set_aside_and_the_batch_goes_on_without_it(
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
    assert run.get("dead-letters").json() == {"dead_letters": []}
    assert run.get("groups/bad").json()["state"] == "dead_lettered"
    assert run.state()["groups"]["dead_lettered"] == 1


def test_a_flipped_bit_in_redis_is_found_by_its_checksum(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """The checksum of the frame tells."""
    run = connect(own_service.url, "r")
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("bad"))
    with redis.Redis(unix_socket_path=own_service.valkey_socket) as client:
        (key,) = client.keys("rb:p:{*:bad}:*")
        last = 8 * client.strlen(key) - 1
        client.setbit(key, last, 1 - client.getbit(key, last))
    assert run.batch(0, epoch).json()["reason"] == "no_producers"
    assert run.get("dead-letters").json()["dead_letters"][0]["reason"] == "bad_checksum"


def test_a_frame_that_broke_after_its_batch_was_made_is_named_with_its_reason(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """410: other bytes than those that were trained on are never served; a resample does without the group."""
    run = connect(own_service.url, "r")
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("bad"), group("good"))
    assert run.batch(0, epoch).status_code == 200
    with redis.Redis(unix_socket_path=own_service.valkey_socket) as client:
        (key,) = client.keys("rb:p:{*:bad}:*")
        last = 8 * client.strlen(key) - 1
        client.setbit(key, last, 1 - client.getbit(key, last))
    own_service.kill()
    run = connect(own_service.start().url, "r")
    response = run.batch(0, epoch)
    assert (response.status_code, response.json()["value"]) == (410, "bad")
    assert "bad_checksum" in response.json()["detail"]
    epoch = run.attach(resume_step=0, on_resume="resample")
    assert read_batch(run.batch(0, epoch).content).meta.group_ids == ["good"]

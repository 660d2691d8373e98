"""Values in Redis that no service wrote: a run with them is left aside and named, the others are served."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import redis

from replaybuf.store import keys
from tests.conftest import RunClient, ServeProcess, group
from tests.waiting import eventually

Spoil = Callable[[redis.Redis, str], object]


def of_another_type(key: Callable[[str], str]) -> Spoil:
    def spoil(client: redis.Redis, run: str) -> None:
        name = key(run)
        with client.pipeline() as at_once:  # an absent key would be lost data
            if client.type(name) in {b"string", b"none"}:
                at_once.delete(name)
                at_once.rpush(name, "x")
            else:
                at_once.set(name, "x")
            at_once.execute()

    return spoil


def counter(value: str) -> Spoil:
    return lambda client, run: client.hset(keys.counts(run), "rejected:x", value)


def deadline(client: redis.Redis, run: str) -> None:
    client.zadd(keys.tickets(run), {"p7": float("inf")})


def spill_url(client: redis.Redis, run: str) -> None:
    client.hset(keys.spill(run), mapping={"url": "memory://x", "folder": f"{run}-0123456789abcdef"})


def spill_folder_of_another_run(client: redis.Redis, run: str) -> None:
    url = client.hget(keys.spill(run), "url") or b"file:///tmp"
    client.hset(keys.spill(run), mapping={"url": url, "folder": "other-0123456789abcdef"})


SPOILS: dict[str, Spoil] = {
    "index": of_another_type(keys.index),
    "ledger": of_another_type(keys.ledger),
    "ids": of_another_type(keys.group_ids),
    "prompts": of_another_type(lambda run: keys.prompts_done(run, "")),
    "snapshot": of_another_type(keys.snapshot),
    "counts": of_another_type(keys.counts),
    "tickets": of_another_type(keys.tickets),
    "spill": of_another_type(keys.spill),
    "samples": of_another_type(keys.samples),
    "fence": of_another_type(keys.fence),
    "lease": of_another_type(keys.lead),
    "incarnation": of_another_type(keys.incarnation),
    "incarnations": lambda client, run: client.set(keys.incarnation(run), "many"),
    "word": counter("many"),
    "share": counter("0.5"),
    "digits": counter("9" * 30),
    "deadline": deadline,
    "url": spill_url,
    "folder": spill_folder_of_another_run,
}


def make_runs(service: ServeProcess, connect: Callable[[str, str], RunClient], names: Iterable[str]) -> None:
    folder = f"file://{service.data_dir}/spill"
    for name in names:
        run = connect(service.url, name)
        limits = {"max_bytes_in_memory": 1 << 20, "max_group_bytes": 1 << 20}
        run.put(batch={"groups_per_batch": 1}, limits=limits, spill={"url": folder})
        run.append(group("g"))


def await_unreadable(good: RunClient, names: Iterable[str]) -> None:
    eventually(lambda: {*names} ^ good.http.get("/readyz").json()["unreadable"].keys(), 60.0, lambda others: not others)


def test_a_run_with_strange_values_does_not_stop_the_server(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """Each is named in /readyz and once in the log. A cursor that does not decode is left out, and its run served."""
    make_runs(own_service, connect, ("good", "cursor", *SPOILS))
    own_service.kill()
    with redis.Redis(unix_socket_path=own_service.valkey_socket) as client:
        for name, spoil in SPOILS.items():
            spoil(client, name)
        client.hset(keys.cursors("cursor"), "x", b"\xc1")
        own_service.start()
        good = connect(own_service.url, "good")
        await_unreadable(good, SPOILS)
        ready = good.http.get("/readyz")
        assert (ready.status_code, ready.json()["runs"]) == (200, ["cursor", "good"])
        assert good.train(good.attach(), range(1))
        for name, why in ready.json()["unreadable"].items():
            assert why.startswith(f"run {name} cannot be read: ")
            assert own_service.log().count(why) == 1


def test_values_that_become_strange_while_a_run_is_served_stop_that_run_alone(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    spoiled = ("index", "ledger", "lease", "fence", "ids")
    make_runs(own_service, connect, ("good", *spoiled))
    good = connect(own_service.url, "good")
    epoch = good.attach()
    with redis.Redis(unix_socket_path=own_service.valkey_socket) as client:
        for name in spoiled:
            SPOILS[name](client, name)
        await_unreadable(good, spoiled)
    assert good.train(epoch, range(1))
    assert good.post("groups", groups=[group("h")]).status_code == 200


def test_a_deleted_run_with_strange_values_is_named_until_its_keys_are_gone(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """Its payloads cannot be listed, so its keys stay; a silent retry would look like a finished deletion."""
    make_runs(own_service, connect, ("good", "bad"))
    own_service.kill()
    with redis.Redis(unix_socket_path=own_service.valkey_socket) as client:
        client.set(keys.deleted("bad"), "deleting:0123456789abcdef")
        client.sadd(keys.DELETING, "bad")
        client.hset(keys.counts("bad"), "column:x", "many")
        own_service.start()
        await_unreadable(connect(own_service.url, "good"), ["bad"])
        client.hset(keys.counts("bad"), "column:x", "1")
        eventually(lambda: not client.exists(keys.counts("bad")), 60.0)
    eventually(lambda: "run deleted run=bad" in own_service.log(), 60.0)

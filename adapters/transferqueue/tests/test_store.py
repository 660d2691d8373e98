"""The store: durable pieces, fencing, lost data, and values that stay while a checkpoint may name them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from replaybuf.errors import DataLost, Fenced, Invalid, NotDurable, ServiceUnavailable
from replaybuf_transferqueue.settings import Settings, read_settings
from replaybuf_transferqueue.store import Piece, Range, Store
from tests.valkeys import Valkey

Open = Callable[..., Store]


def put(store: Store, sample: int, value: bytes) -> str:
    piece = store.new_id()
    store.put([Piece(piece, sample, b'["p",0,null,"",{"f":[0,1,0]}]', value)])
    return piece


def values_held(valkey: Valkey) -> int:
    return len(valkey.client.keys("*:v:*"))


def test_an_acknowledged_put_survives_a_kill_of_the_server(valkey: Valkey, open_store: Open) -> None:
    store = open_store()
    pieces = {put(store, n, b"%d" % n): b"%d" % n for n in range(50)}
    valkey.kill()
    valkey.start()
    values = store.read([Range(piece, 0, len(value)) for piece, value in pieces.items()])
    assert [bytes(value or b"") for value in values] == list(pieces.values())
    assert store.lengths([*pieces, "absent"])[-1] == 0
    assert all(valkey.client.ttl(key) == -1 for key in valkey.client.keys("*:v:*"))


def test_a_put_waits_for_a_server_that_comes_back(valkey: Valkey, open_store: Open) -> None:
    store = open_store()
    valkey.kill()
    done = threading.Event()
    writer = threading.Thread(target=lambda: (put(store, 1, b"x"), done.set()))
    writer.start()
    valkey.start()
    writer.join()
    assert done.is_set() and values_held(valkey) == 1


def test_a_server_that_stays_away_is_named(valkey: Valkey, open_store: Open) -> None:
    store = open_store(timeout_s=0.2)
    valkey.kill()
    with pytest.raises(ServiceUnavailable, match=r"'transferqueue' did not answer for 0.2 s"):
        put(store, 1, b"x")
    valkey.start()


def test_a_repeated_put_changes_nothing(valkey: Valkey, open_store: Open) -> None:
    store = open_store()
    piece = Piece(store.new_id(), 1, b"{}", b"x")
    store.put([piece])
    store.put([piece])
    assert store.at() == {1: [piece.id]} and valkey.client.ttl(f"rbtq:{{transferqueue}}:v:{piece.id}") == -1


def test_reads_return_what_was_asked_and_nothing_for_what_is_absent(open_store: Open) -> None:
    store = open_store()
    first, second = put(store, 1, b"abcdef"), put(store, 2, b"ghi")
    wanted = [Range(second, 1, 2), Range(first, 0, 2), Range("absent", 0, 1), Range(first, 2, 3), Range(first, 5, 9)]
    assert [value and bytes(value) for value in store.read(wanted)] == [b"hi", b"ab", None, b"cde", None]


def test_an_older_session_can_change_nothing(valkey: Valkey, open_store: Open) -> None:
    older = open_store()
    mine = put(older, 5, b"old")
    newer = open_store()
    calls: list[Callable[[], Any]] = [
        lambda: put(older, 6, b"late"),
        lambda: older.clear([5]),
        lambda: older.begin_checkpoint("c"),
        lambda: older.adopt([]),
        lambda: older.retire([mine]),
    ]
    for call in calls:
        with pytest.raises(Fenced, match="belongs to session 1; session 2 took over"):
            call()
    assert newer.at() == {5: [mine]} and not newer.checkpoints()
    assert values_held(valkey) == 1  # the late value is gone


@pytest.mark.parametrize("loss", ["emptied", "older"])
def test_a_server_that_lost_acknowledged_data_is_not_written_to(valkey: Valkey, open_store: Open, loss: str) -> None:
    store = open_store()
    put(store, 1, b"x")
    if loss == "emptied":
        valkey.client.flushall()
        valkey.client.function_flush()
    else:
        valkey.client.hincrby("rbtq:{transferqueue}:state", "changes", -1)
    with pytest.raises(DataLost, match="lost acknowledged data"):
        put(store, 2, b"y")
    assert loss == "older" or not valkey.client.exists("rbtq:{transferqueue}:state")


def test_a_cleared_sample_goes_at_once_without_checkpoints(valkey: Valkey, open_store: Open) -> None:
    store = open_store()
    put(store, 1, b"x")
    put(store, 1, b"y")
    keep = put(store, 2, b"z")
    store.clear([1, 77])
    assert store.at() == {2: [keep]} and values_held(valkey) == 1 and len(store.records()) == 1


def test_a_value_stays_until_no_kept_checkpoint_may_name_it(valkey: Valkey, open_store: Open) -> None:
    store = open_store()  # keeps two checkpoints
    named, during, after = put(store, 1, b"named"), "", ""
    store.begin_checkpoint("first")
    during = put(store, 2, b"during")
    store.clear([2])  # the controller's copy may be older than this
    store.finish_checkpoint("first")
    after = put(store, 3, b"after")
    store.clear([1, 3])
    assert store.lengths([named, during, after]) == [5, 6, 0]
    for name in ("second", "third"):
        store.begin_checkpoint(name)
        assert store.lengths([named, during]) == [5, 6]
        store.finish_checkpoint(name)
    assert store.checkpoints() == ["second", "third"] or set(store.checkpoints()) == {"second", "third"}
    assert values_held(valkey) == 0 and not store.records() and not store.deaths()


def test_a_checkpoint_that_was_given_up_keeps_nothing(valkey: Valkey, open_store: Open) -> None:
    store = open_store()
    put(store, 1, b"x")
    store.begin_checkpoint("killed")
    store.clear([1])
    assert values_held(valkey) == 1
    store.begin_checkpoint("next")
    store.finish_checkpoint("next")
    assert values_held(valkey) == 0 and store.checkpoints() == ["next"]


def test_a_key_that_is_put_again_and_again_does_not_fill_the_server(valkey: Valkey, open_store: Open) -> None:
    store = open_store()
    other = store.new_id()
    store.put([Piece(other, 1, b'["p",1,null,"",{"other":[0,1,0]}]', b"o")])
    for number in range(100):
        newest = put(store, 1, b"%d" % number)
    assert values_held(valkey) <= 18 and store.lengths([other, newest]) == [1, 2]


def test_thousands_of_pieces_go_and_come_in_chunks(open_store: Open) -> None:
    store = open_store()
    pieces = [Piece(store.new_id(), n, b"{}", b"%d" % n) for n in range(1300)]
    store.put(pieces)
    store.adopt([(piece.id, piece.sample + 1) for piece in pieces])
    assert store.at() == {piece.sample + 1: [piece.id] for piece in pieces}
    store.clear(range(2000))
    assert not store.at() and not store.records()


def test_a_server_that_can_lose_writes_is_refused(valkey: Valkey) -> None:
    valkey.client.config_set("appendfsync", "no")
    with pytest.raises(NotDurable, match="appendfsync is no: a killed server loses acknowledged values"):
        Store(Settings(url=valkey.url))
    Store(Settings(url=valkey.url, durability="relaxed")).close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keep_checkpoints": 1}, "keep_checkpoints is 1; the minimum is 2"),
        ({"name": "a{b"}, "name is 'a{b'"),
        ({"url": "redis://user:secret@host"}, "url has a password, and TransferQueue logs it"),
        ({"colour": 1}, "colour.*the settings are url, name"),
        ({"timeout_s": 0}, "timeout_s is 0"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message) as caught:
        read_settings(wrong)
    assert "secret" not in str(caught.value)


def test_a_missing_url_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPLAYBUF_TRANSFERQUEUE_URL", raising=False)
    with pytest.raises(Invalid, match=r"set backend.Replaybuf.url or \$REPLAYBUF_TRANSFERQUEUE_URL"):
        Store(Settings())

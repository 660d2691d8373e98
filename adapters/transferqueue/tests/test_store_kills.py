"""kill -9 of a writer and of Valkey inside and between puts: the store holds all that was acknowledged, and no more."""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from pathlib import Path

import pytest

from replaybuf_transferqueue.settings import Settings
from replaybuf_transferqueue.store import Piece, Range, Store
from tests.valkeys import Valkey


def write_until_killed(url: str, session: int, round_: int, journal: Path) -> None:
    """Put and clear; note each call before and after."""
    rng, store = random.Random(round_), Store(Settings(url=url, session=session, timeout_s=20.0))
    with journal.open("ab", buffering=0) as file:
        alive: list[int] = []
        for number in range(1 << 30):
            if alive and rng.random() < 0.3:
                sample = alive.pop(rng.randrange(len(alive)))
                file.write(f"clearing {sample}\n".encode())
                store.clear([sample])
                file.write(f"cleared {sample}\n".encode())
            first = (round_ << 20) + 8 * number
            samples = range(first, first + rng.choice([1, 8]))
            values = [os.urandom(rng.randrange(1, 1 << 16)) for _ in samples]
            ids = [store.new_id() for _ in samples]
            store.put([Piece(*parts) for parts in zip(ids, samples, [b"{}"] * len(ids), values, strict=True)])
            for sample, id_, value in zip(samples, ids, values, strict=True):
                file.write(f"put {sample} {id_} {len(value)} {zlib.crc32(value)}\n".encode())
            alive += samples


@pytest.mark.timeout(3600)
def test_the_store_holds_all_that_was_acknowledged(valkey: Valkey, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    rng, journal = random.Random(3), tmp_path / "journal"
    kills, acknowledged = 20 * int(pytestconfig.getoption("--kills")), 0
    for round_ in range(kills):
        opener = Store(Settings(url=valkey.url, timeout_s=20.0))
        session, _ = opener.open()
        opener.close()
        journal.write_bytes(b"")
        writer = os.fork()
        if writer == 0:
            try:
                write_until_killed(valkey.url, session, round_, journal)
            finally:
                os._exit(1)
        while not journal.stat().st_size:
            assert os.waitpid(writer, os.WNOHANG) == (0, 0)
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.1))  # the moment is the point of the test
        first, second = rng.choice([(writer, valkey.pid), (valkey.pid, writer)])
        if rng.random() < 0.5:
            os.kill(first, signal.SIGKILL)
            time.sleep(rng.uniform(0.0, 0.01))
            os.kill(second, signal.SIGKILL)
        else:
            os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        valkey.kill()
        valkey.start()
        acknowledged += check(valkey, journal)
    print(f"\n{kills} kills, {acknowledged} acknowledged values, 0 lost, 0 wrong")


def check(valkey: Valkey, journal: Path) -> int:
    """Compare the store with the journal of the newest writer; return how many values were compared."""
    store = Store(Settings(url=valkey.url, timeout_s=20.0))
    # The kill may have cut the last line.
    lines = [line.split() for line in journal.read_text().splitlines(keepends=True) if line.endswith("\n")]
    puts = {int(line[1]): (line[2], int(line[3]), int(line[4])) for line in lines if line[0] == "put"}
    cleared, clearing = ({int(line[1]) for line in lines if line[0] == word} for word in ("cleared", "clearing"))
    at, records = store.at(), store.records()
    expected = {sample: put for sample, put in puts.items() if sample not in clearing}
    values = store.read([Range(id_, 0, length) for id_, length, _ in expected.values()])
    for (sample, (id_, _, crc)), value in zip(expected.items(), values, strict=True):
        assert at.get(sample) == [id_] and value is not None and zlib.crc32(value) == crc, sample
    assert not cleared & at.keys()
    # What the index names is there and stays, also of a put that was not acknowledged.
    named = [id_ for ids in at.values() for id_ in ids]
    assert set(named) == records.keys() and all(store.lengths(named))
    assert all(valkey.client.ttl(f"rbtq:{{transferqueue}}:v:{id_}") == -1 for id_ in named)
    store.close()
    return len(expected)

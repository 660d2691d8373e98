"""Spill: a buffer larger than its memory, on real processes; nothing is lost, whatever happens to the folder."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from replaybuf.client.client import Client
from replaybuf.client.direct import DirectBodies
from replaybuf.store.spill_folder import MARK
from replaybuf.wire.batch import read_batch
from replaybuf.wire.spill import MAGIC
from tests.conftest import RunClient, ServeProcess, Starter, group
from tests.service.test_restart import valkey_of
from tests.valkeys import Valkey
from tests.waiting import eventually

Connect = Callable[[str, str], RunClient]
FRAME_BYTES = 19_232
"""Of a group with 2 rollouts of 1,000 tokens."""
LIMIT = 10 * FRAME_BYTES
GROUPS = 100


class DyingServe(ServeProcess):
    """A service that kills itself in the middle of a move."""

    module = "tests.spill_kill"

    def wait(self) -> int:
        """Wait until it is dead; return its exit code."""
        return self._wait()


def soon(check: Callable[[], object]) -> None:
    """Wait until a check holds, also on a busy machine."""
    eventually(check, 30.0)


def stored(run: RunClient, number: int) -> None:
    """Append a group, as a producer that retries after 429."""
    soon(lambda: run.post("groups", groups=[large(number)]).status_code == 200)


def large(number: int) -> dict[str, Any]:
    return group(f"g{number}", tokens=1000)


def begin(run: RunClient, folder: Path | None, **config: Any) -> int:
    """Create a run whose frames spill into a folder, and attach."""
    spills = {} if folder is None else {"spill": {"url": f"file://{folder}"}}
    limits = {"max_group_bytes": 60_000} | ({} if folder is None else {"max_bytes_in_memory": LIMIT})
    answer = run.put(
        batch={"groups_per_batch": 5, "tokens_per_batch": None},
        strategy={"name": "one-step-off-policy", "options": {"max_staleness": 1000}},
        limits=limits,
        **spills,
        **config,
    )
    assert answer.status_code == 201, answer.text
    return run.attach()


def fill(run: RunClient, count: int = GROUPS) -> None:
    """Append groups one by one."""
    for number in range(count):
        stored(run, number)


def files(folder: Path) -> list[Path]:
    """List the files of frames. A folder that the service deletes meanwhile has none, where `rglob` raises."""
    return [Path(at, name) for at, _, names in os.walk(folder) for name in names if name != MARK]


def conserved(run: RunClient) -> bool:
    counts = run.state()["groups"]
    evicted = sum(counts["evicted"].values())
    return bool(
        counts["stored"]
        == counts["live"] + counts["in_batches"] + counts["retired"] + evicted + counts["dead_lettered"]
    )


def trained(service: ServeProcess, folder: Path | None) -> tuple[RunClient, list[bytes]]:
    """Fill a run and train it to its end; return the bodies."""
    run = RunClient(service.url, "r")
    epoch = begin(run, folder)
    fill(run)
    if folder:
        spill = run.state()["spill"]
        assert spill["bytes_in_memory"] <= LIMIT and spill["groups"] >= GROUPS - 10 and spill["failing"] is None
        with redis.Redis(unix_socket_path=service.valkey_socket) as client:
            payloads = [bytes(client.get(key) or b"") for key in client.keys("rb:p:*")]
        stubs = sum(payload.startswith(MAGIC) for payload in payloads)
        assert stubs >= GROUPS - 10 and sum(map(len, payloads)) < 1.1 * LIMIT
    return run, run.train(epoch, range(GROUPS // 5))


def test_a_buffer_ten_times_its_memory_trains_to_the_same_bytes(
    own_service: ServeProcess, tmp_path: Path, started: Starter
) -> None:
    """As the same run without spill does, step by step. Deleting the run deletes its folder."""
    folder = tmp_path / "spill"
    run, spilled = trained(own_service, folder)
    other = started(ServeProcess(tmp_path / "other"))
    plain_run, plain = trained(other, None)
    plain_run.http.close()
    assert spilled == plain
    assert run.http.patch(run.path, json={"state": "finished"}).status_code == 200
    assert run.http.delete(run.path).status_code == 204
    soon(lambda: not any(folder.iterdir()))
    run.http.close()


def test_late_columns_of_spilled_groups_are_in_their_batches(
    own_service: ServeProcess, connect: Connect, tmp_path: Path
) -> None:
    """A column may come before its group is moved, or after; it moves with its group, or later."""
    bodies = []
    for name, folder in (("spilled", tmp_path / "spill"), ("plain", None)):
        run = connect(own_service.url, name)
        epoch = begin(run, folder)
        for number in range(20):
            stored(run, number)
            if number >= 10:
                add_column(run, number)
        if folder:
            assert run.state()["spill"]["groups"] >= 10
        for number in range(10):
            add_column(run, number)
        rows = [row for body in run.train(epoch, range(4)) for row in read_batch(body).micro_batches]
        columns = [row.ref_logprobs for row in rows if row.ref_logprobs is not None and row.ref_logprobs.any()]
        assert len(columns) == len(rows)
        bodies.append([(row.input_ids.tobytes(), column.tobytes()) for row, column in zip(rows, columns, strict=True)])
    assert bodies[0] == bodies[1]


def add_column(run: RunClient, number: int) -> None:
    """Add a column, as a stage that retries after 429."""
    values = [[-float(number) - rollout / 2] * 998 for rollout in range(2)]
    answers: list[int] = []

    def added() -> bool:
        reply = run.http.put(f"{run.path}/groups/g{number}/columns", json={"columns": {"ref_logprobs": values}})
        answers.append(reply.status_code)
        return reply.status_code == 200

    soon(added)
    assert set(answers) <= {200, 429}


def test_late_columns_count_where_they_are_and_go_with_their_groups(
    own_service: ServeProcess, connect: Connect, tmp_path: Path
) -> None:
    """With a column for each of 100 groups Redis holds no more than the limit, also after a restart."""
    run = connect(own_service.url, "r")
    epoch = begin(run, tmp_path / "spill")
    fill(run)
    for number in range(GROUPS):
        add_column(run, number)
    use = run.state()["spill"]  # first: frames move on, so Redis holds less later
    with redis.Redis(unix_socket_path=own_service.valkey_socket) as client:
        held = sum(len(client.get(key) or b"") for key in client.keys("rb:p:*"))
    stubs = 2 * GROUPS * 100
    assert held <= LIMIT + stubs
    assert held - stubs <= use["bytes_in_memory"] <= LIMIT
    own_service.kill()
    run = connect(own_service.start().url, "r")
    soon(lambda: run.state()["spill"]["bytes_in_memory"] <= LIMIT)
    again = run.state()["spill"]
    assert again["bytes"] + again["bytes_in_memory"] == use["bytes"] + use["bytes_in_memory"]
    run.train(epoch, range(GROUPS // 5))
    assert run.post("checkpoints", epoch=epoch, step=GROUPS // 5).status_code == 200
    soon(lambda: files(tmp_path / "spill") == [])
    assert run.state()["groups"]["dead_lettered"] == 0


def test_a_checkpoint_deletes_the_files_of_used_groups(
    own_service: ServeProcess, connect: Connect, tmp_path: Path
) -> None:
    run = connect(own_service.url, "r")
    epoch = begin(run, tmp_path / "spill")
    fill(run, 40)
    run.train(epoch, range(4))
    assert run.post("checkpoints", epoch=epoch, step=4).status_code == 200
    soon(lambda: len(files(tmp_path / "spill")) == run.state()["spill"]["groups"] <= 20)
    run.train(epoch, range(4, 8))
    assert conserved(run)


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_during_moves_loses_no_group_and_leaves_no_file(
    own_service: ServeProcess, connect: Connect, tmp_path: Path, seed: int
) -> None:
    """Of the service alone, and of Valkey with it, between two appends at random."""
    random_ = random.Random(seed)
    run = connect(own_service.url, "r")
    epoch = begin(run, tmp_path / "spill")
    kills = set(random_.sample(range(10, 60), 4))
    for number in range(60):
        stored(run, number)
        if number in kills:
            own_service.kill()
            if random_.random() < 0.5:
                valkey_of(own_service.data_dir).kill()
            run = connect(own_service.start().url, "r")
    assert run.state()["groups"]["stored"] == 60
    bodies = run.train(epoch, range(12))
    assert sorted(name for body in bodies for name in read_batch(body).meta.group_ids) == sorted(
        f"g{number}" for number in range(60)
    )
    assert run.post("checkpoints", epoch=epoch, step=12).status_code == 200
    soon(lambda: files(tmp_path / "spill") == [])
    assert conserved(run) and run.state()["groups"]["dead_lettered"] == 0


@pytest.mark.parametrize("point", ["written", "recorded"])
def test_a_service_that_dies_within_a_move_leaves_each_frame_in_one_place(
    tmp_path: Path, connect: Connect, point: str
) -> None:
    """After the files are durable, and after Redis has their stubs: a frame is in Redis or in a file, never in none."""
    server = DyingServe(tmp_path / "data")
    server.environment["KILL_AT"] = point
    server.start()
    try:
        run = connect(server.url, "r")
        epoch = begin(run, tmp_path / "spill")
        sent = 0
        with contextlib.suppress(httpx.TransportError):
            while run.post("groups", groups=[large(sent)]).status_code == 200 and sent < 50:
                sent += 1
        assert server.wait() == -signal.SIGKILL and sent < 50
        assert files(tmp_path / "spill")
        del server.environment["KILL_AT"]
        run = connect(server.start().url, "r")
        for number in range(sent, 50):
            stored(run, number)
        bodies = run.train(epoch, range(10))
        trained = sorted(name for body in bodies for name in read_batch(body).meta.group_ids)
        assert trained == sorted(f"g{number}" for number in range(50))
        assert run.post("checkpoints", epoch=epoch, step=10).status_code == 200
        soon(lambda: files(tmp_path / "spill") == [])
        assert conserved(run)
    finally:
        server.end()


def test_a_standby_on_the_same_folder_takes_over(tmp_path: Path, connect: Connect) -> None:
    """It follows the stubs of the server before it, moves more frames, and deletes the files."""
    with Valkey(tmp_path / "valkey") as valkey:
        servers = [
            ServeProcess(tmp_path / name, "--redis-url", valkey.url, "--no-balance").start()
            for name in ("first", "second")
        ]
        try:
            run = connect(servers[0].url, "r")
            epoch = begin(run, tmp_path / "spill")
            fill(run, 30)
            run.train(epoch, range(1))
            assert run.state()["spill"]["groups"] > 10
            servers[0].kill()
            run = connect(servers[1].url, "r")
            for number in range(30, 40):
                stored(run, number)
            run.train(epoch, range(1, 8))
            assert run.post("checkpoints", epoch=epoch, step=8).status_code == 200
            soon(lambda: files(tmp_path / "spill") == [])
            assert conserved(run) and run.state()["groups"]["dead_lettered"] == 0
        finally:
            for server in servers:
                server.end()


def test_files_that_nothing_names_are_deleted_when_their_groups_are_freed(
    own_service: ServeProcess, connect: Connect, tmp_path: Path
) -> None:
    """Not before: another history may name them. A group that this history does not have is not freed."""
    run = connect(own_service.url, "r")
    epoch = begin(run, tmp_path / "spill")
    fill(run, 20)
    soon(lambda: len(files(tmp_path / "spill")) == run.state()["spill"]["groups"] > 0)
    (folder,) = {path.parent for path in files(tmp_path / "spill")}
    left = {"1-0123456789abcdef", "20-0123456789abcdef.01234567.new", "2-0123456789abcdef.new"}
    unknown = "21-0123456789abcdef"
    for name in (*left, unknown):
        (folder / name).write_bytes(b"left by a crash")
    own_service.kill()
    run = connect(own_service.start().url, "r")
    soon(lambda: "deleted run=r files=" in own_service.log())
    assert left <= {path.name for path in files(tmp_path / "spill")}
    run.train(epoch, range(4))
    assert run.post("checkpoints", epoch=epoch, step=4).status_code == 200
    soon(lambda: [path.name for path in files(tmp_path / "spill")] == [unknown])


@pytest.mark.parametrize("moment", range(3))
def test_an_older_redis_that_is_opened_for_a_moment_costs_no_frame(
    tmp_path: Path, connect: Connect, moment: int
) -> None:
    """By a service that knows nothing of the newer one. The right Redis is put back, and every group is trained."""
    with Valkey(tmp_path / "valkey") as valkey, Valkey(tmp_path / "older") as older:
        server = ServeProcess(tmp_path / "right", "--redis-url", valkey.url).start()
        other = ServeProcess(tmp_path / "fresh", "--redis-url", older.url)
        try:
            run = connect(server.url, "r")
            epoch = begin(run, tmp_path / "spill")
            fill(run, 20 + moment)
            older.kill()
            shutil.rmtree(older.folder)
            shutil.copytree(valkey.folder, older.folder)
            for number in range(20 + moment, 60):
                stored(run, number)
            soon(lambda: len(files(tmp_path / "spill")) == run.state()["spill"]["groups"] > 40)
            server.kill()
            older.start()
            other.start()
            soon(lambda: "deleted run=r files=" in other.log())
            other.kill()
            run = connect(server.start().url, "r")
            soon(lambda: run.batch(0, epoch).status_code == 200)  # the lease of the killed server may still hold
            bodies = run.train(epoch, range(12))
            trained = {name for body in bodies for name in read_batch(body).meta.group_ids}
            assert trained == {f"g{number}" for number in range(60)}
            assert run.state()["groups"]["dead_lettered"] == 0
        finally:
            for process in (server, other):
                process.end()


def test_without_its_folder_nothing_is_lost_and_it_goes_on_when_the_folder_is_back(
    own_service: ServeProcess, connect: Connect, tmp_path: Path
) -> None:
    """Appends get 429 at the limit, batches with spilled frames 503, and no group becomes a dead letter."""
    folder = tmp_path / "spill"
    run = connect(own_service.url, "r")
    epoch = begin(run, folder)
    fill(run, 30)
    soon(lambda: run.state()["spill"]["groups"] > 20)
    folder.rename(tmp_path / "away")
    answers: list[int] = []

    def refused() -> bool:
        answer = run.post("groups", groups=[large(30 + len(answers))])
        answers.append(answer.status_code)
        return answer.status_code == 429

    soon(refused)
    assert run.batch(0, epoch).status_code == 200  # the first groups were drawn first, so they are in memory still
    assert run.ack(0, epoch).status_code == 200 and run.publish(1, epoch).status_code == 200
    refusal = next(answer for answer in (run.batch(step, epoch) for step in range(1, 3)) if answer.status_code != 200)
    assert refusal.status_code == 503 and refusal.json()["type"].endswith(":spill-away")
    assert "make the folder available again" in refusal.json()["detail"]
    assert run.state()["spill"]["failing"]
    assert run.state()["groups"]["dead_lettered"] == 0
    (tmp_path / "away").rename(folder)
    soon(lambda: run.state()["spill"]["failing"] is None)
    soon(lambda: run.post("groups", groups=[large(99)]).status_code == 200)
    run.train(epoch, range(1, 6))
    assert conserved(run) and run.state()["groups"]["dead_lettered"] == 0


def test_a_full_folder_stops_the_moves_and_frees_them_again(
    own_service: ServeProcess, connect: Connect, tmp_path: Path
) -> None:
    """A disk of 128 KiB: what it cannot take stays in Redis, no half file counts, and appends wait."""
    folder = tmp_path / "spill"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a file system of a given size")
    try:
        run = connect(own_service.url, "r")
        epoch = begin(run, folder)
        sent = 0
        while run.post("groups", groups=[large(sent)]).status_code == 200:
            sent += 1
        assert sent < 30
        state = run.state()
        assert "No space left" in state["spill"]["failing"]
        assert state["spill"]["bytes_in_memory"] <= LIMIT
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        for number in range(sent, 40):
            stored(run, number)
        soon(lambda: run.state()["spill"]["failing"] is None)
        run.train(epoch, range(8))
        assert conserved(run) and run.state()["groups"]["dead_lettered"] == 0
    finally:
        own_service.end()
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: path.unlink(), "missing_payload"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "broken_frame"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"), "bad_checksum"),
    ],
    ids=["missing", "cut", "flipped"],
)
def test_a_file_that_is_lost_or_changed_is_a_dead_letter(
    own_service: ServeProcess, connect: Connect, tmp_path: Path, harm: Callable[[Path], None], reason: str
) -> None:
    run = connect(own_service.url, "r")
    epoch = begin(run, tmp_path / "spill")
    fill(run, 21)
    # Until the moves have ended: a file that goes while it is written is written again.
    soon(lambda: run.state()["spill"]["groups"] == len(files(tmp_path / "spill")))
    spilled = {int(path.name.partition("-")[0]): path for path in files(tmp_path / "spill")}
    number = max(number for number in spilled if number < 20)  # a busy machine also moves groups that no batch reads
    harm(spilled[number])
    run.train(epoch, range(4))
    (letter,) = run.get("dead-letters").json()["dead_letters"]
    assert (letter["number"], letter["reason"]) == (number, reason)
    assert conserved(run)


def test_direct_mode_reads_spilled_frames_and_uses_http_without_the_folder(
    own_service: ServeProcess, connect: Connect, tmp_path: Path
) -> None:
    run = connect(own_service.url, "r")
    epoch = begin(run, tmp_path / "spill")
    fill(run, 30)
    with Client(own_service.url, "r") as client:
        direct = DirectBodies(client, f"unix://{own_service.valkey_socket}")
        for step in range(5):
            assert bytes(direct.fetch(step, epoch)) == run.batch(step, epoch).content  # type: ignore[arg-type]
            assert run.ack(step, epoch).status_code == 200 and run.publish(step + 1, epoch).status_code == 200
        assert (direct.built, direct.fallbacks) == (5, 0)
        plan = run.batch(5, epoch).content
        shutil.move(tmp_path / "spill", tmp_path / "away")
        assert bytes(direct.fetch(5, epoch)) == plan  # type: ignore[arg-type]
        assert direct.built + direct.fallbacks == 6
        direct.close()


def test_a_folder_that_cannot_be_written_is_refused_when_the_run_is_created(run: RunClient, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    answer = run.put(batch={}, spill={"url": f"file://{tmp_path}/file/spill"})
    assert (answer.status_code, answer.json()["name"]) == (422, "spill.url")
    assert run.http.get(run.path).status_code == 404
    assert run.put(batch={}, limits={"max_bytes_in_memory": 2**27}).json()["name"] == "limits.max_bytes_in_memory"


def test_the_limit_changes_while_the_run_lives_and_readers_see_spilled_groups(run: RunClient, tmp_path: Path) -> None:
    """A lower limit moves frames at once; browsing and cursors read them from their files."""
    begin(run, tmp_path / "spill")
    assert run.http.patch(run.path, json={"limits": {"max_bytes_in_memory": 10**9}}).status_code == 200
    fill(run, 20)
    assert run.state()["spill"]["groups"] == 0
    assert run.http.patch(run.path, json={"limits": {"max_bytes_in_memory": 60_000}}).status_code == 200
    soon(lambda: run.state()["spill"]["groups"] >= 17)
    assert len(run.get("groups/g19").json()["rollouts"]) == 2
    page = run.get("cursors/reader", kind="stored", limit=50).json()
    assert [len(entry["rollouts"]) for entry in page["groups"]] == [2] * 20

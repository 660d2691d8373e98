"""Backup of a live run and restore elsewhere: what is restored goes on as the run did, or nothing is restored."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import itertools
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from replaybuf.backup.archive import MANIFEST, ArchiveWriter, read_manifest
from replaybuf.backup.section import MomentSection, PayloadsSection, Section, StreamSection, Summary
from replaybuf.backup.source import Source
from replaybuf.cli.main import main
from replaybuf.errors import Conflict
from replaybuf.store import Store, keys
from tests.conftest import RunClient, ServeProcess, group, lasting
from tests.service.test_deletion import finish, wait_until_gone
from tests.service.test_standby import start_pair, start_valkey
from tests.waiting import eventually

Connect = Callable[[str, str], RunClient]
TIMEOUT_S = 60.0
LEDGER_LIMIT = 1000
FENCED = "urn:replaybuf:problem:fenced"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A service that holds none of the runs."""
    server = ServeProcess(tmp_path_factory.mktemp("other") / "data").start()
    yield server
    server.end()


def backup(server: ServeProcess, run: str, to: object) -> None:
    main(["backup", run, "--to", str(to), "--data-dir", str(server.data_dir)])


def restore(server: ServeProcess, file: Path) -> None:
    main(["restore", "--from", str(file), "--data-dir", str(server.data_dir)])


def restored(server: ServeProcess, connect: Connect, run: str) -> RunClient:
    """A client of a restored run, once the service has found it."""
    client = connect(server.url, run)
    eventually(lambda: client.get("").status_code == 200, within_s=TIMEOUT_S)
    return client


def ledger(run: RunClient) -> list[dict[str, Any]]:
    """All ledger records."""
    records: list[dict[str, Any]] = run.get("ledger", limit=LEDGER_LIMIT).json()["records"]
    return records


def busy_run(run: RunClient) -> tuple[int, list[str]]:
    """A run with all kinds of data: returns the epoch and its tickets that are out."""
    run.put(
        batch={"groups_per_batch": 1},
        strategy={"name": "one-step-off-policy", "options": {"max_staleness": 20}},
        filters=[{"name": "overlong", "options": {"max_tokens": 50}}],
    )
    epoch = run.attach()
    tickets = run.post("tickets", producer="p", count=4).json()["tickets"]
    run.append(*(group(f"g{n}") for n in range(8)), group(None, ticket=tickets[0]["ticket"]))
    run.append(group("long", tokens=60))
    run.http.request("DELETE", f"{run.path}/tickets/{tickets[1]['ticket']}", json={"reason": "engine"})
    run.http.put(f"{run.path}/groups/g5/columns", json={"columns": {"ref_logprobs": [[-0.1] * 3] * 2}})
    run.train(epoch, range(3))
    assert run.post("checkpoints", epoch=epoch, step=2, keep=1).status_code == 200
    eventually(lambda: run.get("samples").json()["steps"] == 3, within_s=TIMEOUT_S)
    return epoch, [ticket["ticket"] for ticket in tickets[2:]]


def test_a_restored_run_goes_on_as_the_run_did(
    run: RunClient, service: ServeProcess, other: ServeProcess, connect: Connect, tmp_path: Path
) -> None:
    """State, ledger and bytes of the next batch are the same; repeats are duplicates; tickets stay out."""
    epoch, out = busy_run(run)
    backup(service, run.run, tmp_path / "run.backup")
    restore(other, tmp_path / "run.backup")
    again = restored(other, connect, run.run)

    assert lasting(again.state()) | {"waiting": None} == lasting(run.state()) | {"waiting": None}
    assert ledger(again) == ledger(run)
    explained = run.get("batches/2/explain").json()
    assert again.get("batches/2/explain").json() == explained and explained["candidates"]
    assert again.batch(3, epoch).content == run.batch(3, epoch).content
    assert again.get("groups/g5").json() == run.get("groups/g5").json()
    samples = run.get("samples").json()
    assert again.get("samples").json() == samples and samples["steps"] == 3
    assert again.append(group("g0"), group("g7"))[0]["status"] == "duplicate"
    assert again.append(group(None, ticket=out[0]))[0]["status"] == "stored"
    new = again.post("tickets", producer="q", count=1).json()["tickets"][0]
    assert new["ticket"] not in out


def test_a_run_that_changes_all_the_time_is_copied_as_it_was_at_one_moment(
    run: RunClient, service: ServeProcess, other: ServeProcess, connect: Connect, tmp_path: Path
) -> None:
    """Groups are stored, trained and freed during the copy. Its ledger is a prefix; no payload is missing."""
    run.put(batch={"groups_per_batch": 1}, strategy={"options": {"max_staleness": 1_000}})
    epoch, stop, faults = run.attach(), threading.Event(), []

    def live() -> None:
        try:
            for step in itertools.count():
                run.append(*(group(f"g{step}-{n}") for n in range(2)))
                run.train(epoch, range(step, step + 1))
                run.post("checkpoints", epoch=epoch, step=step + 1, keep=1)
                if stop.is_set():
                    return
        except Exception as error:  # noqa: BLE001  # the test reports it
            faults.append(error)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        eventually(lambda: connect(service.url, run.run).state()["step"] > 10, within_s=TIMEOUT_S)
        backup(service, run.run, tmp_path / "run.backup")
    finally:
        stop.set()
        thread.join(TIMEOUT_S)
    assert not faults
    restore(other, tmp_path / "run.backup")
    again = restored(other, connect, run.run)

    records, whole = ledger(again), ledger(run)
    assert 20 < len(records) < len(whole) and records == whole[: len(records)]
    left = again.state()
    assert left["groups"]["dead_lettered"] == 0 and left["groups"]["live"] > 10
    epoch = again.attach(left["step"])
    again.train(epoch, range(left["step"], left["step"] + left["groups"]["live"]))
    assert again.state()["groups"]["dead_lettered"] == 0


class _Meanwhile:
    """A sink during which something happens once, when the first section comes that is `wanted`."""

    def __init__(self, wanted: Callable[[Section], bool], happens: Callable[[], object]) -> None:
        self._wanted, self._happens, self._done = wanted, happens, False
        self.moments, self.frames = 0, dict[str, bytes]()

    async def add(self, section: Section) -> None:
        """Count moments and collect frames."""
        self.moments += isinstance(section, MomentSection)
        if isinstance(section, PayloadsSection):
            self.frames |= section.frames
        if self._wanted(section) and not self._done:
            self._done = True
            await asyncio.to_thread(self._happens)


async def copy(server: ServeProcess, run: str, sink: _Meanwhile) -> Summary:
    store = await Store.open(f"unix://{server.valkey_socket}")
    try:
        return await Source(store, run, sink).copy()
    finally:
        await store.close()


def test_groups_that_are_freed_during_a_round_are_left_out_of_the_next(run: RunClient, service: ServeProcess) -> None:
    """A second moment is read, at which the ledger says that they are freed."""
    epoch, _ = busy_run(run)
    valkey = redis.Redis(unix_socket_path=service.valkey_socket)

    def train() -> None:
        run.train(epoch, range(3, 6))
        run.post("checkpoints", epoch=epoch, step=6, keep=1)
        eventually(lambda: not list(valkey.scan_iter(f"rb:p:{{{run.run}:g3}}*")), TIMEOUT_S)

    sink = _Meanwhile(lambda section: isinstance(section, StreamSection) and section.stream == "ledger", train)
    summary = asyncio.run(copy(service, run.run, sink))
    assert sink.moments == 2
    assert (summary.missing, summary.payloads) == (0, len(sink.frames))


def test_a_history_that_is_trimmed_during_a_round_is_read_again(tmp_path: Path, connect: Connect) -> None:
    """The streams then have a gap behind the moment that was read: no loss, only an older moment."""
    server = ServeProcess(tmp_path / "data", "--history-groups", "0").start()
    try:
        run = connect(server.url, "trimmed")
        run.put(batch={"groups_per_batch": 1}, strategy={"options": {"max_staleness": 1000}})
        run.append(*(group(f"g{n}") for n in range(70)))
        epoch = run.attach()
        run.train(epoch, range(60))

        def trim() -> None:
            run.post("checkpoints", epoch=epoch, step=58, keep=1)
            run.train(epoch, range(60, 66))  # whether to trim is checked every 16 ledger entries
            eventually(lambda: ledger(run)[0]["entry"] > 1, TIMEOUT_S)

        sink = _Meanwhile(lambda section: isinstance(section, MomentSection), trim)
        summary = asyncio.run(copy(server, "trimmed", sink))
    finally:
        server.end()
    assert sink.moments > 1
    assert (summary.stored, summary.payloads, summary.missing) == (70, len(sink.frames), 0)


def test_a_run_of_an_older_release_is_restored_with_its_snapshot(other: ServeProcess, connect: Connect) -> None:
    """The backup was made while an older release served the run, whose ledger was trimmed behind a snapshot."""
    restore(other, Path(__file__).with_name("release-of-rbs4.backup.gz"))
    run = restored(other, connect, "old")
    assert ledger(run)[0]["entry"] == 86
    state = run.state()
    groups = {"stored": 75, "live": 10, "in_batches": 6, "retired": 58, "evicted": {"overlong_rollout": 1}}
    assert state["step"] == 63 and state["groups"] == state["groups"] | groups
    body = run.batch(63, 1).content
    assert hashlib.sha256(body).hexdigest() == "5753d38f0923f5bc35e1060491a6102367eb3b4722f1976bb6e0728548a84825"
    assert run.append(group("g0"))[0]["status"] == "duplicate"


def test_a_run_is_copied_from_redis_to_redis(
    run: RunClient, service: ServeProcess, other: ServeProcess, connect: Connect
) -> None:
    epoch, _ = busy_run(run)
    backup(service, run.run, f"unix://{other.valkey_socket}")
    assert restored(other, connect, run.run).batch(3, epoch).content == run.batch(3, epoch).content


def test_a_deleted_run_is_brought_back(run: RunClient, service: ServeProcess, connect: Connect, tmp_path: Path) -> None:
    """The name of a deleted run is taken for a day, except for its own backup."""
    epoch, _ = busy_run(run)
    body = run.batch(3, epoch).content
    backup(service, run.run, tmp_path / "run.backup")
    finish(run)
    assert run.http.delete(run.path).status_code == 204
    eventually(lambda: not redis.Redis(unix_socket_path=service.valkey_socket).sismember("rb:runs", run.run), TIMEOUT_S)
    restore(service, tmp_path / "run.backup")
    assert restored(service, connect, run.run).batch(3, epoch).content == body


def test_a_trainer_that_attached_after_the_backup_is_fenced_in_the_restored_run(
    run: RunClient, file: Path, service: ServeProcess, other: ServeProcess, connect: Connect
) -> None:
    """It is in a long step, and has the epoch that follows those in the backup. So have trainers of other restores."""
    epochs = [run.attach(3)]
    for server in (other, service):
        if server is service:
            finish(run)
            assert run.http.delete(run.path).status_code == 204
            wait_until_gone(redis.Redis(unix_socket_path=service.valkey_socket), run)
        restore(server, file)
        again = restored(server, connect, run.run)
        new = again.attach(3)
        again.batch(3, new)
        assert [again.post("batches/3/ack", epoch=epoch).json()["type"] for epoch in epochs] == [FENCED] * len(epochs)
        assert again.post("batches/3/ack", epoch=new).status_code == 200
        assert again.attach(4) == new + 1
        epochs += [new, new + 1]


@pytest.mark.parametrize("away", ["stopped", "killed"])
def test_a_server_that_saw_neither_deletion_nor_restore_serves_the_restored_run(
    tmp_path: Path, connect: Connect, away: str
) -> None:
    """It knows ends that the restored run does not have; they are those of the deleted run, so nothing is lost."""
    with start_valkey(tmp_path) as embedded, start_pair(tmp_path, embedded.url) as (first, second):
        run, follower = connect(first.url, "main"), connect(second.url, "main")
        busy_run(run)
        main(["backup", "main", "--to", str(tmp_path / "run.backup"), "--redis-url", embedded.url])
        run.append(group("after-the-backup"))
        finish(run)
        stored = run.state()["groups"]["stored"]
        eventually(lambda: follower.state()["groups"]["stored"] == stored, TIMEOUT_S)
        if away == "stopped":
            os.kill(second.pid, signal.SIGSTOP)
        else:
            second.kill()
        assert run.http.delete(run.path).status_code == 204
        with redis.Redis(unix_socket_path=str(embedded.socket_path)) as valkey:
            wait_until_gone(valkey, run)
            main(["restore", "--from", str(tmp_path / "run.backup"), "--redis-url", embedded.url])
            run = restored(first, connect, "main")
            if away == "stopped":
                os.kill(second.pid, signal.SIGCONT)
            else:
                second.start()
            follower = restored(second, connect, "main")
            eventually(lambda: follower.state()["groups"]["stored"] == stored - 1, TIMEOUT_S)
            assert run.append(group("after-the-restore")) == [{"group_id": "after-the-restore", "status": "stored"}]
            first.kill()
            eventually(lambda: follower.post("groups", groups=[group("z")]).status_code == 200, TIMEOUT_S)
            assert follower.state()["groups"]["stored"] == stored + 1
            assert valkey.get(keys.lost("main")) is None
        assert "Redis was emptied" not in first.log() + second.log()


@pytest.fixture
def file(run: RunClient, service: ServeProcess, tmp_path: Path) -> Path:
    """A backup."""
    busy_run(run)
    backup(service, run.run, tmp_path / "run.backup")
    return tmp_path / "run.backup"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_file_that_is_cut_is_refused_before_anything_is_restored(
    share: float, run: RunClient, file: Path, other: ServeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    with file.open("r+b") as cut:
        cut.truncate(int(share * (file.stat().st_size - tarfile.RECORDSIZE)))
    before = set(redis.Redis(unix_socket_path=other.valkey_socket).scan_iter())
    with pytest.raises(SystemExit):
        restore(other, file)
    assert "Nothing was restored" in capsys.readouterr().err
    assert set(redis.Redis(unix_socket_path=other.valkey_socket).scan_iter()) == before


def test_a_changed_byte_is_found_by_its_digest(
    file: Path, other: ServeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = bytearray(file.read_bytes())
    at = raw.index(b"inference_logprobs")
    raw[at] ^= 1
    file.write_bytes(raw)
    with pytest.raises(SystemExit):
        restore(other, file)
    assert "digest of" in capsys.readouterr().err


def test_a_file_of_a_newer_format_is_refused(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = msgspec.structs.replace(read_manifest(file), format=99)
    newer = tmp_path / "newer"
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    with tarfile.open(newer, "w") as tar:
        tar.add(tmp_path / MANIFEST, MANIFEST)
    with pytest.raises(SystemExit):
        main(["restore", "--from", str(newer), "--check"])
    assert "has format 99" in capsys.readouterr().err


def members(file: Path) -> dict[str, bytes]:
    """The members of a backup by name, in order."""
    with tarfile.open(file) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def write_members(file: Path, parts: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(file, "w") as tar:
        for name, raw in parts:
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return file


def forge(file: Path, to: Path, change: Callable[[str, Any], Any], **summary: Any) -> Path:
    """Write a backup whose sections and summary are changed, and every digest is right.

    Format 1 has no digest of its manifest, and whole keys. `change` gets the tag of each section and its content.
    """
    parts = members(file)
    manifest = msgspec.json.decode(parts.pop(MANIFEST))
    for name, raw in parts.items():
        section = msgspec.msgpack.decode(raw)
        if section["type"] == "payloads":
            prefix = f"rb:p:{{{manifest['summary']['run']}:"
            section["frames"] = {prefix + key: frame for key, frame in section["frames"].items()}
        parts[name] = msgspec.msgpack.encode(change(section["type"], section))
    digests = [[name, hashlib.sha256(parts[name]).hexdigest()] for name, _ in manifest["sections"]]
    old = {"format": 1, "summary": manifest["summary"] | summary, "sections": digests}
    return write_members(to, [*parts.items(), (MANIFEST, msgspec.json.encode(old))])


def everything(server: ServeProcess) -> dict[bytes, Any]:
    """All keys of a Redis, and the values of those that are strings."""
    valkey = redis.Redis(unix_socket_path=server.valkey_socket)
    return {key: valkey.get(key) if valkey.type(key) == b"string" else None for key in valkey.scan_iter()}


def refused(file: Path, *words: str) -> None:
    with pytest.raises(SystemExit):
        main(["restore", "--from", str(file), *words])


def test_a_changed_manifest_is_found_by_its_digest(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No digest of a section covers the name of the run."""
    parts = members(file)
    manifest = msgspec.json.decode(parts[MANIFEST])
    manifest["summary"]["run"] = "another"
    parts[MANIFEST] = msgspec.json.encode(manifest)
    refused(write_members(tmp_path / "changed", [*parts.items()]), "--check")
    said = capsys.readouterr().err
    assert f"the digest of {MANIFEST} is" in said and read_manifest(file).digest in said


@pytest.mark.parametrize("name", ["../../../evil", "Evil", "", "a" * 64, "a\n"])
def test_a_backup_of_a_run_whose_name_http_refuses_is_refused(
    name: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(forge(file, tmp_path / "forged", lambda tag, section: section, run=name), "--check")
    assert f"{name!r}; it must match" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["app:session", "rb:p:{victim:g1}:0123456789abcdef", "rb:{victim}:led"])
def test_a_section_names_no_key_of_another_run_or_application(
    target: str, run: RunClient, file: Path, other: ServeProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(tag: str, section: Any) -> Any:
        return section | {"frames": section["frames"] | {target: b"evil"}} if tag == "payloads" else section

    forged = forge(file, tmp_path / "forged", change)
    redis.Redis(unix_socket_path=other.valkey_socket).set("app:session", "mine")
    before = everything(other)
    refused(forged, "--check")
    assert repr(target) in capsys.readouterr().err
    refused(forged, "--data-dir", str(other.data_dir))
    after = everything(other)
    assert {key: after[key] for key in before} == before
    assert all(run.run.encode() in key for key in after.keys() - before.keys())


def test_an_index_entry_with_a_key_of_another_run_is_a_dead_letter(
    run: RunClient, file: Path, other: ServeProcess, connect: Connect, tmp_path: Path
) -> None:
    """The service would read that key, and delete it once the group is freed."""
    victim = f"rb:p:{{victim:g1}}:{'0' * 16}"

    def change(tag: str, section: Any) -> Any:
        if tag != "stream" or section["stream"] != "index":
            return section
        entries = [[number, [n, numbers, s, point(strings)]] for number, (n, numbers, s, strings) in section["entries"]]
        return section | {"entries": entries}

    def point(strings: bytes) -> bytes:
        content = msgspec.msgpack.decode(strings)
        return msgspec.msgpack.encode([*content[:3], victim, *content[4:]] if content[0] == "g7" else content)

    valkey = redis.Redis(unix_socket_path=other.valkey_socket)
    valkey.set(victim, "theirs")
    restore(other, forge(file, tmp_path / "forged", change))
    again = restored(other, connect, run.run)
    eventually(lambda: again.state()["groups"]["dead_lettered"] == 1, within_s=TIMEOUT_S)
    finish(again)
    assert again.http.delete(again.path).status_code == 204
    eventually(lambda: not valkey.sismember("rb:runs", run.run), TIMEOUT_S)
    assert valkey.get(victim) == b"theirs"


def test_a_second_member_of_a_name_is_refused(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The digest of the last one would stand for both."""
    parts = [*members(file).items()]
    refused(write_members(tmp_path / "twice", [parts[0], *parts]), "--check")
    assert f"two members are named {parts[0][0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tag", "field", "value"),
    [
        ("stream", "entries", [[b"MAXLEN", [b"1", b"2"]]]),
        ("stream", "entries", [[b"1-0", [b"n"]]]),
        ("stream", "stream", "fence"),
        ("fields", "name", "counts"),
        ("moment", "moment", {"counts": {b"stored": b"many"}, "tickets": [], "cursors": {}}),
        ("moment", "moment", {"counts": {b"next:\xff": b"1"}, "tickets": [], "cursors": {}}),
    ],
)
def test_a_section_that_no_backup_writes_is_one_error(
    tag: str, field: str, value: Any, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = {"snapshot": None, "fence": None, "spill_url": None} if field == "moment" else {}

    def change(own: str, section: Any) -> Any:
        return section | {field: value | rest if rest else value} if own == tag else section

    refused(forge(file, tmp_path / "forged", change), "--check")
    said = capsys.readouterr().err
    assert str(tmp_path / "forged") in said and "Nothing was restored" in said and "Traceback" not in said


def test_a_compressed_file_that_is_cut_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = Path(__file__).with_name("release-of-rbs4.backup.gz").read_bytes()
    for cut in (raw[: len(raw) // 2], raw[:100] + bytes(100) + raw[200:]):
        (tmp_path / "cut").write_bytes(cut)
        refused(tmp_path / "cut", "--check")
        assert "Nothing was restored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["backup", "none", "--to", "{tmp}/x"], "run none is not on"),
        (["backup", "{run}", "--to", "{file}"], "exists; choose another file"),
        (["restore", "--from", "{file}"], "delete it first, or restore to another Redis"),
        (["restore", "--from", "{tmp}/absent"], "No such file"),
        (["backup", "{run}", "--to", "{tmp}/x", "--data-dir", "{tmp}"], "start replaybuf serve on it"),
    ],
)
def test_wrong_input_has_one_clear_answer(
    arguments: list[str],
    said: str,
    run: RunClient,
    file: Path,
    service: ServeProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = file.read_bytes()
    filled = [word.format(tmp=tmp_path, run=run.run, file=file) for word in arguments]
    if "--data-dir" not in filled:
        filled += ["--data-dir", str(service.data_dir)]
    with pytest.raises(SystemExit):
        main(filled)
    assert said in capsys.readouterr().err
    assert file.read_bytes() == before and not (tmp_path / "x").exists()


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_a_backup_that_ends_later_does_not_replace_a_finished_one(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers that write to one path, with one process id. Their files do not mix either."""
    if not links:
        monkeypatch.setattr(os, "link", refuse_link)
    path = tmp_path / "copy"
    payloads = [PayloadsSection({name: name.encode() * 100_000}) for name in ("first", "second")]
    summary = Summary(run="r", release="1", taken_at=0.0, entries=0, stored=0, payloads=1, payload_bytes=1, missing=0)
    with ArchiveWriter(path) as first, ArchiveWriter(path) as second:
        asyncio.run(first.add(payloads[0]))
        asyncio.run(second.add(payloads[1]))
        finished = first.finish(summary)
        with pytest.raises(Conflict, match="exists; choose another file"):
            second.finish(summary)
    assert read_manifest(path) == finished
    assert [file.name for file in tmp_path.iterdir()] == ["copy"]


def refuse_link(*_: object) -> None:
    """Answer as a file system without hard links."""
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_killed_restore_leaves_no_run_and_the_next_one_brings_all_of_it(
    run: RunClient, file: Path, other: ServeProcess, connect: Connect
) -> None:
    """What it wrote expires. The lease that it held lasts a minute; embedded servers take it at once."""
    code = (
        "import os, signal\n"
        "from replaybuf.backup.target import Target\n"
        "Target.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from replaybuf.cli.main import main\n"
        f"main(['restore', '--from', {str(file)!r}, '--data-dir', {str(other.data_dir)!r}])\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S, check=False, env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    server = redis.Redis(unix_socket_path=other.valkey_socket)
    staged = list(server.scan_iter(f"*{run.run}*"))
    assert staged and all(server.ttl(key) > 0 for key in staged)
    assert connect(other.url, run.run).get("").status_code == 404

    server.delete(f"rb:{{{run.run}}}:lead")
    restore(other, file)
    assert lasting(restored(other, connect, run.run).state())["groups"] == run.state()["groups"]


def test_a_restore_killed_right_before_its_run_appears_leaves_no_payload(
    run: RunClient, file: Path, other: ServeProcess, connect: Connect
) -> None:
    """Its payloads have no lifetime any more. The server deletes them when the lease of the restore has ended."""
    code = (
        "import os, signal\n"
        "from replaybuf.store.copying import CopyStore\n"
        "CopyStore.show = lambda self, *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from replaybuf.cli.main import main\n"
        f"main(['restore', '--from', {str(file)!r}, '--data-dir', {str(other.data_dir)!r}])\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S, check=False, env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    server = redis.Redis(unix_socket_path=other.valkey_socket)
    assert server.delete(keys.lead(run.run))

    def lasting_keys() -> list[bytes]:
        return [key for key in server.scan_iter(f"*{run.run}*") if server.ttl(key) == -1]

    eventually(lambda: lasting_keys() == [keys.incarnation(run.run).encode()], TIMEOUT_S)
    restore(other, file)
    assert lasting(restored(other, connect, run.run).state())["groups"] == run.state()["groups"]

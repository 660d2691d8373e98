"""Downloads of weights over real HTTP and by fsspec: verified, resumed, bounded."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest

from replaybuf.errors import Gone, Invalid, ServiceUnavailable, Unauthorized
from replaybuf_trainer.faults import Superseded, WrongDigest
from replaybuf_trainer.weight_download import download
from replaybuf_trainer.weight_download.local_weights import LocalWeights
from replaybuf_trainer.weight_download.manifest import (
    LARGEST_SHARD_BYTES,
    MANIFEST,
    MOST_SHARDS,
    decode_manifest,
    digest_of,
    write_manifest,
)
from tests.trainer.weight_download.origin import SHARD_BYTES, Origin, announced, same_files, serving, write_version
from tests.waiting import eventually

MODEL = "parts/model.safetensors"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(download, "LONGEST_PAUSE_S", 0.01)


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    """A server of version 12."""
    write_version(tmp_path / "published", 12)
    with serving(tmp_path / "published") as made:
        yield made


def fetch(root: Path, uri: str, keep: int = 2, token: str | None = None) -> Path:
    with contextlib.closing(LocalWeights(root, keep, token)) as local:
        return local.fetch(uri, threading.Event())


def kept(root: Path) -> list[str]:
    return sorted(path.name[:7] for path in root.glob("v*"))


def manifest_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    return content


def test_a_version_is_copied_byte_for_byte_and_its_bytes_come_once(origin: Origin, tmp_path: Path) -> None:
    copy = fetch(tmp_path / "local", origin.uri)
    assert copy.name.startswith("v000012-") and same_files(origin.folder, copy)
    assert origin.sent_bytes() == sum(file["size"] for file in manifest_of(copy)["files"])
    assert [path.name for path in (tmp_path / "local").iterdir() if not path.name.startswith(".")] == [copy.name]
    assert not list((tmp_path / "local").glob(".*.part"))


def test_a_version_that_is_here_needs_no_server_if_its_digest_is_announced(origin: Origin, tmp_path: Path) -> None:
    uri = announced(origin, digest_of((origin.folder / MANIFEST).read_bytes()))
    copy = fetch(tmp_path / "local", uri)
    origin.token = "now it answers nobody"
    assert fetch(tmp_path / "local", uri) == copy


def test_a_cut_connection_costs_one_piece(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(download, "PIECE_BYTES", 1 << 14)
    cuts = iter(range(5))
    origin.fault = lambda name, start, part: None if name == MODEL and next(cuts, None) is not None else part
    copy = fetch(tmp_path / "local", origin.uri)
    assert same_files(origin.folder, copy) and "trying again in" in caplog.text
    assert origin.sent_bytes() == sum(file["size"] for file in manifest_of(copy)["files"])


def test_a_server_that_is_cut_all_the_time_is_named_after_bounded_tries(origin: Origin, tmp_path: Path) -> None:
    calls: list[str] = []

    def cut(name: str, _: int, part: bytes) -> bytes | None:
        calls.append(name)
        return None if name == MODEL else part

    origin.fault = cut
    with pytest.raises(ServiceUnavailable, match=f"{origin.uri}{MODEL}: the connection ended after"):
        fetch(tmp_path / "local", origin.uri)
    assert calls.count(MODEL) <= download.READ_TRIES * download.THREADS


def test_changed_bytes_are_downloaded_again(origin: Origin, tmp_path: Path) -> None:
    once = iter([True])
    origin.fault = lambda name, start, part: (
        bytes(len(part)) if name == MODEL and start == SHARD_BYTES and next(once, False) else part
    )
    assert same_files(origin.folder, fetch(tmp_path / "local", origin.uri))


def test_bytes_that_stay_wrong_are_an_error_with_file_shard_and_both_digests(origin: Origin, tmp_path: Path) -> None:
    origin.fault = lambda name, start, part: bytes(len(part)) if name == MODEL and start == 3 * SHARD_BYTES else part
    with pytest.raises(WrongDigest) as raised:
        fetch(tmp_path / "local", origin.uri)
    (file,) = (file for file in manifest_of(origin.folder)["files"] if file["name"] == MODEL)
    for word in (MODEL, "shard 3", file["shards"][3], digest_of(bytes(SHARD_BYTES)), "tried 3 times"):
        assert word in raised.value.detail
    assert not list((tmp_path / "local").glob("v*"))
    assert sum(start == 3 * SHARD_BYTES for _, start, _ in origin.sent) == download.DIGEST_TRIES


def test_a_download_goes_on_after_a_restart_with_the_shards_that_are_verified(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the disk changed one of them meanwhile."""
    monkeypatch.setattr(download, "THREADS", 1)
    origin.fault = lambda name, start, part: bytes(len(part)) if name == MODEL and start == 6 * SHARD_BYTES else part
    with pytest.raises(WrongDigest):
        fetch(tmp_path / "local", origin.uri)
    (scratch,) = (tmp_path / "local").glob(".v000012-*.part")
    with (scratch / MODEL).open("r+b") as file:
        file.seek(SHARD_BYTES + 7)
        file.write(b"?")
    origin.fault = lambda name, start, part: part
    origin.sent.clear()
    assert same_files(origin.folder, fetch(tmp_path / "local", origin.uri))
    assert [start // SHARD_BYTES for name, start, _ in origin.sent if name == MODEL] == [1, 6, 7]


def test_a_version_that_vanishes_in_the_middle_is_gone_without_retries(origin: Origin, tmp_path: Path) -> None:
    def vanish(name: str, _: int, part: bytes) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            (origin.folder / MODEL).unlink()
        return part

    origin.fault = vanish
    with pytest.raises(Gone, match=r"model\.safetensors is gone"):
        fetch(tmp_path / "local", origin.uri)


def test_weights_that_a_rewind_replaced_are_gone(origin: Origin, tmp_path: Path) -> None:
    """They have the same version and the same address."""
    with pytest.raises(Gone, match="has other weights now"):
        fetch(tmp_path / "local", announced(origin, digest_of(b"those of before")))


def test_a_server_that_ignores_ranges_is_refused_before_its_body_is_read(origin: Origin, tmp_path: Path) -> None:
    origin.whole_files = True
    with pytest.raises(ServiceUnavailable, match="answered 200"):
        fetch(tmp_path / "local", origin.uri)


def test_a_wrong_token_names_the_option(origin: Origin, tmp_path: Path) -> None:
    origin.token = "right"
    with pytest.raises(Unauthorized, match="--publish-token"):
        fetch(tmp_path / "local", origin.uri, token="wrong")
    assert same_files(origin.folder, fetch(tmp_path / "local", origin.uri, token="right"))


def test_a_newer_version_ends_a_download_and_what_is_verified_stays(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "THREADS", 1)
    stopping = threading.Event()

    def stop(name: str, start: int, part: bytes) -> bytes:
        if start == 4 * SHARD_BYTES:
            stopping.set()
        return part

    origin.fault = stop
    with pytest.raises(Superseded):
        LocalWeights(tmp_path / "local", 2).fetch(origin.uri, stopping)
    origin.sent.clear()
    assert same_files(origin.folder, fetch(tmp_path / "local", origin.uri))
    assert [start // SHARD_BYTES for name, start, _ in origin.sent if name == MODEL] == [5, 6, 7]


def test_the_newest_versions_stay_by_their_last_use(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write_version(tmp_path / f"published/{version}", version, shards=1)
    with serving(tmp_path / "published") as origin:
        for version in (1, 2, 1, 3):
            fetch(tmp_path / "local", f"{origin.uri}{version}")
    assert kept(tmp_path / "local") == ["v000001", "v000003"]


def test_a_helper_that_dies_as_it_deletes_a_version_leaves_no_half_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die_in_the_middle(folder: Path, **options: object) -> None:
        next(path for path in folder.rglob("*") if path.is_file()).unlink()
        raise SystemExit

    for version in (1, 2):
        write_version(tmp_path / f"published/{version}", version)
    with serving(tmp_path / "published") as origin:
        fetch(tmp_path / "local", f"{origin.uri}1", keep=1)
        with monkeypatch.context() as dying, pytest.raises(SystemExit):
            dying.setattr(shutil, "rmtree", die_in_the_middle)
            fetch(tmp_path / "local", f"{origin.uri}2", keep=1)
        assert kept(tmp_path / "local") == ["v000002"]
        assert same_files(tmp_path / "published/1", fetch(tmp_path / "local", f"{origin.uri}1", keep=1))


def test_folders_that_only_look_like_versions_stay(tmp_path: Path) -> None:
    """A user may download into the folder of other models."""
    others = {"vicuna-7b", "venv-3.11", ".venv-old.part", "v000001-mine", "v000001-" + 31 * "a"}
    for name in others:
        (tmp_path / "local" / name).mkdir(parents=True)
    for version in (1, 2):
        write_version(tmp_path / f"published/{version}", version, shards=1)
    with serving(tmp_path / "published") as origin:
        copies = [fetch(tmp_path / "local", f"{origin.uri}{version}", keep=1) for version in (1, 2)]
    assert {path.name for path in (tmp_path / "local").iterdir()} == others | {".lock", copies[1].name}


def test_the_version_that_was_just_fetched_is_the_newest_by_any_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is set back by an hour between the versions 2 and 3."""
    for version in (1, 2, 3):
        write_version(tmp_path / f"published/{version}", version, shards=1)
    with serving(tmp_path / "published") as origin:
        for version in (1, 2):
            fetch(tmp_path / "local", f"{origin.uri}{version}")
        set_back_ns = time.time_ns() - 3_600_000_000_000
        monkeypatch.setattr(time, "time_ns", lambda: set_back_ns)
        copy = fetch(tmp_path / "local", f"{origin.uri}3")
        assert same_files(tmp_path / "published/3", copy)
        fetch(tmp_path / "local", f"{origin.uri}1")
    assert kept(tmp_path / "local") == ["v000001", "v000003"]


def test_helpers_that_share_a_folder_keep_the_versions_that_each_of_them_got_last(tmp_path: Path) -> None:
    """As three adapters of a run have them. A helper gives its version up for its next one, and when it ends."""
    for version in range(1, 6):
        write_version(tmp_path / f"published/{version}", version, shards=1)
    with serving(tmp_path / "published") as origin, contextlib.ExitStack() as stack:
        helpers = [stack.enter_context(contextlib.closing(LocalWeights(tmp_path / "local", 2))) for _ in range(3)]

        def fetch_by(helper: LocalWeights, version: int) -> list[str]:
            helper.fetch(f"{origin.uri}{version}", threading.Event())
            return kept(tmp_path / "local")

        assert fetch_by(helpers[0], 1) == ["v000001"]
        assert fetch_by(helpers[1], 2) == ["v000001", "v000002"]
        assert fetch_by(helpers[2], 3) == ["v000001", "v000002", "v000003"]
        assert fetch_by(helpers[0], 4) == ["v000002", "v000003", "v000004"]
        helpers[1].close()
        assert fetch_by(helpers[0], 5) == ["v000003", "v000004", "v000005"]


def test_helpers_that_share_a_folder_download_a_version_once(origin: Origin, tmp_path: Path) -> None:
    gate, copies = threading.Event(), list[Path]()

    def slow(name: str, start: int, part: bytes) -> bytes:
        gate.wait(20)
        return part

    origin.fault = slow
    threads = [threading.Thread(target=lambda: copies.append(fetch(tmp_path / "local", origin.uri))) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(20)
    assert copies[0] == copies[1] and same_files(origin.folder, copies[0])
    assert origin.sent_bytes() == sum(file["size"] for file in manifest_of(copies[0])["files"])


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_version_comes_from_an_object_store(tmp_path: Path, scheme: str) -> None:
    write_version(tmp_path / "published", 7)
    uri = "memory://bucket/run/v000007" if scheme == "memory" else (tmp_path / "published").as_uri()
    if scheme == "memory":
        fsspec.filesystem("memory").put(str(tmp_path / "published"), "/bucket/run/v000007", recursive=True)
    copy = fetch(tmp_path / "local", uri)
    assert copy.name.startswith("v000007-") and same_files(tmp_path / "published", copy)


def test_a_store_without_the_version_says_so(tmp_path: Path) -> None:
    with pytest.raises(Gone, match="memory://nothing/here"):
        fetch(tmp_path / "local", "memory://nothing/here")
    with pytest.raises(Invalid, match="no-such-protocol"):
        fetch(tmp_path / "local", "no-such-protocol://bucket")


def test_a_disk_that_is_too_small_is_named_before_the_download(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    with pytest.raises(Invalid, match=r"needs \d+ more bytes .* and 1000 are free"):
        fetch(tmp_path / "local", origin.uri)
    assert origin.sent_bytes() == 0


# ---------------------------------------------------------------------- hostile manifests


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "/etc/x", "a//b", "", ".", "a/.hidden", "a\\b", "a\x00b", "C:x", MANIFEST, "a/" * 8 + "b"],
)
def test_a_manifest_with_a_name_outside_the_folder_writes_nothing(origin: Origin, tmp_path: Path, name: str) -> None:
    manifest = manifest_of(origin.folder)
    manifest["files"][0]["name"] = name
    (origin.folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(Invalid, match="manifest"):
        fetch(tmp_path / "local", origin.uri)
    assert [path.name for path in (tmp_path / "local").iterdir()] == [".lock"] and origin.sent_bytes() == 0


@pytest.mark.parametrize(
    "change",
    [
        {"shard_bytes": LARGEST_SHARD_BYTES + 1},
        {"shard_bytes": 0},
        {"files": []},
        {"files": [{"name": "a", "size": MOST_SHARDS + 1, "shards": ["0" * 64] * (MOST_SHARDS + 1)}], "shard_bytes": 1},
        {"files": [{"name": "a", "size": 5, "shards": []}]},
        {"files": [{"name": "a", "size": 1 << 60, "shards": []}]},
        {"files": [{"name": "a", "size": 5, "shards": ["../x"]}]},
        {"files": [{"name": "a", "size": 5, "shards": ["0" * 64 + "\n"]}]},
        {"files": [{"name": name, "size": 0, "shards": []} for name in ("a", "a/b")]},
        {"files": [{"name": "a", "size": 0, "shards": []}] * 2},
        {"version": -1},
    ],
)
def test_a_manifest_out_of_bounds_is_rejected(change: dict[str, Any]) -> None:
    fields = {"version": 1, "shard_bytes": 10, "files": [{"name": "a", "size": 0, "shards": []}]}
    decode_manifest(msgspec.json.encode(fields), "here")
    with pytest.raises(Invalid, match="the manifest of here"):
        decode_manifest(msgspec.json.encode(fields | change), "here")


def test_a_manifest_that_is_too_large_is_refused_before_it_is_read(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaybuf_trainer.weight_download.sources.LARGEST_MANIFEST_BYTES", 100)
    with pytest.raises(Invalid, match="at most 100"):
        fetch(tmp_path / "local", origin.uri)


def test_a_manifest_leaves_out_hidden_files_and_itself(tmp_path: Path) -> None:
    write_version(tmp_path / "a", 1)
    (tmp_path / "a" / ".scratch").write_text("x")
    digest = write_manifest(tmp_path / "a", 1, SHARD_BYTES)
    names = [file["name"] for file in manifest_of(tmp_path / "a")["files"]]
    assert names == ["config.json", "empty.txt", MODEL]
    assert digest == write_manifest(tmp_path / "a", 1, SHARD_BYTES)


def test_progress_grows_while_another_helper_downloads(origin: Origin, tmp_path: Path) -> None:
    """A helper that waits for the lock is not taken for one that hangs."""
    held, release = threading.Event(), threading.Event()

    def hold(name: str, start: int, part: bytes) -> bytes:
        if start == 7 * SHARD_BYTES:
            held.set()
            release.wait(20)
        return part

    origin.fault = hold
    thread = threading.Thread(target=fetch, args=(tmp_path / "local", origin.uri))
    thread.start()
    assert held.wait(20)
    try:
        eventually(LocalWeights(tmp_path / "local", 2).progress_bytes, 20)
    finally:
        release.set()
        thread.join(20)

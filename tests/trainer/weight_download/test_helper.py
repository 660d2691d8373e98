"""The helper of an engine as a process: downloads, kill -9, the calls that it passes on."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.weight_download import download
from replaybuf_trainer.weight_download.manifest import MANIFEST, write_manifest
from tests.conftest import RunClient
from tests.trainer.scripted import fill
from tests.trainer.served import ServedEngine, oracle
from tests.trainer.weight_download.helper_process import TIMEOUT_S, HelperProcess, helper_process
from tests.trainer.weight_download.origin import SHARD_BYTES, announced, same_files, serving, write_version
from tests.waiting import eventually

NO_ENGINE = "http://127.0.0.1:9"
SHARDS = 24


def staged(helper: HelperProcess, uri: str) -> bool:
    response = helper.stage(uri)
    assert response.status_code == 200, response.text
    complete: bool = response.json()["complete"]
    return complete


def test_a_killed_helper_downloads_only_unfinished_shards_again(tmp_path: Path) -> None:
    """At most one shard per thread comes twice."""
    write_version(tmp_path / "published", 3, SHARDS)
    held, release = list[int](), threading.Event()

    def hold(name: str, start: int, part: bytes) -> bytes:
        if start >= SHARDS // 2 * SHARD_BYTES:
            held.append(start)
            release.wait(TIMEOUT_S)
        return part

    with serving(tmp_path / "published") as origin:
        origin.fault = hold
        with helper_process(tmp_path / "local", NO_ENGINE) as helper:
            assert not staged(helper, origin.uri)
            eventually(lambda: len(held), TIMEOUT_S, lambda count: count == download.THREADS)  # the rest is verified
            helper.kill()
        origin.fault = lambda name, start, part: part
        release.set()
        origin.sent.clear()
        with helper_process(tmp_path / "local", NO_ENGINE) as helper:
            eventually(lambda: staged(helper, origin.uri), TIMEOUT_S)
            assert helper.end() == 0
        (copy,) = (tmp_path / "local").glob("v*")
        assert same_files(origin.folder, copy)
        again = {start for name, start, _ in origin.sent if name.startswith("parts/")}
        assert again == {number * SHARD_BYTES for number in range(SHARDS // 2, SHARDS)}


def test_a_newer_version_replaces_one_that_is_on_its_way(tmp_path: Path) -> None:
    for version in (1, 2):
        write_version(tmp_path / f"published/{version}", version)
    begun, release = threading.Event(), threading.Event()

    def hold(name: str, start: int, part: bytes) -> bytes:
        if name.startswith("1/parts/"):
            begun.set()
            release.wait(TIMEOUT_S)
        return part

    with serving(tmp_path / "published") as origin:
        origin.fault = hold
        with helper_process(tmp_path / "local", NO_ENGINE) as helper:
            assert not staged(helper, f"{origin.uri}1")
            assert begun.wait(TIMEOUT_S)
            assert not staged(helper, f"{origin.uri}2")
            release.set()
            eventually(lambda: staged(helper, f"{origin.uri}2"), TIMEOUT_S)
    assert [path.name[:7] for path in (tmp_path / "local").glob("v*")] == ["v000002"]


def test_a_failed_download_is_answered_with_its_reason_and_then_started_again(tmp_path: Path) -> None:
    write_version(tmp_path / "published", 1)
    with serving(tmp_path / "published") as origin:
        origin.fault = lambda name, start, part: bytes(len(part)) if name.startswith("parts/") else part
        with helper_process(tmp_path / "local", NO_ENGINE) as helper:
            response = eventually(lambda: helper.stage(origin.uri), TIMEOUT_S, lambda answer: answer.status_code != 200)
            assert response.status_code == 502 and "the manifest says" in response.json()["detail"]
            origin.fault = lambda name, start, part: part
            eventually(lambda: staged(helper, origin.uri), TIMEOUT_S)


def test_a_helper_passes_on_only_what_a_trainer_needs(tmp_path: Path, engine: ServedEngine, models: Path) -> None:
    """Loads name weights that are complete; an engine that does not answer is named."""
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(models / "b")}}
    with helper_process(tmp_path / "local", engine.url) as helper:
        assert helper.http.get("/weight_info").json() == engine.http.get("/weight_info").json()
        assert helper.http.post("/collective_rpc", json=load).status_code == 409
        assert helper.http.post("/collective_rpc", json={"method": "reload_weights"}).status_code == 400
        assert helper.http.post("/stage", content=b"[" * 70_000).status_code == 413
        assert helper.http.post("/stage", json={"weights_uri": 7}).status_code == 400
        assert helper.http.post("/v1/completions", json={}).status_code == 404
        assert not engine.http.get("/is_paused").json()["is_paused"]
    with helper_process(tmp_path / "local", NO_ENGINE) as helper:
        response = helper.http.post("/pause?mode=keep")
        assert response.status_code == 502 and f"engine {NO_ENGINE} does not answer /pause" in response.json()["detail"]


def test_a_helper_with_a_token_answers_nobody_else(tmp_path: Path) -> None:
    with helper_process(tmp_path / "local", NO_ENGINE, token="secret") as helper:
        assert helper.stage("http://127.0.0.1:9/").status_code == 401
        assert helper.http.get("/weight_info").status_code == 401
        helper.http.headers["authorization"] = "Bearer secret"
        assert helper.stage("http://127.0.0.1:9/").status_code == 200


# ---------------------------------------------------------------------- following a run


def acked(run: RunClient) -> int:
    """Attach and ack the first batch, so that version 1 may be published; return the epoch."""
    fill(run)
    epoch = run.attach()
    assert run.batch(0, epoch, wait_ms=10_000).status_code == 200
    assert run.ack(0, epoch).status_code == 200
    return epoch


def test_a_helper_follows_a_run_and_its_engine_samples_with_what_is_published(
    run: RunClient, tmp_path: Path, engine: ServedEngine, models: Path
) -> None:
    """Also after the engine is loaded with something else, as after a restart."""
    epoch = acked(run)
    published = tmp_path / "published"
    shutil.copytree(models / "b", published)
    digest = write_manifest(published, 1, 1 << 16)
    options = ("--run", run.run, "--url", str(run.http.base_url))
    with serving(published) as origin, helper_process(tmp_path / "local", engine.url, *options):
        uri = announced(origin, digest)
        assert run.post("policy", epoch=epoch, version=1, weights_uri=uri).status_code == 200
        wanted = load_model(models / "b")

        def samples_right() -> bool:
            choice = engine.complete([70, 88, 33], max_tokens=8)[0]
            expected = oracle(wanted, [70, 88, 33], choice["token_ids"])
            return bool(choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4))

        eventually(samples_right, TIMEOUT_S)
        engine.reload(models / "a", 5)
        eventually(samples_right, TIMEOUT_S)
        assert engine.version() == "1"


def test_a_helper_names_a_version_that_it_cannot_load_and_tries_again(
    run: RunClient, tmp_path: Path, engine: ServedEngine, models: Path
) -> None:
    """Its engine keeps version and weights."""
    epoch = acked(run)
    shutil.copytree(models / "b", tmp_path / "published")
    options = ("--run", run.run, "--url", str(run.http.base_url))
    with serving(tmp_path / "published") as origin, helper_process(tmp_path / "local", engine.url, *options) as helper:
        assert run.post("policy", epoch=epoch, version=1, weights_uri=origin.uri).status_code == 200
        eventually(lambda: "version 1 is not loaded" in helper.log.read_text(), TIMEOUT_S)
        assert "weights-manifest.json is gone" in helper.log.read_text()
        assert not (tmp_path / "published" / MANIFEST).exists()
        write_manifest(tmp_path / "published", 1)
        eventually(lambda: "loaded version=1" in helper.log.read_text(), TIMEOUT_S)
        assert helper.end() == 0

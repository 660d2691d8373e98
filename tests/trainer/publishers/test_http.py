"""The publisher `http`: real server, real helper processes, the small engine."""

from __future__ import annotations

import contextlib
import shutil
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
import torch
import trustme

from replaybuf.certificates import open_certificate
from replaybuf.errors import Fenced, Invalid, ServiceUnavailable
from replaybuf.wire.model.checkpoints import latest_checkpoint
from replaybuf_trainer.models.loading import WEIGHTS_FILE, load_model
from replaybuf_trainer.publishers.http import HttpOptions, HttpPublisher
from replaybuf_trainer.publishers.publisher import PublisherSetup
from replaybuf_trainer.publishers.weights_folders import STAGED, WeightsFolders
from replaybuf_trainer.publishers.weights_server import WeightsServer
from replaybuf_trainer.weight_download import listening
from replaybuf_trainer.weight_download.manifest import MANIFEST
from tests.conftest import RunClient
from tests.forked import run_forked
from tests.trainer.scripted import STEPS, fill
from tests.trainer.served import WORD, ServedEngine, confirmed, oracle, served
from tests.trainer.weight_download.helper_process import helper_process
from tests.waiting import eventually

TIMEOUT_S = 60.0
SHARD_BYTES = 1 << 16


class CopiedWeights:
    """Weights that are a copy of a model folder."""

    adapter = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return none."""
        return {}

    def save_weights(self, folder: Path) -> None:
        """Copy the folder."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)


@contextlib.contextmanager
def publishing(weights_dir: Path, *engines: str, token: str | None = None, **options: str) -> Iterator[HttpPublisher]:
    """Open a publisher on a free port, and close it at the end."""
    made = PublisherSetup(weights_dir=weights_dir, engines=engines, engine_timeout_s=20.0, publish_token=token)
    publisher = HttpPublisher(made, HttpOptions(port=0, shard_bytes=SHARD_BYTES, **options))
    try:
        yield publisher
    finally:
        publisher.close()


def check_samples_with(engine: ServedEngine, folder: Path, version: int) -> None:
    """Check that an engine samples from the weights in a folder, under a version."""
    choice = engine.complete(WORD, max_tokens=12)[0]
    expected = oracle(load_model(folder), WORD, choice["token_ids"])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert choice["weight_versions"][0]["version"] == engine.version() == str(version)
    assert not engine.http.get("/is_paused").json()["is_paused"]


def test_an_engine_samples_with_weights_that_came_by_http(engine: ServedEngine, models: Path, tmp_path: Path) -> None:
    """The announced address has the version and the digest, and any helper with the token can download it."""
    with (
        helper_process(tmp_path / "local", engine.url, token="secret") as helper,
        publishing(tmp_path / "weights", helper.url, token="secret") as publisher,
    ):
        publisher.prepare(4, CopiedWeights(models / "b"))
        assert engine.version() == "0"
        uri = publisher.commit(4, confirmed)
        check_samples_with(engine, models / "b", 4)
        assert "/v000004/#sha256=" in uri and uri.startswith("http://127.0.0.1:")
        assert httpx.get(uri + MANIFEST).status_code == 401
        publisher.prepare(5, CopiedWeights(models / "a"))
        publisher.commit(5, confirmed)
        check_samples_with(engine, models / "a", 5)


def test_an_engine_that_restarts_gets_the_published_weights_through_a_new_helper(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the same moment; the copy on its disk is used."""
    monkeypatch.setattr("replaybuf_trainer.publishers.engine.WATCH_EVERY_S", 0.05)
    with contextlib.ExitStack() as first, contextlib.ExitStack() as later:
        old = first.enter_context(served(models / "a"))
        helper = first.enter_context(helper_process(tmp_path / "local", old.url))
        publisher = later.enter_context(publishing(tmp_path / "weights", helper.url))
        publisher.prepare(1, CopiedWeights(models / "b"))
        publisher.commit(1, confirmed)
        port = int(helper.url.rpartition(":")[2])
        first.close()
        publisher.watch(confirmed)
        new = later.enter_context(served(models / "a", old.port))
        later.enter_context(helper_process(tmp_path / "local", new.url, port=port))
        eventually(new.version, TIMEOUT_S, lambda version: version == "1")
        check_samples_with(new, models / "b", 1)


def test_a_dead_helper_is_named_and_the_other_engines_go_on(
    engine: ServedEngine, models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with helper_process(tmp_path / "dead", engine.url) as dead:
        dead.kill()
    with publishing(tmp_path / "weights", dead.url) as publisher:
        publisher.prepare(1, CopiedWeights(models / "b"))
        with pytest.raises(ServiceUnavailable, match=f"engine {dead.url} does not answer /stage"):
            publisher.commit(1, confirmed)
    with (
        helper_process(tmp_path / "local", engine.url) as helper,
        publishing(tmp_path / "weights", dead.url, helper.url) as publisher,
    ):
        publisher.prepare(1, CopiedWeights(models / "b"))
        publisher.commit(1, confirmed)
        check_samples_with(engine, models / "b", 1)
        assert publisher.figures()["engines_behind"] == 1
    assert f"engine {dead.url} lacks version 1" in caplog.text


def test_an_engine_keeps_version_and_weights_if_the_download_is_wrong(
    engine: ServedEngine, models: Path, tmp_path: Path
) -> None:
    """The error names file, shard and both digests; the engine is not even paused."""
    with (
        helper_process(tmp_path / "local", engine.url) as helper,
        publishing(tmp_path / "weights", helper.url) as publisher,
    ):
        publisher.prepare(1, CopiedWeights(models / "b"))
        (staged,) = (tmp_path / "weights").glob(f"{STAGED}*/v000001/{WEIGHTS_FILE}")
        with staged.open("r+b") as file:
            file.seek(SHARD_BYTES)
            file.write(b"????????")
        with pytest.raises(ServiceUnavailable, match=rf"shard 1 of {WEIGHTS_FILE} .* the manifest says"):
            publisher.commit(1, confirmed)
        check_samples_with(engine, models / "a", 0)


def test_a_trainer_that_lost_the_run_loads_nothing(engine: ServedEngine, models: Path, tmp_path: Path) -> None:
    def fenced() -> None:
        raise Fenced("epoch is 3; the run has 4")

    with (
        helper_process(tmp_path / "local", engine.url) as helper,
        publishing(tmp_path / "weights", helper.url) as publisher,
    ):
        publisher.prepare(1, CopiedWeights(models / "b"))
        with pytest.raises(Fenced):
            publisher.commit(1, fenced)
        check_samples_with(engine, models / "a", 0)


def test_an_engine_without_a_helper_is_named(engine: ServedEngine, models: Path, tmp_path: Path) -> None:
    with publishing(tmp_path / "weights", engine.url) as publisher:
        publisher.prepare(1, CopiedWeights(models / "b"))
        with pytest.raises(ServiceUnavailable, match=f"engine {engine.url} is not a helper"):
            publisher.commit(1, confirmed)


def test_a_kept_version_is_published_again_after_a_restart(engine: ServedEngine, models: Path, tmp_path: Path) -> None:
    """Also if another publisher wrote it, without a manifest."""
    shutil.copytree(models / "b", tmp_path / "weights" / "v000007")
    with (
        helper_process(tmp_path / "local", engine.url) as helper,
        publishing(tmp_path / "weights", helper.url) as publisher,
    ):
        assert not publisher.restore(6, confirmed)
        assert publisher.restore(7, confirmed)
        check_samples_with(engine, models / "b", 7)


def test_weights_are_open_to_other_machines_only_with_a_token(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="publish-token"), publishing(tmp_path, host="0.0.0.0"):
        pass
    with publishing(tmp_path, host="0.0.0.0", token="secret"):
        pass


# ---------------------------------------------------------------------- TLS


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    """An authority in `ca.pem`, which no system trusts, and its certificate of 127.0.0.1 in `cert.pem`, `key.pem`."""
    made = trustme.CA()
    made.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    write_certificate(made, tmp_path)
    return made


def write_certificate(authority: trustme.CA, folder: Path) -> str:
    """Write a certificate of 127.0.0.1; return it as PEM."""
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    return issued.cert_chain_pems[0].bytes().decode().strip()


def tls(folder: Path) -> dict[str, str]:
    """Files of a publisher with TLS, without the authority that it trusts."""
    return {"tls_cert": str(folder / "cert.pem"), "tls_key": str(folder / "key.pem")}


def test_weights_and_calls_of_the_trainer_are_encrypted_both_ways(
    authority: trustme.CA, engine: ServedEngine, models: Path, tmp_path: Path
) -> None:
    """Each side knows the authority by a file."""
    words = ("--tls-cert", tmp_path / "cert.pem", "--tls-key", tmp_path / "key.pem", "--tls-ca", tmp_path / "ca.pem")
    with (
        helper_process(tmp_path / "local", engine.url, *map(str, words), token="secret") as helper,
        publishing(
            tmp_path / "weights",
            helper.url,
            token="secret",
            tls_ca=str(tmp_path / "ca.pem"),
            **tls(tmp_path),
        ) as publisher,
    ):
        assert helper.url.startswith("https://")
        publisher.prepare(4, CopiedWeights(models / "b"))
        uri = publisher.commit(4, confirmed)
        check_samples_with(engine, models / "b", 4)
        assert uri.startswith("https://127.0.0.1:")
        with pytest.raises(httpx.HTTPError):
            httpx.get(uri.replace("https", "http", 1))


@pytest.mark.parametrize("authorities", ["none", "other"])
def test_a_helper_that_does_not_know_the_authority_of_the_trainer_says_what_to_do(
    authority: trustme.CA, engine: ServedEngine, models: Path, tmp_path: Path, authorities: str
) -> None:
    """At once, without retries: no later try could end otherwise. The engine keeps its weights."""
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    options = ("--tls-ca", str(tmp_path / "other.pem")) if authorities == "other" else ()
    with (
        helper_process(tmp_path / "local", engine.url, *options) as helper,
        publishing(tmp_path / "weights", helper.url, **tls(tmp_path)) as publisher,
    ):
        publisher.prepare(1, CopiedWeights(models / "b"))
        with pytest.raises(ServiceUnavailable, match=r"certificate of https://.* is not accepted: .*--tls-ca names"):
            publisher.commit(1, confirmed)
        check_samples_with(engine, models / "a", 0)
        assert "trying again" not in helper.log.read_text()


def test_a_trainer_that_does_not_know_the_authority_of_a_helper_says_what_to_do(
    authority: trustme.CA, models: Path, tmp_path: Path
) -> None:
    words = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with (
        helper_process(tmp_path / "local", "http://127.0.0.1:9", *words) as helper,
        publishing(tmp_path / "weights", helper.url) as publisher,
    ):
        publisher.prepare(1, CopiedWeights(models / "b"))
        with pytest.raises(ServiceUnavailable, match=f"engine {helper.url} .*tls_ca of --publisher-options names"):
            publisher.commit(1, confirmed)


@pytest.mark.parametrize(
    ("files", "detail"),
    [
        ({"tls_cert": "cert.pem"}, "tls_key is not set; TLS needs tls_cert and tls_key"),
        ({"tls_key": "key.pem"}, "tls_cert is not set"),
        ({"tls_cert": "key.pem", "tls_key": "key.pem"}, "certificate .* cannot be used"),
        ({"tls_ca": "missing.pem"}, "tls_ca is .*missing.pem: .*No such file"),
        ({"tls_ca": "key.pem"}, "tls_ca is .*key.pem: .*it must be a PEM file with certificates"),
    ],
)
def test_unusable_files_of_tls_are_named_before_the_training(
    authority: trustme.CA, tmp_path: Path, files: dict[str, str], detail: str
) -> None:
    named = {option: str(tmp_path / name) for option, name in files.items()}
    with pytest.raises(Invalid, match=detail), publishing(tmp_path / "weights", "http://127.0.0.1:9", **named):
        pass


def test_a_renewed_certificate_is_shown_without_a_restart(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "RENEW_EVERY_S", 0)
    certificate = open_certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    server = WeightsServer(tmp_path, "127.0.0.1", 0, None, certificate)
    try:
        renewed = write_certificate(authority, tmp_path)
        address = ("127.0.0.1", server.port)
        eventually(lambda: ssl.get_server_certificate(address).strip(), TIMEOUT_S, lambda shown: shown == renewed)
    finally:
        server.close()


# ---------------------------------------------------------------------- the server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WeightsServer]:
    """A server of two versions and of files that nobody shall get."""
    for name in ("v000001/a.bin", "v000002/a.bin", ".v000003.77/a.bin"):
        (tmp_path / "root" / name).parent.mkdir(parents=True)
        (tmp_path / "root" / name).write_bytes(bytes(range(100)))
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "root" / "v000001" / "link").symlink_to(tmp_path / "outside")
    made = WeightsServer(tmp_path / "root", "127.0.0.1", 0, None)
    yield made
    made.close()


def test_the_server_sends_ranges_of_published_files_and_nothing_else(server: WeightsServer) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as client:
        part = client.get("/v000001/a.bin", headers={"range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, bytes(range(10, 20)))
        for path in (
            "/.v000003.77/a.bin",
            "/v000001/link",
            "/v000001",
            "/",
            "/%2e%2e/outside",
            "/v000001/../../outside",
            "/v000001/%00",
            "//etc/passwd",
            "/v000009/a.bin",
        ):
            assert client.get(path).status_code == 404, path
        assert client.get("/v000001/a.bin", headers={"range": "bytes=" + "0-1," * 20}).status_code == 416
        assert client.post("/v000001/a.bin").status_code == 405


def test_a_version_that_is_downloaded_outlives_the_newest_three(server: WeightsServer, tmp_path: Path) -> None:
    """Only versions of an ended history go at once."""
    root = tmp_path / "root"
    httpx.get(f"http://127.0.0.1:{server.port}/v000001/a.bin")
    for version in (3, 4, 5):
        (root / f"v{version:06d}").mkdir()
    WeightsFolders(root).prune(5, lambda: None, in_use=server.in_use)
    assert sorted(path.name for path in root.glob("v*")) == ["v000001", "v000003", "v000004", "v000005"]
    WeightsFolders(root).prune(5, lambda: None)
    assert sorted(path.name for path in root.glob("v*")) == ["v000003", "v000004", "v000005"]


def test_the_command_trains_a_run_with_an_engine_that_shares_no_folder(
    run: RunClient, engine: ServedEngine, models: Path, tmp_path: Path
) -> None:
    """`train --publisher http`, `fetch-weights`, service and engine; the last version is that of the checkpoint."""
    fill(run)
    with helper_process(tmp_path / "local", engine.url, token="secret") as helper:
        words = {
            "--url": str(run.http.base_url),
            "--run": run.run,
            "--model": str(models / "a"),
            "--engine": helper.url,
            "--publisher": "http",
            "--publisher-options": '{"port": 0}',
            "--publish-token": "secret",
            "--checkpoint-dir": str(tmp_path / "checkpoints"),
            "--weights-dir": str(tmp_path / "weights"),
        }
        command = ["train", *(word for pair in words.items() for word in pair)]
        done = run_forked("replaybuf", command, timeout_s=240, trainer=True)
        assert done.returncode == 0, done.stderr
    assert run.state()["published_version"] == STEPS
    assert f"/v{STEPS:06d}/#sha256=" in run.get("policy").json()["weights_uri"]
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    check_samples_with(engine, newest / "model", STEPS)

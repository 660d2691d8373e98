"""The calls that load weights into engines, and the watch that loads them again."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from replaybuf.errors import Fenced, ServiceUnavailable
from replaybuf.generator.fleet.publication import OnPublish
from replaybuf_trainer.models.loading import load_model, save_model
from replaybuf_trainer.publishers.engines import Engines
from replaybuf_trainer.publishers.reload import FolderLoader
from tests.trainer.served import WORD, ServedEngine, confirmed, oracle, served
from tests.waiting import eventually

TIMEOUT_S = 20.0


class Calls(BaseHTTPRequestHandler):
    """An engine that records every call and answers as scripted."""

    protocol_version = "HTTP/1.1"
    engine: ScriptedEngine

    def do_POST(self) -> None:
        """Answer with the next scripted status of this path, else 200; status 0 drops the connection."""
        length = int(self.headers.get("content-length") or 0)
        asked: Any = json.loads(self.rfile.read(length)) if length else None
        self.engine.seen.append((self.path, asked))
        scripted = self.engine.answers.get(self.path.partition("?")[0], [])
        status = scripted.pop(0) if scripted else 200
        if status == 0:
            self.close_connection = True
            return
        if self.path == "/update_weight_version":
            self.engine.version = asked["new_version"]
        self._send(status, b'{"error": "tensor 7 is broken"}' if status != 200 else b"{}")

    def do_GET(self) -> None:
        """Return the version."""
        self.engine.seen.append((self.path, None))
        self._send(200, json.dumps({"weight_version": self.engine.version, "world_size": 1}).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class ScriptedEngine:
    """A server of `Calls`: `answers` are statuses by path, `seen` the calls in order, `version` the version."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.answers: dict[str, list[int]] = {}
        self.version = "default"
        handler = type("Handler", (Calls,), {"engine": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def paths(self) -> list[str]:
        """Paths called, in order."""
        return [path for path, _ in self.seen]


@pytest.fixture
def scripted() -> Iterator[ScriptedEngine]:
    """A scripted engine."""
    engine = ScriptedEngine()
    engine.thread.start()
    yield engine
    engine.server.shutdown()
    engine.server.server_close()
    engine.thread.join()


@pytest.fixture
def publisher(scripted: ScriptedEngine) -> Iterator[Engines]:
    """A publisher to the scripted engine; the address has a slash at its end, as users write it."""
    made = Engines([f"{scripted.url}/"], timeout_s=5.0)
    yield made
    made.close()


def test_a_publication_pauses_loads_labels_and_resumes_an_engine(
    scripted: ScriptedEngine, publisher: Engines, tmp_path: Path
) -> None:
    """In this order, so that no token is sampled by new weights under the old label."""
    publisher.switch(FolderLoader(tmp_path), 12, confirmed)
    assert scripted.seen == [
        ("/pause?mode=keep", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}),
        ("/update_weight_version", {"new_version": "12"}),
        ("/resume", None),
    ]


@pytest.mark.parametrize(
    ("on_publish", "mode"),
    [("drain", "wait"), ("in-flight", "keep"), ("abort-and-resume", "abort"), ("abort", "abort")],
)
def test_on_publish_selects_the_pause_mode_of_the_engine(
    scripted: ScriptedEngine, tmp_path: Path, on_publish: OnPublish, mode: str
) -> None:
    """They finish first, are frozen, or are cut off."""
    publisher = Engines([scripted.url], timeout_s=5.0, on_publish=on_publish)
    publisher.switch(FolderLoader(tmp_path), 12, confirmed)
    publisher.close()
    assert scripted.paths[0] == f"/pause?mode={mode}" and scripted.paths[-1] == "/resume"


def test_a_rejected_load_names_engine_status_and_answer(
    scripted: ScriptedEngine, publisher: Engines, tmp_path: Path
) -> None:
    """Nobody knows the weights of the engine now, so it samples nothing and gets no label."""
    scripted.answers["/collective_rpc"] = [500, 500]
    with pytest.raises(ServiceUnavailable) as raised:
        publisher.switch(FolderLoader(tmp_path), 12, confirmed)
    for word in (scripted.url, "/collective_rpc", "500", "tensor 7 is broken"):
        assert word in raised.value.detail
    assert "/update_weight_version" not in scripted.paths
    assert "/resume" not in scripted.paths and scripted.paths[-1] == "/pause?mode=abort"


def test_a_single_rejection_is_retried(scripted: ScriptedEngine, publisher: Engines, tmp_path: Path) -> None:
    """A single 500 does not end the training."""
    scripted.answers["/collective_rpc"] = [500]
    publisher.switch(FolderLoader(tmp_path), 12, confirmed)
    assert scripted.paths[-2:] == ["/update_weight_version", "/resume"]


def test_a_dropped_connection_is_retried_on_a_new_connection(
    scripted: ScriptedEngine, publisher: Engines, tmp_path: Path
) -> None:
    """An engine resets kept-alive connections after an error."""
    scripted.answers["/collective_rpc"] = [0]
    publisher.switch(FolderLoader(tmp_path), 12, confirmed)
    assert scripted.paths.count("/collective_rpc") == 2
    assert scripted.paths[-1] == "/resume"


def test_an_unreachable_engine_is_named(tmp_path: Path) -> None:
    """The message has its address and the failed call."""
    publisher = Engines(["http://127.0.0.1:9"], timeout_s=1.0)
    with pytest.raises(ServiceUnavailable, match=r"http://127\.0\.0\.1:9 does not answer"):
        publisher.switch(FolderLoader(tmp_path), 1, confirmed)
    publisher.close()


def test_the_engine_samples_with_the_published_weights(engine: ServedEngine, models: Path, tmp_path: Path) -> None:
    """Save, publish, sample: the logprobs are those of the model that was saved, under its version."""
    model = load_model(models / "a")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    folder = tmp_path / "v000004"
    save_model(model, models / "a", folder)
    publisher = Engines([engine.url], timeout_s=20.0)
    publisher.switch(FolderLoader(folder), 4, confirmed)
    publisher.close()
    choice = engine.complete(WORD, max_tokens=12)[0]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(oracle(model, WORD, choice["token_ids"]), abs=1e-4)
    assert choice["weight_versions"][0]["version"] == engine.version() == "4"
    assert not engine.http.get("/is_paused").json()["is_paused"]


# ---------------------------------------------------------------------- the watch


class Asked:
    """Fake service that confirms that the trainer owns the run: a call returns None or raises a scripted error."""

    def __init__(self, *faults: Exception) -> None:
        self.calls = 0
        self._faults = list(faults)

    def __call__(self) -> None:
        """Answer."""
        self.calls += 1
        if self._faults:
            raise self._faults.pop(0)


def watching(*urls: str) -> contextlib.closing[Engines]:
    """Open a publisher, and close it at the end of the block."""
    return contextlib.closing(Engines(urls, timeout_s=TIMEOUT_S))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replaybuf_trainer.publishers.engine.WATCH_EVERY_S", 0.01)
    monkeypatch.setattr("replaybuf_trainer.publishers.engine.RETRY_CEILING_S", 0.01)


def test_a_restarted_engine_gets_the_last_published_weights(models: Path) -> None:
    """Without a new publication, and they are what it samples from."""
    asked = Asked()
    with contextlib.ExitStack() as first:
        port = first.enter_context(served(models / "a")).port
        with watching(f"http://127.0.0.1:{port}") as publisher:
            publisher.switch(FolderLoader(models / "b"), 4, confirmed)
            publisher.watch(asked, 0.01)
            first.close()
            with served(models / "a", port) as engine:
                eventually(engine.version, TIMEOUT_S, lambda version: version == "4")
                choice = engine.complete(WORD, max_tokens=12)[0]
                eventually(lambda: publisher.reloads, TIMEOUT_S)
    expected = oracle(load_model(models / "b"), WORD, choice["token_ids"])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert publisher.reloads == 1 and asked.calls == 2


def test_an_engine_with_the_published_version_is_not_loaded_again(scripted: ScriptedEngine, tmp_path: Path) -> None:
    """The publisher requests only its version."""
    asked = Asked()
    with watching(scripted.url) as publisher:
        publisher.switch(FolderLoader(tmp_path), 3, confirmed)
        publisher.watch(asked, 0.01)
        eventually(lambda: scripted.paths.count("/weight_info") >= 3, TIMEOUT_S)
    assert scripted.paths.count("/collective_rpc") == 1 and asked.calls == 0


def test_a_publication_skips_an_unreachable_engine_and_loads_it_later(engine: ServedEngine, models: Path) -> None:
    """One engine of several that dies does not end the training."""
    with served(models / "a") as gone:
        port = gone.port
    asked = Asked()
    with watching(f"http://127.0.0.1:{port}", engine.url) as publisher:
        publisher.switch(FolderLoader(models / "b"), 1, confirmed)
        assert engine.version() == "1"
        publisher.switch(FolderLoader(models / "a"), 2, confirmed)
        publisher.watch(asked, 0.01)
        with served(models / "b", port) as back:
            eventually(back.version, TIMEOUT_S, lambda version: version == "2")


def test_a_load_that_an_engine_rejects_is_retried(
    scripted: ScriptedEngine, engine: ServedEngine, tmp_path: Path, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names it, the version it lacks and why."""
    asked = Asked()
    scripted.answers["/collective_rpc"] = [500, 500, 500, 500]
    with watching(scripted.url, engine.url) as publisher:
        publisher.switch(FolderLoader(models / "b"), 5, confirmed)
        publisher.watch(asked, 0.01)
        eventually(lambda: scripted.version, TIMEOUT_S, lambda version: version == "5")
    assert f"engine {scripted.url} lacks version 5" in caplog.text and "tensor 7 is broken" in caplog.text


def test_a_trainer_that_lost_the_run_loads_no_weights(
    scripted: ScriptedEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights that the engine has now may be those of the trainer that has the run."""
    asked = Asked(Fenced("epoch is 3; the run has 4"))
    with watching(scripted.url) as publisher:
        publisher.switch(FolderLoader(tmp_path), 3, confirmed)
        scripted.version = "2"
        publisher.watch(asked, 0.01)
        eventually(lambda: "the watch of the engines ends" in caplog.text, TIMEOUT_S)
    assert scripted.paths.count("/collective_rpc") == 1


def test_no_weights_are_loaded_until_the_service_confirms_the_trainer(scripted: ScriptedEngine, tmp_path: Path) -> None:
    """After the confirmation the engine is loaded."""
    asked = Asked(ServiceUnavailable("away"), ServiceUnavailable("away"))
    with watching(scripted.url) as publisher:
        publisher.switch(FolderLoader(tmp_path), 3, confirmed)
        scripted.version = "2"
        publisher.watch(asked, 0.01)
        eventually(lambda: publisher.reloads, TIMEOUT_S)
    assert asked.calls == 4 and scripted.paths.count("/collective_rpc") == 2


# ---------------------------------------------------------------------- faults in the middle of a load


def test_an_engine_whose_label_fails_stays_paused_until_it_is_loaded_again(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    """It has new weights under an old label, so it must sample nothing."""
    scripted.answers["/update_weight_version"] = [500, 500]
    with watching(scripted.url) as publisher:
        with pytest.raises(ServiceUnavailable, match=r"/update_weight_version with 500"):
            publisher.switch(FolderLoader(tmp_path), 3, confirmed)
        assert "/resume" not in scripted.paths and publisher.figures()["engines_behind"] == 1
        publisher.watch(confirmed, 0.01)
        eventually(lambda: publisher.reloads, TIMEOUT_S)
    assert scripted.version == "3" and scripted.paths[-1] in ("/resume", "/weight_info")


def test_a_trainer_that_is_fenced_before_a_load_touches_no_engine(
    scripted: ScriptedEngine, publisher: Engines, tmp_path: Path
) -> None:
    with pytest.raises(Fenced):
        publisher.switch(FolderLoader(tmp_path), 3, Asked(Fenced("epoch is 3; the run has 4")))
    assert scripted.paths == []


def test_a_trainer_that_is_fenced_during_a_load_labels_the_engine_as_fenced(
    scripted: ScriptedEngine, publisher: Engines, tmp_path: Path
) -> None:
    """Its weights may have come after those of its successor, whose watch sees the label and loads again."""
    answers = iter([None, Fenced("epoch is 3; the run has 4")])

    def confirm() -> None:
        if error := next(answers):
            raise error

    with pytest.raises(Fenced):
        publisher.switch(FolderLoader(tmp_path), 3, confirm)
    assert scripted.version == "-1" and "/resume" not in scripted.paths


def test_an_engine_without_a_route_is_told_with_the_setting_it_lacks(
    scripted: ScriptedEngine, publisher: Engines, tmp_path: Path
) -> None:
    scripted.answers["/pause"] = [404]
    with pytest.raises(ServiceUnavailable, match=r"/pause\?mode=keep with 404: .*VLLM_SERVER_DEV_MODE=1"):
        publisher.switch(FolderLoader(tmp_path), 3, confirmed)


def test_a_rejected_call_changes_nothing_so_the_engine_goes_on(scripted: ScriptedEngine, tmp_path: Path) -> None:
    """With the old weights under the old version."""
    scripted.answers["/collective_rpc"] = [400]
    with watching(scripted.url) as publisher, pytest.raises(ServiceUnavailable, match="/collective_rpc with 400"):
        publisher.switch(FolderLoader(tmp_path), 3, confirmed)
    assert scripted.paths[-1] == "/resume" and scripted.version == "default"

"""Model folders that are whole or not there, and the calls that load them into engines."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from replaybuf.errors import ServiceUnavailable
from replaybuf.generator.publication import OnPublish
from replaybuf_trainer.model import load_model
from replaybuf_trainer.weights import EnginePublisher, keep_newest, save_model, whole_folder
from tests.trainer.served import ServedEngine, oracle

WORD = [70, 88, 79, 79, 68, 33]


class Failed(Exception):
    """What the tests raise in the middle of writing."""


# ---------------------------------------------------------------------- folders


def test_a_saved_model_is_a_complete_hugging_face_folder(models: Path) -> None:
    """transformers alone loads model and tokenizer from it, and both do what ours do."""
    folder = models / "a"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "tokenizer_config.json" in names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert tokenizer.encode("culla>") == WORD
    assert tokenizer.decode([*WORD, 2], skip_special_tokens=True) == "culla>"
    assert oracle(model, WORD, [3, 4]) == pytest.approx(oracle(load_model(folder), WORD, [3, 4]), abs=1e-6)


def test_a_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    """While it is being filled nothing stands at its path."""
    folder = tmp_path / "v000001"
    with whole_folder(folder) as scratch:
        (scratch / "file").write_text("half")
        assert not folder.exists()
        assert scratch.parent == tmp_path
        assert not scratch.name.startswith("v")
    assert (folder / "file").read_text() == "half"
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]


def test_a_write_that_fails_leaves_the_folder_of_before(tmp_path: Path) -> None:
    """Nothing half-written stays, the older content does."""
    folder = tmp_path / "v000001"
    for content in ("first", "second"):
        try:
            with whole_folder(folder) as scratch:
                (scratch / "file").write_text(content)
                if content == "second":
                    raise Failed
        except Failed:
            pass
    assert (folder / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]


def test_a_folder_is_on_disk_before_it_is_at_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and scratch folder are synced before the rename, the parent after it."""
    synced: list[str] = []
    descriptors: dict[int, str] = {}
    really_open, really_sync = os.open, os.fsync

    def remember(path: Any, *arguments: Any, **keywords: Any) -> int:
        descriptor = really_open(path, *arguments, **keywords)
        descriptors[descriptor] = str(path)
        return descriptor

    def record(descriptor: int) -> None:
        state = "moved" if (tmp_path / "v1").exists() else "hidden"
        synced.append(f"{state} {Path(descriptors[descriptor]).name}")
        really_sync(descriptor)

    monkeypatch.setattr(os, "open", remember)
    monkeypatch.setattr(os, "fsync", record)
    with whole_folder(tmp_path / "v1") as scratch:
        (scratch / "file").write_text("x")
        name = scratch.name
    assert synced == ["hidden file", f"hidden {name}", f"moved {tmp_path.name}"]


def test_the_newest_folders_stay(tmp_path: Path) -> None:
    """By name, and only those that the pattern names."""
    for name in ("v000009", "v000010", "v000011", "other"):
        (tmp_path / name).mkdir()
    keep_newest(tmp_path, "v*", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "v000010", "v000011"]


# ---------------------------------------------------------------------- engines


class Calls(BaseHTTPRequestHandler):
    """An engine that writes down what it is asked and answers as the test scripted it."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, Any]]
    answers: dict[str, list[int]]

    def do_POST(self) -> None:
        """Answer with the next scripted status of this path, else 200; status 0 drops the connection."""
        length = int(self.headers.get("content-length") or 0)
        self.seen.append((self.path, json.loads(self.rfile.read(length)) if length else None))
        scripted = self.answers.get(self.path.partition("?")[0], [])
        status = scripted.pop(0) if scripted else 200
        if status == 0:
            self.close_connection = True
            return
        body = b'{"error": "tensor 7 is broken"}' if status != 200 else b"{}"
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class ScriptedEngine:
    """A server of `Calls`: `answers` are statuses by path, `seen` the calls in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.answers: dict[str, list[int]] = {}
        handler = type("Handler", (Calls,), {"seen": self.seen, "answers": self.answers})
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
def publisher(scripted: ScriptedEngine) -> Iterator[EnginePublisher]:
    """A publisher to the scripted engine; the address has a slash at its end, as users write it."""
    made = EnginePublisher([f"{scripted.url}/"], timeout_s=5.0)
    yield made
    made.close()


def test_an_engine_is_frozen_loaded_labelled_and_resumed(
    scripted: ScriptedEngine, publisher: EnginePublisher, tmp_path: Path
) -> None:
    """In this order, so that no token is sampled by new weights under the old label."""
    publisher.publish(tmp_path, 12)
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
def test_the_policy_decides_what_becomes_of_running_completions(
    scripted: ScriptedEngine, tmp_path: Path, on_publish: OnPublish, mode: str
) -> None:
    """They finish first, are frozen, or are cut off."""
    publisher = EnginePublisher([scripted.url], timeout_s=5.0, on_publish=on_publish)
    publisher.publish(tmp_path, 12)
    publisher.close()
    assert scripted.paths[0] == f"/pause?mode={mode}" and scripted.paths[-1] == "/resume"


def test_refused_weights_name_engine_status_and_answer(
    scripted: ScriptedEngine, publisher: EnginePublisher, tmp_path: Path
) -> None:
    """The engine goes on with what it has, and does not get the new label."""
    scripted.answers["/collective_rpc"] = [500, 500]
    with pytest.raises(ServiceUnavailable) as raised:
        publisher.publish(tmp_path, 12)
    for word in (scripted.url, "/collective_rpc", "500", "tensor 7 is broken"):
        assert word in raised.value.detail
    assert "/update_weight_version" not in scripted.paths
    assert scripted.paths[-1] == "/resume"


def test_one_refusal_is_tried_again(scripted: ScriptedEngine, publisher: EnginePublisher, tmp_path: Path) -> None:
    """A single 500 does not end the training."""
    scripted.answers["/collective_rpc"] = [500]
    publisher.publish(tmp_path, 12)
    assert scripted.paths[-2:] == ["/update_weight_version", "/resume"]


def test_a_dropped_connection_is_tried_again_on_a_new_one(
    scripted: ScriptedEngine, publisher: EnginePublisher, tmp_path: Path
) -> None:
    """An engine resets kept-alive connections after an error."""
    scripted.answers["/collective_rpc"] = [0]
    publisher.publish(tmp_path, 12)
    assert scripted.paths.count("/collective_rpc") == 2
    assert scripted.paths[-1] == "/resume"


def test_an_engine_that_is_gone_is_named(tmp_path: Path) -> None:
    """With its address and the call it did not answer."""
    publisher = EnginePublisher(["http://127.0.0.1:9"], timeout_s=1.0)
    with pytest.raises(ServiceUnavailable, match=r"http://127\.0\.0\.1:9 does not answer"):
        publisher.publish(tmp_path, 1)
    publisher.close()


def test_published_weights_are_what_the_engine_samples_from(engine: ServedEngine, models: Path, tmp_path: Path) -> None:
    """Save, publish, sample: the logprobs are those of the model that was saved, under its version."""
    model = load_model(models / "a")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    folder = tmp_path / "v000004"
    save_model(model, models / "a", folder)
    publisher = EnginePublisher([engine.url], timeout_s=20.0)
    publisher.publish(folder, 4)
    publisher.close()
    choice = engine.complete(WORD, max_tokens=12)[0]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(oracle(model, WORD, choice["token_ids"]), abs=1e-4)
    assert choice["weight_versions"][0]["version"] == engine.version() == "4"
    assert not engine.http.get("/is_paused").json()["is_paused"]

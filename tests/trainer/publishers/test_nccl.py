"""Weight transfer from memory: the calls of vLLM over gloo, to a real small engine in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from replaybuf.errors import Fenced, Invalid, ServiceUnavailable
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.models.policy import WholeWeights
from replaybuf_trainer.publishers.nccl import NcclOptions, NcclPublisher
from replaybuf_trainer.publishers.publisher import PublisherSetup
from replaybuf_trainer.weight_chunks import as_bytes, chunk_ends, from_bytes
from tests.trainer.publishers.test_engines import TIMEOUT_S, ScriptedEngine, scripted
from tests.trainer.served import WORD, ServedEngine, confirmed, oracle, served
from tests.waiting import eventually

__all__ = ["scripted"]
SIZE = 3_201_536
"""Bytes of the tests' model in float32."""


@contextlib.contextmanager
def publisher(*engines: str, timeout_s: float = TIMEOUT_S, **options: Any) -> Iterator[NcclPublisher]:
    """A publisher over gloo."""
    setup = PublisherSetup(weights_dir=Path("unused"), engines=engines, engine_timeout_s=timeout_s)
    made = NcclPublisher(setup, NcclOptions(backend="gloo", **options))
    try:
        yield made
    finally:
        made.close()


class Changed:
    """Weights of a model after `change`."""

    adapter = ""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the weights."""
        return self._tensors

    def save_weights(self, folder: Path) -> None:
        """Fail: nothing may be written."""
        raise AssertionError(folder)


def weights_of(folder: Path) -> Changed:
    """The weights of a model folder."""
    return Changed(WholeWeights(load_model(folder), None, folder).tensors())


def publish(made: NcclPublisher, weights: Changed, version: int) -> None:
    """Publish in both phases."""
    made.prepare(version, weights)
    made.commit(version, confirmed)


def check_sampled(engine: ServedEngine, folder: Path) -> None:
    """The engine samples with the weights of a folder."""
    choice = engine.complete(WORD, max_tokens=12)[0]
    expected = oracle(load_model(folder), WORD, choice["token_ids"])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_engines_sample_with_the_tensors_of_the_trainer(engine: ServedEngine, models: Path) -> None:
    """In chunks of 100 kB; the second version goes over the same group, and then an older model again."""
    with served(models / "a") as other, publisher(engine.url, other.url, buffer_bytes=100_000) as made:
        for version, name in enumerate("bab", 1):
            publish(made, weights_of(models / name), version)
            for each in (engine, other):
                assert each.version() == str(version)
                check_sampled(each, models / name)
        assert made.figures() == {"published_bytes": SIZE, "engines_behind": 0, "engine_reloads": 0}


def test_bfloat16_takes_half_the_bytes(engine: ServedEngine, models: Path) -> None:
    with publisher(engine.url, dtype="bfloat16") as made:
        publish(made, weights_of(models / "b"), 1)
        assert made.figures()["published_bytes"] == SIZE // 2
    assert engine.version() == "1"


def test_a_restarted_engine_gets_the_staged_weights_while_the_trainer_changes_its_own(models: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in weights_of(models / "b").tensors().items()}
    with contextlib.ExitStack() as first:
        port = first.enter_context(served(models / "a")).port
        with publisher(f"http://127.0.0.1:{port}") as made:
            publish(made, Changed(weights), 4)
            for tensor in weights.values():
                tensor.zero_()
            first.close()
            made.watch(confirmed)
            with served(models / "a", port) as engine:
                eventually(lambda: made.figures()["engine_reloads"], TIMEOUT_S)
                assert engine.version() == "4"
                check_sampled(engine, models / "b")


def test_weights_of_another_model_are_rejected_and_the_engine_keeps_its_own(engine: ServedEngine, models: Path) -> None:
    """Nothing is sent, so the engine goes on with its old weights until a version fits."""
    before = engine.version()
    weights = dict(weights_of(models / "b").tensors())
    weights["model.norm.weight"] = torch.ones(3)
    with publisher(engine.url) as made:
        with pytest.raises(ServiceUnavailable, match=r"/update_weights with 400: .*model.norm.weight has shape \(3,\)"):
            publish(made, Changed(weights), 1)
        assert engine.version() == before
        assert not engine.http.get("/is_paused").json()["is_paused"]
        publish(made, weights_of(models / "b"), 1)
    check_sampled(engine, models / "b")


def test_an_update_that_a_dead_trainer_left_open_is_ended(engine: ServedEngine, models: Path) -> None:
    assert engine.post("/start_weight_update").status_code == 200
    with publisher(engine.url) as made:
        publish(made, weights_of(models / "b"), 2)
    check_sampled(engine, models / "b")


def test_a_trainer_that_is_fenced_during_a_transfer_applies_nothing(engine: ServedEngine, models: Path) -> None:
    """The engine stays paused with a label that its successor sees."""
    answers = iter([None, Fenced("epoch is 3; the run has 4")])

    def confirm() -> None:
        if error := next(answers):
            raise error

    with publisher(engine.url) as made, pytest.raises(Fenced):
        made.prepare(3, weights_of(models / "b"))
        made.commit(3, confirm)
    assert engine.version() == "-1" and engine.http.get("/is_paused").json()["is_paused"]
    with publisher(engine.url) as successor:
        publish(successor, weights_of(models / "a"), 3)
    check_sampled(engine, models / "a")


def test_an_engine_without_weight_transfer_names_the_options_of_vllm(scripted: ScriptedEngine, models: Path) -> None:
    scripted.answers["/init_weight_transfer_engine"] = [404]
    with (
        publisher(scripted.url, timeout_s=2.0) as made,
        pytest.raises(ServiceUnavailable, match=r"404: .*start vLLM with VLLM_SERVER_DEV_MODE=1 and --weight-transfer"),
    ):
        publish(made, weights_of(models / "b"), 1)
    assert scripted.paths[-1] == "/resume"


def test_nccl_without_a_gpu_is_rejected_before_training() -> None:
    with pytest.raises(Invalid, match=r'needs a GPU.*\{"backend": "gloo"\}'):
        NcclPublisher(PublisherSetup(weights_dir=Path("unused"), engines=("http://e",)), NcclOptions())


def test_chunks_end_with_the_tensor_that_exceeds_the_buffer() -> None:
    """As vLLM computes them; both sides must agree."""
    sizes = [40, 60, 1, 500, 3, 3]
    assert [sizes[part] for part in chunk_ends(sizes, 100)] == [[40, 60, 1], [500], [3, 3]]
    assert list(chunk_ends([], 100)) == []


def test_bytes_of_tensors_at_odd_offsets_are_read_back() -> None:
    tensors = [torch.tensor(3.5), torch.arange(3, dtype=torch.bfloat16), torch.ones(2, 2)]
    packed = torch.cat([as_bytes(tensor) for tensor in tensors])
    parts = torch.split(packed, [tensor.nbytes for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        assert torch.equal(from_bytes(part, tensor.shape, tensor.dtype), tensor)

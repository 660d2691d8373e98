"""vLLM passes the contract that the tiny engine and the doubles pass."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from replaybuf_trainer.publishers.engines import Engines
from replaybuf_trainer.publishers.reload import FolderLoader
from tests.generator.engines.contract import EngineContract, ServedOverVllmApi, Subject
from tests.trainer.model_contract import TIMEOUT_S, ModelContract
from tests.trainer.whole_run import VOCAB_SIZE


class TestVllm(EngineContract):
    """0.31 by /inference/v1/generate."""

    @pytest.fixture(autouse=True)
    def _served(self, vllm: str) -> None:
        self.url = vllm

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Subject]:
        """Lend the one vLLM there is."""
        yield ServedOverVllmApi(self.url, vocab_size=VOCAB_SIZE, prompt=[70, 88, 79, 79, 68, 33])


class TestVllmsModel(ModelContract):
    """By prompt_logprobs of /v1/completions, and /tokenize."""

    @pytest.fixture(autouse=True)
    def _served(self, vllm: str, versions: list[Path]) -> None:
        publisher = Engines([vllm], TIMEOUT_S)
        publisher.switch(FolderLoader(versions[0]), 0, lambda: None)
        publisher.close()
        self.url, self.folder, self.other = vllm, versions[0], versions[1]

"""The tiny engine passes the contract that the real ones pass."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.generator.engines.contract import EngineContract, ServedOverVllmApi, Subject
from tests.trainer.model_contract import ModelContract
from tests.trainer.served import ServedEngine


class TestTinyEngine(EngineContract):
    """By /v1/completions, with labels."""

    @pytest.fixture(autouse=True)
    def _served(self, engine: ServedEngine) -> None:
        self.engine = engine

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Subject]:
        """Lend the engine of this test."""
        yield ServedOverVllmApi(self.engine.url, vocab_size=98, prompt=[70, 88, 79, 79, 68, 33])


class TestTinyEnginesModel(ModelContract):
    """By prompt_logprobs of /v1/completions, and /tokenize."""

    @pytest.fixture(autouse=True)
    def _served(self, shared_engine: ServedEngine, models: Path) -> None:
        self.url, self.folder, self.other = shared_engine.url, models / "a", models / "b"

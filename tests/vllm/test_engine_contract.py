"""vLLM passes the contract that the tiny engine and the doubles pass."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.generator.engine_contract import EngineContract, ServedOverVllmApi, Subject
from tests.vllm.served import VOCAB_SIZE


class TestVllm(EngineContract):
    """0.31 by /inference/v1/generate."""

    @pytest.fixture(autouse=True)
    def _served(self, vllm: str) -> None:
        self.url = vllm

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Subject]:
        """Lend the one vLLM there is."""
        yield ServedOverVllmApi(self.url, vocab_size=VOCAB_SIZE, prompt=[70, 88, 79, 79, 68, 33])

"""A real service, a tiny model, and TRL on a CPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}

import pytest
import torch

from replaybuf_trainer import warm_start
from replaybuf_trainer.models.tiny import character_tokenizer, new_model
from replaybuf_trl import allow_cpu
from tests.conftest import connect, own_service, run, service, shared_service

__all__ = ["connect", "own_service", "run", "service", "shared_service"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=3, help="random kill -9 of trainer, service and Valkey")
    parser.addoption("--steps", type=int, help="steps of the run with kills; 10 and 2 for each kill without it")
    parser.addoption("--warm-model", type=Path, help="folder of `replaybuf init-model`; made in a minute without it")
    parser.addoption("--kill-seed", type=int, default=0, help="seed of their moments")


@pytest.fixture(scope="session", autouse=True)
def _on_cpu() -> None:
    allow_cpu()
    torch.set_num_threads(1)
    logging.getLogger("replaybuf_trl").setLevel(logging.INFO)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny Qwen3 with random weights."""
    folder = tmp_path_factory.mktemp("model")
    new_model(0).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    yield folder


@pytest.fixture(scope="session")
def warm_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 that spells a quarter of words backwards, as that of the demo, with prompts.jsonl."""
    if path := request.config.getoption("--warm-model"):
        return Path(path)
    folder = tmp_path_factory.mktemp("warm") / "model"
    warm_start.make(folder, "spell_backward", 0, 0.25)
    return folder

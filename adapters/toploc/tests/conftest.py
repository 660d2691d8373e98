"""Two versions of a tiny model on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import pytest
import torch

from replaybuf_trainer.models.tiny import new_model
from tests.conftest import connect, own_service

__all__ = ["connect", "own_service"]


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of versions 0 and 1, as the trainer publishes them."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("weights")
    for version in (0, 1):
        new_model(version).save_pretrained(folder / f"v{version:06d}")
    return folder

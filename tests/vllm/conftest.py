"""One vLLM for all tests of this folder, and model folders of the policy versions it is given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer.whole_run import VERSIONS, write_version
from tests.vllm.served import served

VENV = Path(os.environ.get("VLLM_VENV", Path(__file__).parents[2] / ".venv-vllm")).absolute()


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Model folders by policy version, no two with the same weights."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("versions")
    return [write_version(folder, version) for version in range(VERSIONS)]


@pytest.fixture(scope="session")
def vllm(versions: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a vLLM that started with version 0; whoever needs certain weights loads them."""
    executable = VENV / "bin" / "vllm"
    if not (VENV / ".installed").exists():
        pytest.fail(f"no vLLM in {VENV}; `make test-vllm` installs it there", pytrace=False)
    with served(executable, versions[0], tmp_path_factory.mktemp("vllm") / "vllm.log") as url:
        yield url

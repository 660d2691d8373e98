"""Models and engines for the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

# Without torch there is nothing to test here.
torch = pytest.importorskip("torch")

from tests.trainer.served import ServedEngine, served, write_model  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two model folders, `a` and `b`, that differ in their weights alone."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("a", "b")):
        write_model(root / name, seed)
    return root


@pytest.fixture(scope="module")
def shared_engine(models: Path) -> Iterator[ServedEngine]:
    """An engine with the weights of `a`, for tests that leave its weights alone."""
    with served(models / "a") as engine:
        yield engine


@pytest.fixture
def engine(models: Path) -> Iterator[ServedEngine]:
    """A private engine of the test, with the weights of `a`."""
    with served(models / "a") as engine:
        yield engine

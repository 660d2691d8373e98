"""A real service, and both frameworks on a CPU."""

from __future__ import annotations

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import pytest

from tests.conftest import connect, own_service, run, service, shared_service

__all__ = ["connect", "own_service", "run", "service", "shared_service"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=2, help="random kill -9 of each framework's training")
    parser.addoption("--kill-seed", type=int, default=0, help="seed of their moments")

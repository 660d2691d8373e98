"""A real service, and the interpreter that has verifiers: that of the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1"}

import pytest

from tests.conftest import connect, own_service, run, service, shared_service

__all__ = ["connect", "own_service", "run", "service", "shared_service"]


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of the tests."""
    return Path(sys.executable)

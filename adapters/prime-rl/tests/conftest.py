"""A real service, and prime-rl's data loader. Without it the tests fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from prime_source import SOURCE, load

from tests.conftest import connect, own_service, run, service, shared_service

# The process that sidecars are forked from knows its own modules only.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

__all__ = ["connect", "own_service", "run", "service", "shared_service"]


@pytest.fixture(scope="session")
def prime_data() -> Any:
    """Return the module of prime-rl's data loader."""
    return load(SOURCE.checkout())

"""A real service, and slime's code. Without it the tests fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from slime_source import SOURCE

from tests.conftest import connect, own_service, run, service, shared_service

# The process that trainings are forked from knows its own modules only.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

__all__ = ["connect", "own_service", "run", "service", "shared_service"]


@pytest.fixture(scope="session")
def source() -> Path:
    """Return the checkout of slime."""
    return SOURCE.checkout()

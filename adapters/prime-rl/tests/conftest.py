"""A real service, and prime-rl's data loader where it can be had."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from prime_source import SOURCE, load

from tests.conftest import connect, own_service, run, service
from tests.pinned_source import NoSource

# The process that sidecars are forked from knows its own modules only.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

__all__ = ["connect", "own_service", "run", "service"]


@pytest.fixture(scope="session")
def prime_data() -> Any:
    """Return the module of prime-rl's data loader."""
    try:
        return load(SOURCE.checkout())
    except NoSource as error:
        pytest.skip(str(error))

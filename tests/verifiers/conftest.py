"""The interpreter that has verifiers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("VERIFIERS", Path(__file__).parents[2] / ".verifiers")).absolute()


@pytest.fixture(scope="session")
def python() -> Path:
    """What `make test-verifiers` installs."""
    if not (FOLDER / ".installed").exists():
        pytest.fail(f"no verifiers in {FOLDER}; `make test-verifiers` installs it there", pytrace=False)
    return FOLDER / "python"

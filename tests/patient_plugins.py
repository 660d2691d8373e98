"""Tests of what plug-ins decide, not of how long that takes on a busy machine; a conftest.py imports the fixture."""

from __future__ import annotations

import pytest

from replaybuf.plugins import time_limit

PATIENT_S = 30.0


@pytest.fixture(autouse=True)
def patient_with_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer of a call may fire in a callback of the garbage collector, and Python drops what is raised there."""
    monkeypatch.setattr(time_limit, "CALL_LIMIT_S", PATIENT_S)

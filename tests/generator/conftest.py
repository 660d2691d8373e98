"""Bounds of a stop that no test of this folder waits for, on a machine with other work."""

from __future__ import annotations

import pytest

from replaybuf.generator import inflight
from tests.generator.doubles import TIMEOUT_S


@pytest.fixture(autouse=True)
def _returned_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket that is not returned within `RETURN_S` expires, and the test would miss it."""
    monkeypatch.setattr(inflight, "RETURN_S", TIMEOUT_S)

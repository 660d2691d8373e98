"""Tests of the generator: coroutines run in an event loop of their own, and stops have as long as a test."""

from __future__ import annotations

import inspect

import pytest

from replaybuf.generator import inflight
from tests.generator.doubles import TIMEOUT_S
from tests.generator.worlds import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function, within the time limit."""
    test, fixtures = pyfuncitem.obj, pyfuncitem.funcargs
    if not inspect.iscoroutinefunction(test):
        return None
    run(test(**{name: fixtures[name] for name in inspect.signature(test).parameters}))
    return True


@pytest.fixture(autouse=True)
def _returned_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket that is not returned within `RETURN_S` expires, and the test would miss it."""
    monkeypatch.setattr(inflight, "RETURN_S", TIMEOUT_S)

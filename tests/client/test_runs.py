"""Runs of a service: a producer lists them, and waits for one that a trainer has still to create."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from replaybuf import AsyncClient, Client
from replaybuf.errors import NotFound
from tests.conftest import RunClient, ServeProcess

CONFIG = {"batch": {"groups_per_batch": 1}}


def test_every_run_is_listed_by_name(run: RunClient, service: ServeProcess) -> None:
    run.put(**CONFIG)
    with Client(service.url, "another") as client:
        names = [status.run for status in client.list_runs()]
        assert run.run in names and "another" not in names and names == sorted(names)


def test_a_missing_run_is_told_in_words_of_python(run: RunClient, service: ServeProcess) -> None:
    """With the runs that exist, and the methods that create it or wait for it."""
    run.put(**CONFIG)
    with Client(service.url, "nope") as client, pytest.raises(NotFound) as raised:
        client.get_policy()
    detail = raised.value.detail
    assert "run 'nope' does not exist; runs here: " in detail and "Client.put_run" in detail and "/v1" not in detail
    assert raised.value.value == "nope" and isinstance(raised.value.bound, list)


def test_a_producer_that_starts_first_waits_for_its_run(
    run: RunClient, service: ServeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """It logs what it waits for."""
    asked = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for a run" in record.getMessage():
                asked.set()

    handler = Handler()
    logging.getLogger("replaybuf.client.calls").addHandler(handler)
    caplog.set_level(logging.INFO, "replaybuf.client.calls")
    trainer = threading.Thread(target=lambda: asked.wait(60) and run.put(**CONFIG))
    trainer.start()
    with Client(service.url, run.run) as client:
        status = client.wait_for_run(timeout_s=60, poll_s=0.05)
    trainer.join()
    logging.getLogger("replaybuf.client.calls").removeHandler(handler)
    assert (status.run, status.state) == (run.run, "running")
    assert f"run '{run.run}' does not exist" in caplog.text


def test_the_wait_for_a_run_ends_with_its_name_and_the_time(run: RunClient, service: ServeProcess) -> None:
    """The asyncio client waits alike."""

    async def wait() -> None:
        async with AsyncClient(service.url, run.run) as client:
            await client.wait_for_run(timeout_s=0.2, poll_s=0.05)

    with pytest.raises(NotFound, match=rf"run '{run.run}' does not exist; .* waited \d+ s for it"):
        asyncio.run(wait())


def test_a_status_is_shown_in_one_line(run: RunClient, service: ServeProcess) -> None:
    run.put(**CONFIG)
    with Client(service.url, run.run) as client:
        assert repr(client.get_run()) == f"<run {run.run}: running, step 0, 0 live groups, no_producers>"

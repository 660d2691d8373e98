"""A trainer that attaches with `fixed` gets batches of one size: nobody changes it before an attach without `fixed`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from replaybuf.client import Client
from replaybuf.errors import Conflict
from tests.conftest import RunClient, ServeProcess

MORE = {"groups_per_batch": 4}


def change(run: RunClient, **batch: Any) -> httpx.Response:
    """Change the batches of a run."""
    return run.http.patch(run.path, json={"batch": batch})


@pytest.fixture
def run(run: RunClient) -> RunClient:
    """A run of two groups per batch."""
    run.put(batch={"groups_per_batch": 2})
    return run


@pytest.fixture
def own_run(own_service: ServeProcess) -> Iterator[RunClient]:
    """The same run on a private service."""
    run = RunClient(own_service.url, "fixed")
    with run.http:
        run.put(batch={"groups_per_batch": 2})
        yield run


@pytest.mark.parametrize("batch", [MORE, {"tokens_per_batch": 10_000}, {"timeout_s": 5}, {"tail": "drop"}])
def test_a_change_of_the_batches_of_a_fixed_trainer_is_refused(run: RunClient, batch: dict[str, Any]) -> None:
    """Also one of a rule that makes short batches, or of a change that comes with others."""
    run.attach(fixed=True)
    config = run.state()["config"]
    response = change(run, **batch)
    assert (response.status_code, response.json()["name"], response.json()["value"]) == (409, "fixed", [*batch])
    assert f"batch.{next(iter(batch))}" in response.json()["detail"]
    response = run.http.patch(run.path, json={"batch": batch, "limits": {"max_tokens_live": 10_000}})
    assert response.status_code == 409
    assert run.state()["config"] == config


def test_a_fixed_trainer_does_not_stop_other_changes(run: RunClient) -> None:
    """Neither one that leaves batches as they are."""
    run.attach(fixed=True)
    assert change(run, groups_per_batch=2).status_code == 200
    for changes in ({"state": "paused"}, {"state": "running"}, {"limits": {"max_tokens_live": 100_000}}):
        assert run.http.patch(run.path, json=changes).status_code == 200


def test_the_next_attach_without_fixed_ends_it(run: RunClient) -> None:
    """This is how an operator changes the batches: the trainer starts again with its new size."""
    run.attach(fixed=True)
    run.attach()
    assert change(run, **MORE).status_code == 200


def test_a_trainer_that_is_not_fixed_gets_batches_of_the_changed_size(run: RunClient) -> None:
    assert change(run, **MORE).status_code == 200
    run.attach()
    assert change(run, groups_per_batch=3).status_code == 200


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_restarted_service_knows_it(own_run: RunClient, own_service: ServeProcess, end: str) -> None:
    """From the ledger, or from a snapshot."""
    own_run.attach(fixed=True)
    getattr(own_service, end)()
    own_service.start()
    again = RunClient(own_service.url, own_run.run)
    with again.http:
        assert change(again, **MORE).status_code == 409
        again.attach()
        assert change(again, **MORE).status_code == 200


def test_a_client_asks_for_it(run: RunClient, service: ServeProcess) -> None:
    with Client(service.url, run.run) as client:
        client.attach(fixed=True)
        with pytest.raises(Conflict, match="attach without fixed"):
            client.patch_run({"batch": MORE})

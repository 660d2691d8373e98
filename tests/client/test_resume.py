"""A trainer attaches at its checkpoint, whatever the run knows of the steps around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from replaybuf.client import Client, attach_at
from replaybuf.errors import WrongStep
from tests.conftest import RunClient, ServeProcess, group


@pytest.fixture
def client(run: RunClient, service: ServeProcess) -> Iterator[Client]:
    """A client of a run whose steps 0 and 1 are acked and published; step 2 is delivered."""
    run.put(batch={"groups_per_batch": 1})
    run.append(group("g0"), group("g1"))
    epoch = run.attach()
    run.train(epoch, range(2))
    run.append(group("g2", 2), group("g3", 2))
    assert run.batch(2, epoch).status_code == 200
    with Client(service.url, run.run) as client:
        yield client


def test_a_trainer_that_lost_steps_gets_them_again(client: Client) -> None:
    attached = attach_at(client, 1, lengths=True)
    assert (attached.step, attached.generation) == (1, 1)


def test_a_trainer_that_lost_nothing_goes_on(client: Client) -> None:
    attached = attach_at(client, 2)
    assert (attached.step, attached.generation) == (2, 0)


def test_a_trainer_killed_between_checkpoint_and_ack_sends_the_ack(client: Client) -> None:
    """The checkpoint proves that step 2 is trained, so nobody trains it again."""
    attached = attach_at(client, 3)
    assert (attached.step, attached.generation, client.get_run().step) == (3, 0, 3)


def test_a_checkpoint_of_steps_that_were_never_delivered_is_rejected(client: Client) -> None:
    """It is of another run, whose trainer goes on."""
    before = client.get_run()
    with pytest.raises(WrongStep, match=r"has 4 steps done; needed: steps that the run run-.* delivered"):
        attach_at(client, 4)
    assert (client.get_run().epoch, client.get_run().step) == (before.epoch, before.step)


def test_a_checkpoint_of_freed_steps_is_rejected(client: Client) -> None:
    attached = attach_at(client, 2)
    client.checkpoint(2, attached.epoch, keep=1)
    with pytest.raises(WrongStep, match="2"):
        attach_at(client, 1)

"""A trainer attaches at its checkpoint, whatever the run knows of the steps around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from replaybuf.client import Client, attach_at, settle_at
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


def test_a_checkpoint_whose_report_was_lost_is_reported_at_the_resume(client: Client) -> None:
    """A trainer killed between checkpoint and report has no later step after which to report it."""
    epoch = client.attach().epoch
    client.checkpoint(1, epoch, keep=2)
    attach_at(client, 2)
    assert client.get_run().checkpoints == [1, 2]
    attach_at(client, 2, keep=1)
    assert client.get_run().checkpoints == [2]


def test_a_checkpoint_before_its_ack_is_reported_after_the_ack(client: Client) -> None:
    attach_at(client, 3)
    assert (client.get_run().step, client.get_run().checkpoints) == (3, [3])


def test_a_resume_at_an_older_checkpoint_forgets_the_newer_ones_and_frees_nothing(client: Client) -> None:
    client.checkpoint(1, client.attach().epoch, keep=2)
    attach_at(client, 2)
    attach_at(client, 1)
    assert (client.get_run().checkpoints, client.get_run().groups.retired) == ([1], 1)


def test_a_new_training_and_one_without_a_checkpoint_report_none(client: Client) -> None:
    attach_at(client, 2, checkpoint=False)
    attach_at(client, 0)
    assert client.get_run().checkpoints == []


@pytest.mark.parametrize("done", [2, 3])
def test_a_trainer_with_nothing_left_to_train_reports_its_last_checkpoint(client: Client, done: int) -> None:
    settle_at(client, done)
    epoch = client.get_run().epoch
    assert (client.get_run().step, client.get_run().checkpoints) == (done, [done])
    settle_at(client, done)
    assert client.get_run().epoch == epoch


def test_a_trainer_with_nothing_left_to_train_does_not_rewind_a_run_that_went_on(client: Client) -> None:
    before = client.get_run()
    settle_at(client, 1)
    assert (client.get_run().epoch, client.get_run().step) == (before.epoch, 2)


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

"""Calls of a trainer that resumes: attach at a step that the run may have recorded otherwise, confirm its epoch."""

from __future__ import annotations

from typing import Any

import msgspec

from replaybuf.client.http_client import HttpClient
from replaybuf.errors import Conflict, Fenced, NotFound, WrongStep, counted
from replaybuf.wire.contract import Attachment


def attach_at(
    client: HttpClient, steps_done: int, *, keep: int | None = None, checkpoint: bool = True, **options: Any
) -> Attachment:
    """Attach at a checkpoint that has trained `steps_done` steps, and report that checkpoint.

        run's next step   a trainer killed ...                              what happens
        above steps_done  after later steps, which the checkpoint lacks     rewind; they are delivered again
        steps_done        after the ack                                     -
        below steps_done  between its checkpoint and the acks before it     the missing acks are sent

    The report repeats one that a kill may have prevented: after the last step no other follows. `keep`: the newest
    checkpoints that stay resumable; None = this one and all that the run knows. `checkpoint=False`: `steps_done` is
    where a trainer is, which has no checkpoint of it. 0 steps are none either.

    `options` are those of `Client.attach`, but `resume_step`. Raises `WrongStep` for a checkpoint of another run: of
    steps that this run never delivered, or that it has freed. Nothing is fenced or acked then.
    """
    status = client.get_run()
    if steps_done > status.step:
        _check_delivered(client, steps_done, status.run)
    attached = client.attach(resume_step=min(steps_done, status.step), **options)
    for step in range(attached.step, steps_done):
        client.ack(step, attached.epoch)
    if checkpoint and steps_done:
        client.checkpoint(steps_done, attached.epoch, keep=keep or len(status.checkpoints) + 1)
    return msgspec.structs.replace(attached, step=steps_done)


def settle_at(client: HttpClient, steps_done: int, *, keep: int | None = None) -> None:
    """Send what a trainer with nothing left to train owes the run: missing acks, the report of its checkpoint.

    Like `attach_at`, but a run that owes nothing keeps its trainer, and a run that went on is never rewound.
    """
    status = client.get_run()
    if steps_done > status.step or (steps_done == status.step and steps_done not in status.checkpoints):
        attach_at(client, steps_done, keep=keep)


def confirm_trainer(client: HttpClient, epoch: int, adapter: str = "") -> None:
    """Ask whether the trainer of `epoch` has the run, right before it deletes or replaces files. Raises `Fenced`.

    It announces version 0 again, which changes nothing. A run with adapters needs the name of one of them.
    """
    try:
        client.publish_policy(0, epoch, adapter=adapter)
    except Fenced:
        raise
    except Conflict:  # a newer version is published; the service checks the epoch first
        return


def _check_delivered(client: HttpClient, steps_done: int, run: str) -> None:
    try:
        client.get_record(steps_done - 1)
    except NotFound as error:
        bound = f"steps that the run {run} delivered; this one is a checkpoint of another run"
        detail = f"the checkpoint has {counted(steps_done, 'step')} done; needed: {bound}"
        raise WrongStep(detail, name="steps_done", value=steps_done, bound=bound) from error

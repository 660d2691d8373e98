"""Attach a trainer that resumes from a checkpoint, whatever the run has recorded of its last steps."""

from __future__ import annotations

from typing import Any

import msgspec

from replaybuf.client.client import Client
from replaybuf.errors import NotFound, WrongStep
from replaybuf.wire.contract import Attachment


def attach_at(client: Client, steps_done: int, **options: Any) -> Attachment:
    """Attach at a checkpoint that has trained `steps_done` steps.

    ::

        run's next step   a trainer killed ...                              what happens
        above steps_done  after later steps, which the checkpoint lacks     rewind; they are delivered again
        steps_done        after checkpoint and ack                          -
        below steps_done  between its checkpoint and the acks before it     the missing acks are sent

    `options` are those of `Client.attach`, but `resume_step`. Raises `WrongStep` for a checkpoint of another run: of
    steps that this run never delivered, or that it has freed. Nothing is fenced or acked then.
    """
    status = client.get_run()
    if steps_done > status.step:
        _check_delivered(client, steps_done, status.run)
    attached = client.attach(resume_step=min(steps_done, status.step), **options)
    for step in range(attached.step, steps_done):
        client.ack(step, attached.epoch)
    return msgspec.structs.replace(attached, step=steps_done)


def _check_delivered(client: Client, steps_done: int, run: str) -> None:
    try:
        client.get_record(steps_done - 1)
    except NotFound as error:
        bound = f"steps that the run {run} delivered; this one is a checkpoint of another run"
        detail = f"the checkpoint has {steps_done} steps done; needed: {bound}"
        raise WrongStep(detail, name="steps_done", value=steps_done, bound=bound) from error

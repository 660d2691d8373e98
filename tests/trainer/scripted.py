"""A service and engines that answer the trainer as a test scripted them, and record every call in order."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from replaybuf.errors import RunFinished
from replaybuf.wire.answer.run_status import RunStatus
from replaybuf.wire.contract import Attachment, WaitingAnswer
from replaybuf.wire.group import group_to_json
from replaybuf.wire.model.checkpoints import latest_checkpoint
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.publishers.publisher import Confirm, Publisher, PublisherSetup, Weights
from replaybuf_trainer.publishers.weights_folders import WeightsFolders
from tests.builders import run_status
from tests.conftest import RunClient
from tests.trainer.batches import group_of, packed_body, rollouts

STEPS = 4
EPOCH = 7


def fill(run: RunClient) -> None:
    """Create a run and store the groups of `STEPS` batches, drawn from the number of their step."""
    put_run(run)
    fill_numbers(run, range(STEPS))


def put_run(run: RunClient) -> None:
    """Create a run of `STEPS` batches of one group."""
    run.put(
        batch={"groups_per_batch": 1, "seq_len": 64},
        strategy={"name": "one-step-off-policy", "options": {"max_staleness": 100}},
        max_steps=STEPS,
    )


def fill_numbers(run: RunClient, numbers: range) -> None:
    """Store the groups of these batches."""
    for number in numbers:
        group = group_of(rollouts(4, seed=number), group_id=f"g{number}", prompt_id=f"p{number}")
        (result,) = run.append(msgspec.to_builtins(group_to_json(group)))
        assert result["status"] == "stored", result


def body(step: int) -> bytes:
    """The batch of a step: four rollouts drawn from its number."""
    return packed_body(rollouts(4, seed=step), [[0, 1], [2, 3]], step=step)


class ScriptedService:
    """A service that answers as scripted and records every call in `events`, which the engines share.

    `step`: its next unacked one.

    `answers[step]` come first when that step is asked for; then its batch, or `RunFinished` from step `STEPS` on.
    `faults[call]` are raised first when that call is made. `when[event]` is done as soon as the event is written.
    """

    def __init__(self, checkpoints: Path, step: int = 0) -> None:
        self.events: list[str] = []
        self.answers: defaultdict[int, list[WaitingAnswer | Exception]] = defaultdict(list)
        self.faults: defaultdict[str, list[Exception]] = defaultdict(list)
        self.when: dict[str, Callable[[], None]] = {}
        self.steps_per_publish = 1
        self.max_steps: int | None = None
        self.vocab_size: int | None = None
        self.adapters: dict[str, dict[str, Any]] = {}
        self.fetching = threading.Event()
        self._checkpoints = checkpoints
        self._acked = step

    def get_run(self) -> RunStatus:
        """Return the configuration and the next unacked step."""
        self.called("get_run")
        names = ("steps_per_publish", "max_steps", "vocab_size", "adapters")
        config: dict[str, Any] = {name: getattr(self, name) for name in names}
        return run_status(config=config, step=self._acked)

    def attach(self, *, resume_step: int, **_: Any) -> Attachment:
        """Attach at the requested step."""
        self.called("attach", f"attach {resume_step}")
        self._acked = resume_step
        return Attachment(epoch=EPOCH, step=resume_step)

    def fetch_batch(self, step: int, epoch: int, dp_rank: int = 0, wait_ms: int = 0) -> bytes | WaitingAnswer:
        """Return the scripted answers, then the batch."""
        assert (epoch, dp_rank) == (EPOCH, 0)
        self.called("fetch", f"fetch {step}")
        self.fetching.set()
        if self.answers[step]:
            answer = self.answers[step].pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        if step >= STEPS:
            raise RunFinished("finished")
        return body(step)

    def ack(self, step: int, epoch: int, feedback: Any = None, metrics: Any = None) -> None:
        """Accept acks in order."""
        self.called("ack", f"ack {step}")
        assert (step, epoch) == (self._acked, EPOCH)
        self._acked += 1

    def publish_policy(self, version: int, epoch: int, weights_uri: str | None = None, adapter: str = "") -> None:
        """Reject a version above that of the next unacked step, as the service does.

        A call without an address asks whether the trainer has the run, and is not recorded.
        """
        if weights_uri is None:
            assert epoch == EPOCH
            return
        self.called("publish", f"publish {version}")
        assert version <= self._acked // self.steps_per_publish
        assert weights_uri is not None and weights_uri.startswith("file:///")

    def checkpoint(self, step: int, epoch: int, keep: int | None = None) -> None:
        """Accept a checkpoint that is on disk."""
        self.called("checkpoint", f"checkpoint {step}")
        assert latest_checkpoint(self._checkpoints) == self._checkpoints / f"step-{step:06d}"

    def called(self, call: str, event: str = "") -> None:
        """Raise the next scripted fault of this call, else record the call."""
        if self.faults[call]:
            raise self.faults[call].pop(0)
        self.events.append(event or call)
        self.when.get(event, lambda: None)()


class ScriptedEngines(Publisher):
    """Replacement of the publisher; records loads in the service's events."""

    def __init__(self, service: ScriptedService, setup: PublisherSetup) -> None:
        super().__init__(setup, None)
        self.service = service
        self._folders = WeightsFolders(setup.weights_dir)

    def prepare(self, version: int, weights: Weights) -> None:
        """Write the weights."""
        self._folders.write(version, weights)

    def commit(self, version: int, confirm: Confirm) -> str:
        """Load the weights."""
        self._folders.complete(version, confirm)
        load_model(self._folders.path(version))
        self.service.called("load", f"load {version}")
        self._folders.prune(version, confirm)
        return self._folders.uri(version)

"""The interface between the training loop and its run, so that the same loop also trains without a service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

from replaybuf.wire.answer.run_status import RunFacts
from replaybuf.wire.config import Cost
from replaybuf.wire.contract import WaitingAnswer
from replaybuf_trainer.reading import TensorBatch


class Feed:
    """The batches of a run in order, and where a trainer reports its progress; without a service, to nobody.

    A feed has at least the first four calls. They raise `Stopped` after `stop`, `Fenced` if another trainer took the
    run, and `ServiceUnavailable`.
    """

    def facts(self) -> RunFacts:
        """Return the facts of the run that a trainer needs, in any thread."""
        raise NotImplementedError

    def attach(self, step: int, cost: Cost) -> None:
        """Take the run over at the checkpoint of `step`, 0 = none, and report that checkpoint.

        `cost`: of a rollout, by its length.
        """
        raise NotImplementedError

    def batches(self) -> AbstractContextManager[Iterator[TensorBatch]]:
        """Open the batches from the attached step on; they end with the run and with `stop`."""
        raise NotImplementedError

    def stop(self) -> None:
        """End waiting calls and the batches, from any thread or signal handler."""
        raise NotImplementedError

    def settle(self, step: int) -> None:
        """Report the checkpoint of `step`, after which nothing is left to train, if the report was lost."""

    def ack(self, metrics: Mapping[str, float | None] | None = None) -> None:
        """Report that the newest batch is trained, with numbers of the step for people, at most 64 by name."""

    def publish(self, version: int, weights_uri: str | None, adapter: str = "") -> None:
        """Announce a version of an adapter that the engines have loaded, in any thread."""

    def confirm(self) -> None:
        """Ask once, without retries, whether this trainer has the run, in any thread. Raises `Fenced` if not."""

    def save(self, step: int) -> None:
        """Report that the checkpoint of `step` is on disk."""

    def waiting(self) -> WaitingAnswer | None:
        """Return why there is no batch yet, from any thread; None while the trainer does not wait."""
        return None

    def take_waits(self) -> dict[str, float]:
        """Return the seconds waited for batches since the last call, by reason."""
        return {}

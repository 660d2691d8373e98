"""The publisher `none`: nobody loads the weights, as in a training without a service."""

from __future__ import annotations

from replaybuf_trainer.publishers.publisher import Confirm, Publisher, Weights


class NoPublisher(Publisher):
    """Writes nothing and announces no address."""

    takes_adapters = True

    def prepare(self, version: int, weights: Weights) -> None:
        """Do nothing."""

    def commit(self, version: int, confirm: Confirm) -> str | None:
        """Return no address."""
        return None

    def restore(self, version: int, confirm: Confirm, adapter: str = "") -> bool:
        """Return True: no engine needs the weights."""
        return True

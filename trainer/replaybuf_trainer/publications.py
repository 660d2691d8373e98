"""Versions of the policy on their way to engines and service: when one is due, and who gets it.

A run without adapters has the one policy "". In a run with adapters each has its own steps and versions::

    own steps k done, steps_per_publish P  ->  version floor(k / P)

A published version keeps its weights. After a resume between two publications (k is not a multiple of P) the present
weights are no version, so engines get those of floor(k / P) from the publisher again, or none before the next version.

A thread follows the configuration of such a run. An adapter that is added gets version 0 at once: its generators wait
for it, and no batch may come before. One that is removed leaves the engines; its versions are still announced, so it
can return.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from replaybuf.client.retries import Retries, Stopped
from replaybuf.errors import Invalid, ReplaybufError, ServiceUnavailable
from replaybuf.wire.answer.run_status import RunFacts
from replaybuf_trainer.feeds.feed import Feed
from replaybuf_trainer.models.policy import Policy
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.publishers.publisher import Publisher
from replaybuf_trainer.report.stopwatch import Phase

logger = logging.getLogger(__name__)

FOLLOW_EVERY_S = 2.0
CLOSE_TIMEOUT_S = 10.0

NOT_RESTORED = (
    "the checkpoint is between two publications, and the weights of version %d are not here any more: engines without "
    "them wait for the next version. If no engine has them, resume at a checkpoint of a multiple of steps_per_publish"
)

Enter = Callable[[Phase], object]
"""Begins a phase of the stopwatch."""


class Publications:
    """The published version of each adapter. Made -> `start` -> `publish_due` after each step -> `close`."""

    def __init__(self, publisher: Publisher, feed: Feed, ranks: Ranks, retries: Retries) -> None:
        self._publisher = publisher
        self._feed = feed
        self._ranks = ranks
        self._retries = retries
        self._facts = RunFacts()
        self._versions: dict[str, int] = {}
        self._publishing = threading.RLock()
        self._closing = threading.Event()
        self._follower: threading.Thread | None = None

    def start(self, policy: Policy, facts: RunFacts, step: int, enter: Enter) -> None:
        """Publish the present version of every adapter; then watch the engines, and the run if it has adapters.

        Raises `Invalid` for a publisher that takes no adapters, and as `publish_due`.
        """
        if facts.adapters and not self._publisher.takes_adapters:
            kind = type(self._publisher).__name__
            detail = f"{kind} publishes no adapters, and the run has {sorted(facts.adapters)}; use --publisher reload"
            raise Invalid(detail, name="publisher", value=kind)
        self._policy = policy
        self._facts = facts
        self._publisher.retire(_removed(facts))
        for adapter in sorted(facts.adapters.keys() - _removed(facts)) or [""]:
            own_steps = policy.own_steps(step).get(adapter, 0)
            if own_steps % self._steps_per_version(adapter):
                self._restore(adapter, self._version(adapter, own_steps))
            else:
                self._publish(adapter, self._version(adapter, own_steps), enter)
        self._ranks.first(lambda: self._publisher.watch(self._feed.confirm))
        if facts.adapters:
            self._follower = threading.Thread(target=self._follow, name="adapters", daemon=True)
            self._follower.start()

    def publish_due(self, step: int, enter: Enter) -> bool:
        """Publish what is due after `step` steps. Return False if `stop` came first: a resumed trainer publishes.

        Raises `ServiceUnavailable` if no engine takes it, `Fenced`, and `TrainingFault` for a full disk.
        """
        for adapter, own_steps in self._policy.own_steps(step).items():
            version = self._version(adapter, own_steps)
            if version == self._versions.get(adapter, 0):
                continue
            try:
                self._publish(adapter, version, enter)
            except Stopped:
                return False
        return True

    @property
    def version(self) -> int:
        """Version of the policy of a run without adapters, else 0."""
        return self._versions.get("", 0)

    def needed_versions(self, step: int) -> dict[str, int]:
        """Return by adapter the version that a resume at `step` gets from the publisher again."""
        own_steps = self._policy.own_steps(step).items()
        return {
            adapter: self._version(adapter, done)
            for adapter, done in own_steps
            if done % self._steps_per_version(adapter)
        }

    def figures(self) -> dict[str, Any]:
        """Return the figures of the publisher, and the version of each adapter."""
        adapters = {adapter: version for adapter, version in self._versions.copy().items() if adapter}
        return self._publisher.figures() | ({"adapter_versions": adapters} if adapters else {})

    def close(self) -> None:
        """End the threads and close the publisher."""
        self._closing.set()
        if self._follower is not None:
            self._follower.join(CLOSE_TIMEOUT_S)
        self._publisher.close()

    def _version(self, adapter: str, own_steps: int) -> int:
        return own_steps // self._steps_per_version(adapter)

    def _steps_per_version(self, adapter: str) -> int:
        spec = self._facts.adapters.get(adapter, {})
        return int(spec.get("steps_per_publish") or self._facts.steps_per_publish)

    def _restore(self, adapter: str, version: int) -> None:
        """Let the publisher bring the weights of a published version to the engines again."""
        publisher, confirm = self._publisher, self._feed.confirm
        restored = self._ranks.first(lambda: self._retries.call(lambda: publisher.restore(version, confirm, adapter)))
        if not restored:
            logger.warning(NOT_RESTORED, version)
        self._versions[adapter] = version

    def _publish(self, adapter: str, version: int, enter: Enter) -> None:
        """Stage the weights, switch the engines to them and announce their version."""
        publisher = self._publisher
        with self._publishing:
            enter("weights")
            weights = self._policy.weights(adapter)
            self._ranks.first(lambda: self._retries.call(lambda: publisher.prepare(version, weights)))
            enter("publish")
            uri = self._ranks.first(lambda: self._retries.call(lambda: publisher.commit(version, self._feed.confirm)))
            self._feed.publish(version, uri, adapter)
            self._versions[adapter] = version

    def _follow(self) -> None:
        while not self._closing.wait(FOLLOW_EVERY_S):
            try:
                self._apply(self._feed.facts())
            except Stopped:
                return
            except ServiceUnavailable as error:
                logger.warning("the adapters of the run may have changed: %s", error.detail)
            except ReplaybufError as error:
                logger.warning("adapters that the run adds or removes are not followed any more: %s", error)
                return

    def _apply(self, facts: RunFacts) -> None:
        """Retire the adapters that the run has removed, and publish version 0 of those it has added."""
        with self._publishing:
            changed = _removed(facts) != _removed(self._facts)
            self._facts = facts
            if changed:
                self._publisher.retire(_removed(facts))
            for adapter in sorted(facts.adapters.keys() - _removed(facts) - self._versions.keys()):
                logger.info("the run has a new adapter: %s", adapter)
                self._publish(adapter, 0, lambda _: None)


def _removed(facts: RunFacts) -> frozenset[str]:
    return frozenset(name for name, spec in facts.adapters.items() if spec.get("removed"))

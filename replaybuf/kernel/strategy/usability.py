"""Rules for usable groups: version, staleness, uses, adapter, length. Batches and evictions follow the same rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.rows.index import LIVE, Index
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.strategy.plugin_set import Bounds
from replaybuf.wire.config import EVERY_OTHER_SOURCE, RunConfig, StalePolicy
from replaybuf.wire.drop_reasons import UnusableReason
from replaybuf.wire.group import hash_name

BOUNDED_COLUMNS = ("policy_version", "policy_version_max", "source")
"""Columns that `StalePolicies.bounded_versions` reads."""
_ALL = slice(None)


class StalePolicies(NamedTuple):
    """What happens to too stale groups, by the hash of their source; `rest` is the policy of every other source.

    `mask` applies the bound to the newest token of a group instead of its oldest. The batch leaves older tokens out of
    the loss, by the same mask as `stale_token_mask`. So a group stays usable while one of its tokens may be trained.
    """

    by_source: dict[int, StalePolicy]
    rest: StalePolicy

    @classmethod
    def of(cls, config: RunConfig) -> StalePolicies:
        """Read the policies of a configuration."""
        named = config.stale_policies
        rest = named.pop(EVERY_OTHER_SOURCE)
        return cls({hash_name(source): policy for source, policy in named.items()}, rest)

    @property
    def used(self) -> set[StalePolicy]:
        """Return the policies that some source has."""
        return {self.rest, *self.by_source.values()}

    def have(self, policy: StalePolicy, sources: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return which sources have a policy [rows]."""
        if not self.by_source:
            return np.full(len(sources), self.rest == policy)
        by_rest = self.rest == policy
        exceptions = [code for code, own in self.by_source.items() if (own == policy) != by_rest]
        having: npt.NDArray[np.bool_] = np.isin(sources, exceptions) != by_rest
        return having

    def bounded_versions(
        self, oldest: npt.NDArray[np.int32], newest: npt.NDArray[np.int32], sources: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Return the version of each group to which `max_staleness` applies: of its oldest or newest token [rows]."""
        return np.where(self.have("mask", sources), newest, oldest)


def bounded_versions(config: RunConfig, index: Index, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the version of each of these rows to which `max_staleness` applies."""
    return StalePolicies.of(config).bounded_versions(*(index[name][rows] for name in BOUNDED_COLUMNS))


def loss_mask_bound(config: RunConfig, max_staleness: int | None) -> int | None:
    """Return the most versions that a token in the loss may be older than its batch; None = no bound.

    Of groups without the policy `mask` every token is within `max_staleness`, so the bound changes none of them.
    """
    bounds = [config.stale_token_mask]
    if "mask" in StalePolicies.of(config).used:
        bounds.append(max_staleness)
    return min((bound for bound in bounds if bound is not None), default=None)


class UsabilityRule(NamedTuple):
    """A rule for usable groups: its text, columns, the test of their values, and one word for groups that break it.

    `when`: `select` leaves such groups out of a batch, `evict` evicts them, because no later step may use them either.
    """

    rule: str
    columns: tuple[str, ...]
    kept: Callable[..., npt.NDArray[np.bool_]]
    reason: UnusableReason
    when: Literal["select", "evict", "both"] = "select"

    def holds(self, index: Index, rows: npt.NDArray[np.int64] | slice = _ALL) -> npt.NDArray[np.bool_]:
        """Return which of these rows keep the rule."""
        return self.kept(*(index[name][rows] for name in self.columns))


def usability_rules(
    state: RunState, config: RunConfig, bounds: Bounds, seq_len: int, step: int, adapter: str
) -> Iterator[UsabilityRule]:
    """Yield the core's own rules for the groups that a batch of an adapter may have at `step`."""
    version = state.version_at(step, adapter)
    rule = "selects no group of a later version"
    yield UsabilityRule(rule, ("policy_version",), lambda values: values <= version, "later_version")
    if bounds.max_staleness is not None:
        yield _staleness_rule(config, version - bounds.max_staleness, bounds.max_staleness)
    # A direct writer, or a leader that died, may store a group after the rewind before which it was checked.
    published = state.published[adapter]
    rule = "has no token of a version that is not published"
    yield UsabilityRule(rule, ("policy_version_max",), lambda values: values <= published, "lost_lineage", "evict")
    if bounds.max_uses is not None:
        most = bounds.max_uses
        rule = f"keeps the max_uses of {most}"
        yield UsabilityRule(rule, ("times_sampled",), lambda values: values < most, "used_up")
    yield UsabilityRule("selects only live groups", ("state",), lambda values: values == LIVE, "not_live")
    if adapter:  # without adapters all groups have the same one
        code = hash_name(adapter)
        rule = "selects only groups it was given"
        yield UsabilityRule(rule, ("adapter",), lambda values: values == code, "other_adapter")
    if config.batch.overlong == "reject":
        longest = seq_len
        rule = f"keeps the seq_len of {longest}"
        yield UsabilityRule(rule, ("longest_tokens",), lambda values: values <= longest, "overlong", "both")


def _staleness_rule(config: RunConfig, oldest: int, max_staleness: int) -> UsabilityRule:
    rule, policies = f"keeps the max_staleness of {max_staleness}", StalePolicies.of(config)
    if "mask" not in policies.used:
        return UsabilityRule(rule, ("policy_version",), lambda values: values >= oldest, "too_stale", "both")

    def kept(*columns: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        fits: npt.NDArray[np.bool_] = policies.bounded_versions(*columns) >= oldest
        return fits

    return UsabilityRule(rule, BOUNDED_COLUMNS, kept, "too_stale", "both")

"""What happens to groups that are too stale, by their source: `on_stale` of the configuration, on columns of the index.

`mask` applies the bound to the newest token of a group instead of its oldest. The batch leaves older tokens out of the
loss, by the same mask as `stale_token_mask`. So a group stays usable while one of its tokens may be trained.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.rows.index import Index
from replaybuf.wire.config import EVERY_OTHER_SOURCE, RunConfig, StalePolicy
from replaybuf.wire.group import hash_name


class StalePolicies(NamedTuple):
    """Policies by the hash of the source; `rest` is that of every other source."""

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
        others = [code for code, own in self.by_source.items() if (own == policy) != (self.rest == policy)]
        having: npt.NDArray[np.bool_] = np.isin(sources, others) != (self.rest == policy)
        return having

    def bounded_versions(
        self, oldest: npt.NDArray[np.int32], newest: npt.NDArray[np.int32], sources: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Return the version of each group to which `max_staleness` applies: of its oldest or newest token [rows]."""
        return np.where(self.have("mask", sources), newest, oldest)


BOUNDED_COLUMNS = ("policy_version", "policy_version_max", "source")
"""Columns that `StalePolicies.bounded_versions` reads."""


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

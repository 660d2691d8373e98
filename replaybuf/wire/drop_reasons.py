"""Reasons for which the service drops a group: words of the contract, each the value of a metric label.

Strategies, filters and admission plug-ins add words of their own, so ledger records and `GroupRejected` hold any
string. The type checker compares the words of `Rejection`, `UsabilityRule` and `broken_payload` with these tables. A
test compares those of `GroupRejected`, and docs/http/groups.md and docs/observe.md, which explain each word.
"""

from __future__ import annotations

from typing import Literal

from replaybuf.errors import BrokenFrame

RejectionReason = Literal[
    "bad_name",
    "missing_group_id",
    "unknown_ticket",
    "wrong_prompt_index",
    "group_id_taken",
    "lost_lineage",
    "unknown_adapter",
    "bad_prompt_index",
    "no_rollouts",
    "wrong_group_size",
    "empty_prompt",
    "empty_completion",
    "length_mismatch",
    "partial_advantages",
    "bad_mask",
    "overlong",
    "over_budget",
    "token_out_of_range",
    "run_finished",
    "non_finite_logprobs",
    "positive_logprobs",
    "non_finite_rewards",
    "non_finite_advantages",
    "bad_temperature",
    "bad_version_spans",
    "bad_metadata",
    "proof_too_large",
    "version_above_published",
    "too_large",
    "broken_frame",
    "missing_columns",
    "admission_fault",
    "admission_timeout",
]
"""An append is rejected: the group is not stored."""

EvictionReason = Literal["too_stale", "overlong", "lost_lineage", "adapter_removed", "tail"]
"""No later batch may use a stored group."""

DeadLetterReason = Literal[
    "missing_payload",
    "missing_index_entry",
    "bad_checksum",
    "broken_frame",
    "length_mismatch",
    "bad_index_entry",
    "over_budget",
    "unknown_adapter",
    "adapter_mismatch",
    "not_admitted",
]
"""A stored group cannot be read, or a client wrote it to Redis against the rules of the run."""

UnusableReason = EvictionReason | Literal["later_version", "used_up", "not_live", "other_adapter", "missing_columns"]
"""A batch may not use a stored group now; the explanation of a batch counts them."""


def broken_payload(reason: DeadLetterReason, detail: str) -> BrokenFrame:
    """Build the error of a stored group that cannot be read."""
    return BrokenFrame(detail, name=reason)

"""Run configuration: defaults, rejected values, strict decoding of JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from replaybuf.errors import Invalid, Malformed
from replaybuf.wire.config import (
    ADAPTER_NAME,
    AdapterSpec,
    BatchSpec,
    Limits,
    RunConfig,
    SpillSpec,
    StrategySpec,
    TicketSpec,
    TokensPerRank,
    check_run_name,
    read_config,
    recorded,
)
from replaybuf.wire.config_check import check_run_config
from replaybuf.wire.config_patch import ConfigPatch, differing_fields
from replaybuf.wire.decoding import decode_json
from replaybuf.wire.frame import smallest_frame_bytes
from tests.builders import run_config

DEFAULTS: dict[str, Any] = {
    "strategy": {"name": "one-step-off-policy", "options": {}},
    "filters": [],
    "admissions": [],
    "batch": {
        "tokens_per_batch": 65536,
        "groups_per_batch": None,
        "seq_len": 4096,
        "pad_to_multiple_of": 1,
        "overlong": "reject",
        "tail": "train",
        "timeout_s": None,
        "min_groups": 1,
    },
    "group_size": None,
    "min_group_size": None,
    "vocab_size": None,
    "steps_per_publish": 1,
    "max_steps": None,
    "stale_token_mask": None,
    "on_stale": "drop",
    "max_reissues": 1,
    "seed": 0,
    "advantage": "grpo",
    "tickets": {
        "ttl_s": 600.0,
        "max_attempts": 3,
        "prompts": None,
        "heartbeat_s": 15.0,
        "max_failed_share": None,
        "on_failed_share": "alarm",
    },
    "limits": {
        "max_tokens_live": None,
        "max_bytes_live": None,
        "max_bytes_in_memory": None,
        "max_group_bytes": 67108864,
    },
    "history": {"samples_per_step": 4},
    "adapters": {},
    "spill": None,
}
"""The documented defaults. The service adds the options of the strategy when it creates the run."""


def decoded(body: object) -> RunConfig:
    """Decode a run configuration from values or from raw bytes."""
    return decode_json(body if isinstance(body, bytes) else json.dumps(body).encode(), RunConfig)


def adapters_config(*names: str, **fields: Any) -> RunConfig:
    """Configure a run whose adapters have 4 groups per batch."""
    return run_config(adapters={name: AdapterSpec(groups_per_batch=4) for name in names}, **fields)


# ---------------------------------------------------------------------- defaults


def test_the_defaults_match_the_contract() -> None:
    assert msgspec.to_builtins(decoded({"batch": {}})) == DEFAULTS


def test_only_the_batch_is_required() -> None:
    with pytest.raises(Malformed, match="missing required field `batch`"):
        decoded({})
    assert decoded({"batch": {}}) == run_config()


def test_a_configuration_round_trips_through_json() -> None:
    config = run_config(batch=BatchSpec(seq_len=64), seed=7, tickets=TicketSpec(prompts=9))
    assert decode_json(msgspec.json.encode(config), RunConfig) == config


@pytest.mark.parametrize(("steps_per_publish", "versions"), [(1, [0, 1, 2, 3, 4]), (3, [0, 0, 0, 1, 1])])
def test_the_version_of_a_step_is_the_number_of_publications(steps_per_publish: int, versions: list[int]) -> None:
    config = run_config(steps_per_publish=steps_per_publish)
    assert [config.version_of(step) for step in range(5)] == versions


def test_the_ledger_has_a_configuration_with_all_of_its_fields() -> None:
    """Fields that a record lacks, because they were added after it, have their defaults."""
    changed = run_config(tickets=TicketSpec(heartbeat_s=5))
    record = recorded(changed)
    assert record.keys() == DEFAULTS.keys()
    assert read_config(record, "the ledger") == changed
    del record["tickets"]["heartbeat_s"], record["spill"]
    assert read_config(record, "the ledger") == run_config()


# ---------------------------------------------------------------------- rejections


@pytest.mark.parametrize(
    ("config", "name", "value", "bound"),
    [
        (
            run_config(batch=BatchSpec(tokens_per_batch=None)),
            "batch.tokens_per_batch",
            None,
            "one of the two set",
        ),
        (run_config(batch=BatchSpec(tokens_per_batch=15), group_size=8), "batch.tokens_per_batch", 15, 16),
        (run_config(batch=BatchSpec(tokens_per_batch=1)), "batch.tokens_per_batch", 1, 2),
        (run_config(limits=Limits(max_tokens_live=65535)), "limits.max_tokens_live", 65535, 65536),
        (run_config(limits=Limits(max_bytes_live=9, max_group_bytes=10)), "limits.max_bytes_live", 9, 10),
        (
            run_config(limits=Limits(max_bytes_in_memory=9, max_group_bytes=10)),
            "limits.max_bytes_in_memory",
            9,
            10,
        ),
        (run_config(limits=Limits(max_bytes_in_memory=2**27)), "limits.max_bytes_in_memory", 2**27, None),
        (
            run_config(spill=SpillSpec(url="memory://frames")),
            "spill.url",
            "memory://frames",
            "file, s3, gs, gcs, abfs, az",
        ),
        (run_config(limits=Limits(max_group_bytes=1)), "limits.max_group_bytes", 1, smallest_frame_bytes(1)),
        (
            run_config(limits=Limits(max_group_bytes=4000), group_size=64),
            "limits.max_group_bytes",
            4000,
            smallest_frame_bytes(64),
        ),
        (
            run_config(
                batch=BatchSpec(tokens_per_batch=None, groups_per_batch=4),
                group_size=8,
                limits=Limits(max_tokens_live=63),
            ),
            "limits.max_tokens_live",
            63,
            64,
        ),
        (run_config(batch=BatchSpec(pad_to_multiple_of=3)), "batch.pad_to_multiple_of", 3, 4096),
        (run_config(batch=BatchSpec(pad_to_multiple_of=8192)), "batch.pad_to_multiple_of", 8192, 4096),
        (adapters_config("a/b"), "adapters", "a/b", ADAPTER_NAME.pattern),
        (adapters_config("a:b"), "adapters", "a:b", ADAPTER_NAME.pattern),
        (adapters_config(""), "adapters", "", ADAPTER_NAME.pattern),
        (adapters_config("pfcxpytzcn", "uablaijhsa"), "adapters", "uablaijhsa", "pfcxpytzcn"),
        (adapters_config("math", batch=BatchSpec(groups_per_batch=4)), "batch.groups_per_batch", 4, None),
        (adapters_config("math", tickets=TicketSpec(prompts=9)), "tickets.prompts", 9, None),
        (adapters_config("math", group_size=8, limits=Limits(max_tokens_live=63)), "limits.max_tokens_live", 63, 64),
        (run_config(batch=BatchSpec(tokens_per_batch=TokensPerRank(per_rank=1))), "batch.tokens_per_batch", 1, 2),
        (run_config(min_group_size=3), "min_group_size", 3, None),
        (
            run_config(tickets=TicketSpec(on_failed_share="pause")),
            "tickets.on_failed_share",
            "pause",
            "max_failed_share set",
        ),
        (run_config(group_size=2, min_group_size=3), "min_group_size", 3, 2),
        (run_config(batch=BatchSpec(tail="drop", timeout_s=30)), "batch.tail", "drop", "train"),
        (run_config(batch=BatchSpec(groups_per_batch=4, timeout_s=30, min_groups=5)), "batch.min_groups", 5, 4),
        (adapters_config("a", "b", batch=BatchSpec(timeout_s=30, min_groups=9)), "batch.min_groups", 9, 8),
    ],
    ids=[
        "no budget",
        "above",
        "budget of 1",
        "live",
        "bytes",
        "bytes in memory",
        "no folder for the rest",
        "a folder that forgets",
        "bytes of a group",
        "bytes of many rollouts",
        "live by groups",
        "padding",
        "long padding",
        "slash",
        "colon",
        "no name",
        "one code",
        "groups of the run",
        "prompts of the run",
        "live of an adapter",
        "budget of 1 per rank",
        "partial groups of any size",
        "rule without a share",
        "more than all rollouts",
        "tail and time-out",
        "time-out",
        "time-out of adapters",
    ],
)
def test_a_configuration_that_cannot_make_progress_is_rejected(
    config: RunConfig, name: str, value: object, bound: object
) -> None:
    with pytest.raises(Invalid) as caught:
        check_run_config(config)
    assert (caught.value.name, caught.value.value, caught.value.bound) == (name, value, bound)
    assert name in caught.value.detail and (value is None or str(value) in caught.value.detail)


@pytest.mark.parametrize(
    "config",
    [
        run_config(),
        run_config(batch=BatchSpec(tokens_per_batch=16), group_size=8),
        run_config(limits=Limits(max_tokens_live=65536)),
        run_config(batch=BatchSpec(tokens_per_batch=None, groups_per_batch=1)),
        run_config(batch=BatchSpec(pad_to_multiple_of=4096)),
        run_config(batch=BatchSpec(groups_per_batch=4), limits=Limits(max_tokens_live=8)),
        run_config(limits=Limits(max_group_bytes=smallest_frame_bytes(8)), group_size=8),
        run_config(batch=BatchSpec(tokens_per_batch=None, groups_per_batch=1), group_size=2**20),
    ],
    ids=["defaults", "one group", "one batch", "by groups", "padding to seq_len", "both bounds", "bytes", "rollouts"],
)
def test_the_smallest_working_configuration_is_accepted(config: RunConfig) -> None:
    check_run_config(config)


@pytest.mark.parametrize("run", ["r", "0", "a.b-c_d", "x" * 63])
def test_a_valid_run_name_is_accepted(run: str) -> None:
    assert check_run_name(run) == run


@pytest.mark.parametrize("run", ["", "R", "-a", ".a", "_a", "a b", "a/b", "a\n", "é", "x" * 64])
def test_an_invalid_run_name_is_rejected(run: str) -> None:
    """URL paths and Redis keys contain the name."""
    with pytest.raises(Invalid) as caught:
        check_run_name(run)
    assert (caught.value.name, caught.value.value) == ("run", run)
    assert caught.value.bound == "[a-z0-9][a-z0-9._-]{0,62}"


# ---------------------------------------------------------------------- decoding


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"batch": {"seq_length": 1}}, "batch"),
        ({"batch": {}, "stratgy": {}}, "body"),
        ({"batch": 5}, "batch"),
        ({"batch": {"seq_len": "4096"}}, "batch.seq_len"),
        ({"batch": {"seq_len": 1.5}}, "batch.seq_len"),
        ({"batch": {}, "filters": [{"name": "a"}, {"name": 3}]}, "filters[1].name"),
        ({"batch": {}, "seed": True}, "seed"),
        ({"batch": {}, "stale_token_mask": "1"}, "stale_token_mask"),
        ({"batch": {}, "stale_token_mask": 0.5}, "stale_token_mask"),
        ([], "body"),
        (None, "body"),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_malformed(body: object, name: str) -> None:
    with pytest.raises(Malformed) as caught:
        decoded(body)
    assert caught.value.name == name and caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "name", "value", "bound"),
    [
        ({"batch": {"seq_len": 1}}, "batch.seq_len", 1, ">= 2"),
        ({"batch": {"seq_len": 2**31}}, "batch.seq_len", 2**31, "<= 16777216"),
        ({"batch": {"tokens_per_batch": 0}}, "batch.tokens_per_batch", 0, ">= 1"),
        ({"batch": {"overlong": "cut"}}, "batch.overlong", "cut", "'cut'"),
        ({"batch": {}, "group_size": 2**15 + 1}, "group_size", 2**15 + 1, "<= 32768"),
        ({"batch": {}, "stale_token_mask": -1}, "stale_token_mask", -1, ">= 0"),
        ({"batch": {}, "stale_token_mask": 2**70}, "stale_token_mask", 2**70, "<= 9007199254740991"),
        ({"batch": {}, "seed": -1}, "seed", -1, ">= 0"),
        ({"batch": {}, "seed": 2**70}, "seed", 2**70, "<= 9007199254740991"),
        ({"batch": {}, "tickets": {"ttl_s": 0}}, "tickets.ttl_s", 0, "> 0"),
        ({"batch": {}, "tickets": {"ttl_s": math.inf}}, "tickets.ttl_s", math.inf, "<= 31622400"),
        ({"batch": {}, "limits": {"max_group_bytes": 2**70}}, "limits.max_group_bytes", 2**70, "<= 536870912"),
    ],
    ids=str,
)
def test_a_value_outside_its_bound_is_invalid(body: object, name: str, value: object, bound: str) -> None:
    with pytest.raises(Invalid) as caught:
        decoded(body)
    assert (caught.value.name, caught.value.value, caught.value.status) == (name, value, 422)
    assert bound in str(caught.value.bound) and name in caught.value.detail


def test_a_ticket_ttl_of_nan_is_rejected() -> None:
    """Every comparison with NaN is false, so a naive bound would accept it."""
    with pytest.raises(Invalid, match=r"tickets\.ttl_s is nan"):
        decoded({"batch": {}, "tickets": {"ttl_s": math.nan}})


@pytest.mark.parametrize(
    ("adapter", "name", "error"),
    [
        ({"groups_per_batch": 0}, "adapters.math.groups_per_batch", Invalid),
        ({}, "adapters.math", Malformed),
        ({"groups_per_batch": 1, "tokens_per_batch": 5}, "adapters.math", Malformed),
        ({"groups_per_batch": 1, "prompts": 0}, "adapters.math.prompts", Invalid),
    ],
    ids=["zero", "missing", "unknown field", "no prompts"],
)
def test_an_adapter_with_missing_or_unknown_fields_is_rejected(
    adapter: dict[str, int], name: str, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        decoded({"batch": {}, "adapters": {"math": adapter}})
    assert getattr(caught.value, "name", None) == name


def test_an_adapter_may_need_more_groups_than_fit_one_batch() -> None:
    """A step of the adapter then takes several batches."""
    check_run_config(
        adapters_config("math", batch=BatchSpec(tokens_per_batch=10), limits=Limits(max_tokens_live=10), group_size=4)
    )


def test_a_run_without_adapters_has_one_unnamed_policy() -> None:
    config = run_config(
        steps_per_publish=2,
        adapters={
            "b": AdapterSpec(groups_per_batch=3),
            "a": AdapterSpec(groups_per_batch=5, steps_per_publish=4),
        },
    )
    assert config.adapter_names == ("a", "b")
    assert [config.groups_per_batch_of(name) for name in config.adapter_names] == [5, 3]
    assert [config.version_of(9, name) for name in config.adapter_names] == [2, 4]
    assert run_config().adapter_names == ("",)


# ---------------------------------------------------------------------- differences


@pytest.mark.parametrize(
    ("changed", "fields"),
    [
        ({}, []),
        ({"seed": 1}, ["seed"]),
        ({"stale_token_mask": 1}, ["stale_token_mask"]),
        ({"batch": BatchSpec(seq_len=64, pad_to_multiple_of=2)}, ["batch.pad_to_multiple_of", "batch.seq_len"]),
        ({"strategy": StrategySpec(name="on-policy")}, ["strategy.name"]),
        ({"strategy": StrategySpec(options={"max_staleness": 2})}, ["strategy.options"]),
        ({"filters": [StrategySpec(name="zero-variance")]}, ["filters"]),
        ({"limits": Limits(max_tokens_live=65536), "group_size": 8}, ["group_size", "limits.max_tokens_live"]),
        ({"adapters": {"math": AdapterSpec(groups_per_batch=1)}}, ["adapters.math"]),
    ],
    ids=str,
)
def test_differing_fields_are_listed_by_dotted_name(changed: dict[str, Any], fields: list[str]) -> None:
    assert differing_fields(run_config(), run_config(**changed)) == fields
    assert differing_fields(run_config(**changed), run_config()) == fields


def test_a_patch_contains_only_changed_fields() -> None:
    patch = decode_json(b'{"state": "paused"}', ConfigPatch)
    assert (patch.state, patch.strategy, patch.filters, patch.limits) == ("paused", None, None, None)
    with pytest.raises(Malformed, match="unknown field `seq_len`"):
        decode_json(b'{"batch": {"seq_len": 8}}', ConfigPatch)

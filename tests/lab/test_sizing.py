"""`replaybuf size`: needs follow from the shape of a run, in proportion to what it samples."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.cli.main import main
from replaybuf.lab.sizing import Needs, RunShape, compute_needs

SHAPE = RunShape(
    gpus=10_000,
    generating=0.75,
    tokens_per_s=2000.0,
    group_size=16,
    rollout_tokens=8192,
    step_s=18.0,
    checkpoint_steps=10,
    max_staleness=2,
    gpus_per_rank=8,
)


def test_the_measured_run_of_ten_thousand_gpus_has_its_figures() -> None:
    """2.8 cores for appends and 0.6 of Valkey; its bodies take longer than a step of 18 s."""
    needs = compute_needs(SHAPE)
    appends = needs.server_cores - needs.deliver_share
    assert (round(appends, 1), round(needs.valkey_cores, 1)) == (2.8, 0.6)
    assert needs.deliver_s == pytest.approx(22.7, abs=0.1) and needs.direct_load > 1
    assert needs.groups_per_s == pytest.approx(15e6 / (16 * 8192))


@given(st.integers(2, 50))
def test_twice_the_gpus_need_twice_of_everything(times: int) -> None:
    small, large = (compute_needs(dataclasses.replace(SHAPE, gpus=gpus)) for gpus in (8000, 8000 * times))
    for name in {field.name for field in dataclasses.fields(Needs)} - {"servers"}:
        assert getattr(large, name) == pytest.approx(times * getattr(small, name)), name
    assert times * (small.servers - 1) < large.servers <= times * small.servers


def test_the_command_prints_json_and_refuses_a_share_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    main(["size", "--gpus", "16", "--json"])
    assert msgspec.json.decode(capsys.readouterr().out)["tokens_per_s"] == 24_000
    with pytest.raises(SystemExit) as ended:
        main(["size", "--generating", "1"])
    assert ended.value.code and "Must be < 1" in capsys.readouterr().err


def test_the_command_says_when_one_server_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """And when its leader is not, however many servers store: many small groups."""
    shared, small = "Several servers", "have more rollouts"
    for options, advice in (
        ("100", set()),
        ("10000", {shared}),
        ("10000 --group-size 1 --rollout-tokens 512", {small}),
    ):
        main(["size", "--gpus", *options.split()])
        shown = capsys.readouterr().out
        assert {text for text in (shared, small) if text in shown} == advice, options


def test_servers_share_what_one_server_does_not_do_alone() -> None:
    """Up to 70 % of its time one server does all; the leader of several has a fixed time per group."""
    few, many = (compute_needs(dataclasses.replace(SHAPE, gpus=gpus)) for gpus in (1_700, 10_000))
    assert (few.servers, few.leader_load) == (1, few.server_load)
    assert many.servers == 12 and many.leader_load == pytest.approx(0.0015 * many.groups_per_s)

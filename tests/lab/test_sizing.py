"""`replaybuf size`: needs follow from the shape of a run, in proportion to what it samples."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.cli.main import main
from replaybuf.lab.sizing import Needs, RunShape, compute_needs
from tests.builders import steady

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
@steady
def test_twice_the_gpus_need_twice_of_everything(times: int) -> None:
    small, large = (compute_needs(dataclasses.replace(SHAPE, gpus=gpus)) for gpus in (8000, 8000 * times))
    for field in dataclasses.fields(Needs):
        assert getattr(large, field.name) == pytest.approx(times * getattr(small, field.name)), field.name


def test_the_command_prints_json_and_refuses_a_share_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    main(["size", "--gpus", "16", "--json"])
    assert msgspec.json.decode(capsys.readouterr().out)["tokens_per_s"] == 24_000
    with pytest.raises(SystemExit) as ended:
        main(["size", "--generating", "1"])
    assert ended.value.code and "Must be < 1" in capsys.readouterr().err


def test_the_command_says_when_one_server_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    for gpus, advice in ((100, ""), (3000, "direct"), (10_000, "split the run")):
        main(["size", "--gpus", str(gpus)])
        shown = capsys.readouterr().out
        assert (advice in shown) and ("split the run" in shown) == (gpus == 10_000)

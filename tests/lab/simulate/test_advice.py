"""Advice: which choice is proposed, what the workload of another fleet is, and what cannot be advised."""

from __future__ import annotations

import json
from typing import Any

import pytest

from replaybuf.cli.main import main
from replaybuf.errors import Invalid
from replaybuf.lab.simulate.advice import Choice, FleetOptions, best, from_numbers, scaled, shares_of
from replaybuf.lab.simulate.command import SimulateOptions, run_advice
from replaybuf.lab.simulate.loop import simulate
from replaybuf.lab.simulate.workload import Supply, Workload
from replaybuf.wire.config import BatchSpec, RunConfig

CONFIG = RunConfig(batch=BatchSpec(tokens_per_batch=None, groups_per_batch=8), group_size=4)
SMALL: dict[str, Any] = {"slots": 16, "length_mean": 200.0, "length_max": 1000, "group_s": 0.0, "publish_s": 1.0}


def choice(steps_per_hour: float, staleness: float = 1.0, waste: float = 0.0, slots: int = 8) -> Choice:
    """Return a choice with these figures."""
    return Choice("s", {}, 0.5, slots, steps_per_hour, 0.0, None, staleness, waste, 1.0, 0.0)


def test_the_fastest_choice_is_the_best_and_of_equal_ones_the_least_stale() -> None:
    """Equal is within 3 %, which the simulator cannot tell apart. Then least waste counts, then fewest slots."""
    assert best([choice(100.0), choice(120.0, 3.0)]) == 1
    assert best([choice(118.0, 1.0), choice(120.0, 3.0)]) == 0
    assert best([choice(120.0, 1.0, waste=0.2), choice(119.0, 1.0)]) == 1
    assert best([choice(120.0, slots=16), choice(120.0, slots=8)]) == 1


def test_more_engines_have_more_slots_and_make_a_step_longer() -> None:
    """Half of the GPUs instead of three quarters: two thirds of the slots, and half the time for a step."""
    base = Workload(slots=60, token_s=0.02, train_s=40.0)
    half = scaled(base, FleetOptions(generating=0.75), 0.5, 1.0)
    assert (half.slots, half.token_s) == (40, 0.02) and half.train_s == pytest.approx(20.0)


def test_an_engine_has_one_speed_for_all_its_slots() -> None:
    """Twice the slots make each completion twice as slow; half of them make none faster than a single one is.

    A strategy that admits fewer groups leaves slots empty, and the others are faster.
    """
    base, fleet = Workload(slots=60, token_s=0.02), FleetOptions(stream_tokens_per_s=60.0)
    assert scaled(base, fleet, 0.75, 2.0).token_s == 0.04
    assert scaled(base, fleet, 0.75, 0.5).token_s == pytest.approx(1 / 60)
    held = scaled(Workload(slots=60, token_s=0.04), fleet, 0.75, window=30)
    assert (held.slots, held.token_s) == (30, 0.02)


def test_engines_from_numbers_sample_that_many_tokens_per_second() -> None:
    """6 generating GPUs with 500 tokens/s each, in the time in which their slots are busy."""
    fleet = FleetOptions(gpus=8, stream_tokens_per_s=1e4)
    workload = from_numbers(Workload(train_s=0.1, **SMALL), CONFIG, fleet, 500.0)
    figures = simulate(CONFIG, Supply(workload, CONFIG, 1), 30)
    completions = figures.generated_tokens - figures.generated_groups * 4 * workload.prompt_tokens
    busy_s = figures.seconds * (1 - figures.idle_share)
    assert completions / busy_s == pytest.approx(3000.0, rel=0.1)


def test_shares_are_of_whole_gpus() -> None:
    assert shares_of(FleetOptions(gpus=2)) == [0.5]
    assert shares_of(FleetOptions(gpus=4)) == [0.25, 0.5, 0.75]
    with pytest.raises(Invalid, match="at least 2"):
        shares_of(FleetOptions(gpus=1))


def test_a_fleet_whose_trainer_waits_gets_more_engines() -> None:
    """Training takes no time here, so every GPU that generates counts; on-policy wastes the engines' time."""
    workload = Workload(train_s=0.5, **SMALL)
    options = SimulateOptions(
        steps=12, workload=workload, fleet=FleetOptions(gpus=8, generating=0.5, tokens_per_s=50.0)
    )
    advice = run_advice(options, CONFIG)
    assert advice.proposal.generating == 7 / 8 and advice.proposal.strategy == "one-step-off-policy"
    costs = {cost.what: cost for cost in advice.costs}
    engines = [cost.steps_change for what, cost in costs.items() if what.startswith("engines")]
    assert engines and max(engines) < -0.03
    replay = next(cost for what, cost in costs.items() if what.startswith("strategy replay"))
    assert replay.choice.reuses and replay.steps_change > 0
    assert "45 pairs" in advice.sure


def test_the_command_prints_its_advice_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --advise --json --gpus 4 --tokens-per-s 500 --train-s 5 --length-mean 200 --slots 16 --steps 5"
    main([*words.split(), "--strategy", "on-policy"])
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed["proposal"]["strategy"] == "on-policy" and printed["costs"] and printed["sure"]


def test_what_cannot_be_advised_is_one_error_before_anything_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    """Options of the fleet without --advise, strategies that only reuse, a fleet of one GPU, an unknown strategy."""
    for words, message in (
        ("simulate --gpus 4", "--gpus needs --advise"),
        ("simulate --advise --gpus 1", "at least 2"),
        ("simulate --advise --strategy replaay", "installed"),
        ("simulate --advise --from /nowhere.json", "nowhere"),
    ):
        with pytest.raises(SystemExit):
            main(words.split())
        assert message in " ".join(capsys.readouterr().err.split())

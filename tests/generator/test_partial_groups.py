"""Groups that lost rollouts to faults: stored with the rest if it is enough, otherwise their ticket is returned."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.responses import Response

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit, GenerationFault, RewardFault
from replaybuf.generator.engines import Sampling, request_seed
from replaybuf.generator.environments import Score, Turn
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.failures import Losses
from replaybuf.generator.fleet import TRIES
from replaybuf.generator.group_maker import GroupRequests
from replaybuf.generator.metrics import exposition
from tests.generator.doubles import (
    TIMEOUT_S,
    Broken,
    EngineDouble,
    Script,
    ServiceDouble,
    ids,
    make_prompt,
    make_tokenizer,
)
from tests.generator.engines.rule_engine import PROMPT, ByRule
from tests.generator.fleet.test_fleet import fleet_of
from tests.generator.test_stages import Sums
from tests.generator.turn_environments import Scripted
from tests.generator.worlds import WORDS, completed

_LENGTHS = Broken(lambda prompt, text: Score(float(len(text))))


def refusing(**lost: int) -> Script:
    """Script: refuse the last requests of a prompt, so many of the four; else answer token by token longer texts."""
    came: Counter[str] = Counter()

    async def script(request: dict[str, Any]) -> Response | dict[str, Any]:
        word = next(word for word in WORDS if ids(word) == request["prompt"])
        came[word] += 1
        if came[word] > 4 - lost.get(word, 0):
            return Response("no", 400)
        double, size = EngineDouble(), came[word]
        return double.answer(
            request,
            token_ids=[1] * size,
            logprobs={"token_logprobs": [-0.5] * size},
            weight_versions=[{"version": "0", "start": 0, "end": size}],
        )

    return script


def engine_of(script: Script) -> EngineDouble:
    engine = EngineDouble()
    engine.always = script
    return engine


# ---------------------------------------------------------------------- requests of a group


def test_a_group_that_lost_rollouts_is_stored_with_advantages_over_the_rest(tmp_path: Path) -> None:
    engine = engine_of(refusing(abd=1, bcd=2))
    options: dict[str, Any] = {"rollouts_per_request": 1, "min_group_size": 2, "environment": _LENGTHS}
    w = completed(tmp_path, ServiceDouble(prompts=4), engine, **options)
    groups = {group.prompt_index: group for group in w.service.groups}
    assert {index: group.rollouts for index, group in sorted(groups.items())} == {0: 4, 1: 3, 2: 2, 3: 4}
    assert not w.service.returned and not w.service.out
    lost = {index: group.metadata.get("lost_rollouts") for index, group in sorted(groups.items())}
    assert lost == {0: None, 1: {"engine_refused": 1}, 2: {"engine_refused": 2}, 3: None}
    for group in groups.values():
        assert group.advantages is not None
        rewards = group.rewards
        assert rewards.tolist() == list(range(1, group.rollouts + 1)) == group.completion_lengths.tolist()
        assert group.advantages == pytest.approx((rewards - rewards.mean()) / (rewards.std() + 1e-6), rel=1e-4)
        assert group.metadata["sampling"]["n"] == 4 and group.metadata["requests"] == 4


def test_partial_groups_and_lost_rollouts_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = engine_of(refusing(abd=1, bcd=2))
    w = completed(tmp_path, ServiceDouble(prompts=4), engine, rollouts_per_request=1, min_group_size=2)
    text = exposition("r", w.daemon).decode()
    assert 'replaybuf_generator_groups_partial_total{run="r"} 2.0' in text
    assert 'replaybuf_generator_rollouts_lost_total{reason="engine_refused",run="r"} 3.0' in text
    assert "partial groups 2" in caplog.text


@pytest.mark.parametrize("least", [None, 3])
def test_a_group_with_too_few_rollouts_left_returns_its_ticket(tmp_path: Path, least: int | None) -> None:
    engine = engine_of(refusing(abd=2))
    w = completed(tmp_path, ServiceDouble(prompts=4), engine, rollouts_per_request=1, min_group_size=least)
    assert (w.stored, w.reasons) == ([0, 2, 3], {"t1": "engine_refused"})


def test_a_request_for_several_rollouts_loses_all_of_them(tmp_path: Path) -> None:
    engine = engine_of(refusing(cd=3))
    service = ServiceDouble(prompts=4, group_size=5)
    w = completed(tmp_path, service, engine, rollouts_per_request=2, min_group_size=2)
    assert {group.prompt_index: group.rollouts for group in service.groups} == {0: 5, 1: 5, 2: 5, 3: 2}
    assert Counter(request["n"] for request in engine.requests) == {2: 8, 1: 4}
    assert not w.service.returned


def test_stages_complete_partial_groups(tmp_path: Path) -> None:
    engine = engine_of(refusing(abd=1))
    service = ServiceDouble(prompts=4)
    options: dict[str, Any] = {"rollouts_per_request": 1, "min_group_size": 2}
    completed(tmp_path, service, engine, stages=[Sums("ref_logprobs", 4)], **options)
    assert {group.prompt_index: group.rollouts for group in service.groups} == {0: 4, 1: 3, 2: 4, 3: 4}
    assert all(group.ref_logprobs is not None for group in service.groups)


def test_every_request_of_a_group_has_the_seeds_of_its_rollouts(tmp_path: Path) -> None:
    engine = EngineDouble()
    completed(tmp_path, ServiceDouble(prompts=1), engine, rollouts_per_request=3, request_seed=7)
    seed = request_seed(7, 0, 1)
    asked = sorted((request["seed"], request["n"]) for request in engine.requests)
    assert asked == [(seed, 3), (seed + 3, 1)]


# ---------------------------------------------------------------------- what may be lost


def test_faults_of_the_whole_group_are_no_loss_of_rollouts() -> None:
    whole: list[GenerationFault] = [EngineUnfit("engine_unfit", "no")]
    whole += [EngineFault(reason, "no") for reason in ("superseded", "lost_lineage", "run_paused", "run_finished")]
    for fault in whole:
        losses = Losses(8)
        with pytest.raises(type(fault)):
            losses.record(fault, 1)  # type: ignore[arg-type]
        assert not losses.metadata
    losses = Losses(2)
    losses.record(EngineAway("engine_timeout", "late"), 1)
    losses.record(RewardFault("environment_raised", "broke"), 1)
    with pytest.raises(EngineAway):
        losses.record(EngineAway("engine_timeout", "late"), 1)
    assert losses.metadata == {"lost_rollouts": {"engine_timeout": 1, "environment_raised": 1}}


async def test_an_aborted_rollout_that_cannot_be_continued_is_lost_alone() -> None:
    double = ByRule(4)
    double.cuts.append([None, [(4, 1)], None])
    double.cuts.extend([[]] for _ in range(TRIES))
    async with fleet_of(double, on_publish="abort-and-resume") as fleet:
        losses = Losses(1)
        requests = GroupRequests(fleet, None, losses)
        made = await requests.generate(np.array(PROMPT, np.int32), Sampling(n=3, max_tokens=6))
        assert made.completion_lengths.tolist() == [6, 6] and not made.aborted
        assert losses.by_reason == {"engine_aborted": 1}


async def test_an_episode_whose_environment_fails_is_lost_alone(tmp_path: Path) -> None:
    played = itertools.count()

    async def answers(number: int, turn: Turn) -> None:
        if next(played) in (1, 2):
            raise RuntimeError("the sandbox died")

    environment = Scripted(answers)
    engine, losses = EngineDouble(), Losses(2)
    async with fleet_of(engine) as fleet:
        episodes = Episodes(environment, make_tokenizer(tmp_path), max_turns=2, timeout_s=TIMEOUT_S)
        requests, sampling = GroupRequests(fleet, 1, losses), Sampling(n=4, max_tokens=20)
        sample, scores = await episodes.play(requests, make_prompt("abc"), sampling, fleet.check_rest, losses)
    assert len(sample.finish_reasons) == len(scores.rewards) == len(sample.metadata["turns"]) == 2
    assert sample.completion_mask is None  # the environment wrote no token
    assert losses.by_reason == {"environment_raised": 2}

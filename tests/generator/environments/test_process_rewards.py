"""Process rewards: from stretches of a completion to advantages per token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf.errors import RewardFault
from replaybuf.generator.environments import Environment, Reward, Score
from replaybuf.generator.environments.process_rewards import by_text, by_turn
from replaybuf.generator.environments.scoring import Scorer, Scores
from replaybuf.wire.group import Group
from tests.generator.doubles import (
    LETTERS,
    TIMEOUT_S,
    Broken,
    EngineDouble,
    ServiceDouble,
    ids,
    make_prompt,
    make_tokenizer,
)
from tests.generator.environments.test_episodes import Speaking, play
from tests.generator.turn_environments import Scripted
from tests.generator.worlds import run, world

END = len(LETTERS)
"""Id of `</s>`, which decodes to nothing."""


def scores(*steps: Sequence[tuple[int, float]]) -> Scores:
    return Scores(np.zeros(len(steps)), {}, tuple(tuple(rollout) for rollout in steps))


def test_a_stretch_ends_with_the_token_of_its_last_character(
    tmp_path: Path,
) -> None:
    """The last stretch includes the end-of-sequence token."""
    completions = [[*ids("ab cd"), END], ids("abc"), ids("a")]
    counted = by_text(
        make_prompt(), scores([(2, 1.0), (5, 0.0)], [(1, 0.5)], []), completions, make_tokenizer(tmp_path)
    )
    assert counted.process_rewards == (((2, 1.0), (6, 0.0)), ((1, 0.5),), ())


@pytest.mark.parametrize("end", [0, 4])
def test_an_end_outside_the_text_is_a_reward_fault(tmp_path: Path, end: int) -> None:
    with pytest.raises(
        RewardFault, match=rf"has a process reward that ends at {end}; the completion has 3 characters"
    ) as caught:
        by_text(make_prompt(), scores([(end, 1.0)]), [ids("abc")], make_tokenizer(tmp_path))
    assert caught.value.reason == "reward_bad_end"


def test_the_number_of_a_missing_turn_is_a_reward_fault() -> None:
    assert by_turn(make_prompt(), scores([(2, 1.0), (1, 0.0)]), [[3, 9]]).process_rewards == (((9, 1.0), (3, 0.0)),)
    with pytest.raises(RewardFault, match="has a process reward that ends at 3; the completion has 2 turns"):
        by_turn(make_prompt(), scores([(3, 1.0)]), [[3, 9]])


def stored(tmp_path: Path, environment: Environment, **options: Any) -> Group:
    """Generate one group of four rollouts `cba`; return the appended group."""
    made: list[Group] = []

    async def main() -> None:
        service = ServiceDouble(prompts=1)
        async with world(tmp_path, EngineDouble(), service, environment=environment, **options) as w:
            await w.run()
            assert service.returned == []
            made.extend(service.groups)

    run(main())
    return made[0]


def graded() -> Environment:
    """Return an environment: the first stretch of the first two rollouts is good, every second stretch is bad."""
    good = iter([True, True, False, False])
    return Broken(lambda prompt, text: Score(1.0, process_rewards=((1, float(next(good))), (3, 0.0))))


def test_the_estimator_process_stores_advantages_per_token(tmp_path: Path) -> None:
    """Rewards 1, 0, 1, 0, 0, 0, 0, 0: mean 1/4, deviation 0.433; the mean over its tokens is the rollout's own."""
    group = stored(tmp_path, graded(), advantage="process")
    high, low = 0.75 / 0.4330127, -0.25 / 0.4330127
    assert group.token_advantages is not None and group.advantages is not None
    good, bad = [high + low, low, low], [2 * low, low, low]
    assert group.token_advantages.tolist() == pytest.approx([*good, *good, *bad, *bad], abs=1e-5)
    assert group.advantages.tolist() == pytest.approx([sum(scores) / 3 for scores in (good, good, bad, bad)], abs=1e-5)
    assert "zero_variance" not in group.metadata, "rewards are equal, process rewards are not"


def test_other_estimators_ignore_process_rewards(tmp_path: Path) -> None:
    group = stored(tmp_path, graded())
    assert group.token_advantages is None and group.advantages is not None and not group.advantages.any()


def test_the_stretches_of_an_episode_are_its_turns(tmp_path: Path) -> None:
    async def answers(number: int, turn: Any) -> str | None:
        return "xy" if number == 0 else None

    environment = Scripted(answers, Score(1.0, process_rewards=((1, 0.25), (2, 0.75))))
    sample, scored = play(tmp_path, Speaking("abc", "de"), environment)
    assert sample.completion_lengths.tolist() == [7]
    assert scored.process_rewards == (((3, 0.25), (7, 0.75)),)


async def test_process_rewards_of_several_rewards_are_weighted() -> None:
    halves = Broken(lambda prompt, text: Score(1.0, process_rewards=((len(text) // 2, 1.0), (len(text), 0.0))))
    whole = Broken(lambda prompt, text: Score(0.0))
    scorer = Scorer([Reward("halves", halves, 2.0), Reward("whole", whole)], timeout_s=TIMEOUT_S)
    assert (await scorer.score(make_prompt(), ["abcd", "ab"])).process_rewards == (
        ((2, 2.0), (4, 0.0)),
        ((1, 2.0), (2, 0.0)),
    )

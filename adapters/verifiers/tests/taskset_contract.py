"""Contract of tasksets, for the double of the process and for the process with verifiers.

Subclass `TasksetContract`, or `OnProcess` for other tests, with a fixture `python`, which names the interpreter.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaybuf.client.producers import describe_failure
from replaybuf.errors import Invalid, RewardFault
from replaybuf.generator.environments import Reward, Score
from replaybuf.generator.environments.scoring import Scorer
from replaybuf.generator.prompts import Prompt
from replaybuf.generator.prompts.sources import Endless, Source, open_source
from replaybuf_verifiers import process as taskset_process
from replaybuf_verifiers.environment import Verifiers
from replaybuf_verifiers.process import PROCESS, PYTHON
from tests.cli.test_generate import generated, put
from tests.conftest import RunClient
from tests.generator.doubles import TIMEOUT_S, write_tokenizer
from tests.generator.prompts.test_sources import Letters
from tests.waiting import POLL_S

HERE = Path(__file__).parent / "modules"
WORD = "verifiers:backwards"


def opened(prompts: str = WORD, **options: object) -> list[Prompt]:
    """Read a finite taskset."""
    taskset = open_source(Source(prompts=prompts, name="s", options=options), Letters())
    assert isinstance(taskset, list)
    return taskset


class OnProcess:
    """A process for the tests of a class, which finds the tasksets of `modules`."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _process(cls, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # verifiers keeps the folders of plays there
            patch.setenv(PYTHON, str(python))
            patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
            PROCESS.close()
            yield
            PROCESS.close()


class TasksetContract(OnProcess):
    """Tasks that take one reply."""

    def test_prompt_ids_of_tasks_do_not_depend_on_their_order(self) -> None:
        """Also: chat messages, answer, place, and rows that are read in blocks."""
        prompts = opened(words=["cab", "fed"])
        assert [(prompt.text, prompt.answer) for prompt in prompts] == [("say>cab", "bac"), ("say>fed", "def")]
        assert prompts[1].where == "prompts verifiers:backwards, row 2"
        assert all(prompt.prompt_id.startswith("backwards/") for prompt in prompts)
        turned = opened(words=["fed", "cab"])
        assert [prompt.prompt_id for prompt in turned] == [prompt.prompt_id for prompt in reversed(prompts)]
        many = opened(words=["a" * length for length in range(1, 300)])
        assert [len(prompt.text) for prompt in many] == list(range(5, 304))

    def test_an_infinite_taskset_returns_any_row_by_number(self) -> None:
        """Forward, back and forward again."""
        taskset = open_source(Source(prompts="verifiers:endless_words", name="s"), Letters())
        assert isinstance(taskset, Endless)
        assert [taskset.at(place).text for place in (700, 2, 701)] == [
            "say>" + "a" * length for length in (701, 3, 702)
        ]
        assert taskset.at(2).prompt_id == "endless_words/a3"

    @pytest.mark.parametrize(
        ("prompts", "options", "named"),
        [("verifiers:absent", {}, "taskset 'absent' does not load"), (WORD, {"wrods": []}, "wrods")],
    )
    def test_a_taskset_that_does_not_load_is_named_in_the_error(
        self, prompts: str, options: dict[str, object], named: str
    ) -> None:
        """An unknown taskset, and an unknown option."""
        with pytest.raises(Invalid, match=named):
            opened(prompts, **options)

    def test_a_reply_is_scored_with_all_weighted_rewards(self) -> None:
        """Reasoning is split from content; metrics are parts that do not count."""
        (prompt, _) = opened()
        made = Verifiers()
        made.check(prompt)

        async def main() -> list[Score]:
            async with asyncio.timeout(8 * TIMEOUT_S):
                replies = ("bac", "x", "<think>b, a</think>\nbac")
                return await asyncio.gather(*(made.score(prompt, reply) for reply in replies))

        right, wrong, thoughtful = asyncio.run(main())
        assert right == Score(3.0, {"correct": 1.0, "kept": 1.0, "metrics.said": 3.0, "metrics.thought": 0.0})
        assert (wrong.reward, wrong.parts["correct"]) == (1.0, 0.0)
        assert (thoughtful.reward, thoughtful.parts["metrics.thought"]) == (3.0, 4.0)

    def test_a_faulty_reward_costs_only_its_group(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It raises, is not a number, waits (cancelled), ends the process, or blocks it (another one starts)."""
        (prompt, _) = opened()
        made = Verifiers()
        made.check(prompt)
        scorer = Scorer([Reward("verifiers", made)], timeout_s=8 * TIMEOUT_S)

        async def correct(reply: str) -> float:
            return float((await scorer.score(prompt, [reply])).parts["correct"][0])

        async def reason(reply: str) -> str:
            with pytest.raises(RewardFault) as caught:
                await correct(reply)
            return caught.value.reason

        async def traceback_of(reply: str) -> str:
            with pytest.raises(RewardFault) as caught:
                await correct(reply)
            return describe_failure(caught.value.reason, caught.value).traceback

        async def begun(what: str) -> asyncio.Task[float]:
            """Return once the reward runs."""
            sign = tmp_path / what
            task = asyncio.create_task(correct(f"{what} {sign}"))
            async with asyncio.timeout(8 * TIMEOUT_S):
                while not sign.exists():  # noqa: ASYNC110 - another process makes it
                    await asyncio.sleep(POLL_S)
            return task

        async def cancelled(task: asyncio.Task[float]) -> None:
            task.cancel()
            await asyncio.wait([task], timeout=TIMEOUT_S)
            assert task.cancelled()

        async def main() -> None:
            first = await correct("pid")
            assert (await reason("raise"), await reason("nan")) == ("reward_raised", "reward_not_finite")
            assert "worker/process.py" in await traceback_of("raise")  # the lines of the taskset's process
            waiting = await begun("wait")
            assert (await scorer.score(prompt, ["bac", "x"])).rewards.tolist() == [3.0, 1.0]
            await cancelled(waiting)
            assert await correct("given up") == 1.0
            assert await correct("pid") == first
            assert await reason("exit") == "reward_raised"
            second = await correct("pid")
            holding_up = await begun("block")
            monkeypatch.setattr(taskset_process, "GRACE_S", 0.2)
            await cancelled(holding_up)
            assert len({first, second, await correct("pid")}) == 3

        asyncio.run(main())

    def test_an_unsupported_taskset_is_rejected_by_name(self) -> None:
        """The environment checks prompts at start."""
        prompt = opened("verifiers:contained")[0]
        with pytest.raises(Invalid, match=r"taskset contained needs a container \(NEEDS_CONTAINER\)"):
            Verifiers().check(prompt)

    def test_generate_stores_scores_of_the_taskset(self, tmp_path: Path, run: RunClient) -> None:
        """Two epochs, with a second reward that compares with the answer of the task."""
        put(run, tickets={"prompts": 4})
        write_tokenizer(tmp_path / "model", chat_template="{{ messages[1].content }}")  # the engine spells it backwards
        groups = generated(tmp_path, run, prompts=WORD, environment="verifiers:0.5,exact-match")
        assert sorted(group["prompt_id"] for group in groups) == sorted(2 * [prompt.prompt_id for prompt in opened()])
        for rollout in (rollout for group in groups for rollout in group["rollouts"]):
            assert rollout["reward"] == 2.5
            assert rollout["rewards"] == {
                "verifiers": 3.0,
                "verifiers.correct": 1.0,
                "verifiers.kept": 1.0,
                "verifiers.metrics.said": 3.0,
                "verifiers.metrics.thought": 0.0,
                "exact-match": 1.0,
            }

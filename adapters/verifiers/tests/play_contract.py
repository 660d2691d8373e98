"""Contract of plays, for the double of the process and for the process with verifiers.

Subclass `PlayContract` with a fixture `python`, which names the interpreter.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from taskset_contract import OnProcess

from replaybuf.errors import Invalid, RewardFault
from replaybuf.generator.engines import Sample, Sampling, VllmEngine
from replaybuf.generator.environments import Reward, check_prompts, load_rewards, multi_turn
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.scoring import Scorer, Scores
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.prompts import Prompt
from replaybuf.generator.prompts.sources import Source, open_source
from replaybuf.wire.text.model_tokenizer import Tokenizer
from replaybuf_verifiers import process as taskset_process
from replaybuf_verifiers.process import PROCESS
from replaybuf_verifiers.worker.messages import PlayState, Request, TakeTurn
from tests.cli.test_generate import generator, stored
from tests.conftest import RunClient
from tests.generator.environments.test_episodes import Speaking
from tests.generator.qwen import write_qwen
from tests.waiting import eventually, patience

SUMS = "verifiers:sums"
TIMEOUT_S = 120.0
"""Every wait of a test ends here; a process with verifiers takes seconds to start."""
CALL = '<tool_call>\n{"name": "calculator_add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
HANGS = CALL.replace('"a": 2', '"a": -1')
GIVEN = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
RIGHT = "it is 5<|im_end|>"


class Table:
    """A model folder, and plays with it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(write_qwen(folder))

    def prompts(self, prompts: str = SUMS, **options: object) -> list[Prompt]:
        """Read a finite taskset."""
        taskset = open_source(Source(prompts=prompts, name="s", options=options), self.tokenizer)
        assert isinstance(taskset, list)
        return taskset

    def ids(self, text: str) -> list[int]:
        """Encode, with special tokens as such."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def speaking(self, *texts: str, finish_reason: str = "stop") -> Speaking:
        """Make an engine that returns these texts."""
        engine = Speaking(*texts, finish_reason=finish_reason, encode=self.ids)
        engine.max_model_len = 1 << 16
        return engine

    async def plays(
        self,
        prompt: Prompt,
        engine: Speaking,
        *,
        n: int = 1,
        max_tokens: int = 1000,
        max_turns: int = 8,
        **bound: float,
    ) -> tuple[Sample, Scores]:
        """Play a group."""
        rewards = load_rewards("verifiers")
        await asyncio.to_thread(check_prompts, rewards, [prompt])
        environment = multi_turn(rewards)
        assert environment is not None
        timeout_s = bound.get("timeout_s", TIMEOUT_S)
        async with asyncio.timeout(TIMEOUT_S * patience()), engine.up():
            fleet = Fleet([VllmEngine(engine.url, timeout_s=TIMEOUT_S)], max_staleness=1)
            episodes = Episodes(environment, self.tokenizer, max_turns=max_turns, timeout_s=timeout_s)
            try:
                return await episodes.play(fleet, prompt, Sampling(n=n, max_tokens=max_tokens, seed=5))
            finally:
                await fleet.aclose()

    def played(self, *texts: str, finish_reason: str = "stop", **options: int) -> tuple[Sample, Scores]:
        """Play the first task with these turns."""
        engine = self.speaking(*texts, finish_reason=finish_reason)
        return asyncio.run(self.plays(self.prompts()[0], engine, **options))

    def fault(self, *texts: str, **options: float) -> RewardFault:
        """Play the first task to a fault."""
        with pytest.raises(RewardFault) as caught:
            asyncio.run(self.plays(self.prompts()[0], self.speaking(*texts), **options))  # type: ignore[arg-type]
        return caught.value


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """A new model folder."""
    return Table(tmp_path / "qwen")


class PlayContract(OnProcess):
    """Needs the taskset `sums`: at most three turns, with a calculator. Only a hanging step takes `bound_s`."""

    bound_s = 4.0

    def test_tool_answers_are_masked_parts_of_the_completion(self, table: Table) -> None:
        """Tokens are those sampled and answered; rewards, weights and metrics have their names."""
        (prompt, _) = table.prompts()
        assert prompt.prompt_id.startswith("sums/")
        engine = table.speaking(CALL, RIGHT)
        sample, scores = asyncio.run(table.plays(prompt, engine))
        turn, answer, last = table.ids(CALL), table.ids(GIVEN), table.ids(RIGHT)
        assert sample.completion_ids.tolist() == turn + answer + last
        assert sample.completion_mask is not None
        assert sample.completion_mask.tolist() == [True] * len(turn) + [False] * len(answer) + [True] * len(last)
        assert sample.inference_logprobs[~sample.completion_mask].tolist() == [0.0] * len(answer)
        assert set(sample.inference_logprobs[sample.completion_mask]) == {-0.25}
        first, second = engine.requests
        assert first["prompt"] == prompt.token_ids.tolist()
        assert second["prompt"] == first["prompt"] + turn + answer
        assert (sample.finish_reasons, sample.metadata["turns"]) == (("stop",), [2])
        assert {name: values.tolist() for name, values in scores.parts.items()} == {
            "right": [1.0],
            "noted": [1.0],
            "metrics.turns": [2.0],
        }
        assert scores.rewards.tolist() == [3.0]

    def test_each_rollout_of_a_group_has_its_own_play(self, table: Table) -> None:
        """One ends while another calls a tool."""
        sample, scores = table.played(RIGHT, CALL, "no<|im_end|>", n=2)
        assert sample.metadata["turns"] == [1, 2]
        assert scores.rewards.tolist() == [3.0, 1.0]

    def test_a_turn_that_was_cut_off_ends_a_play_and_is_scored(self, table: Table) -> None:
        """With its text and without a further turn, even if it calls a tool."""
        sample, scores = table.played("so it is 5", finish_reason="length")
        assert (sample.finish_reasons, sample.completion_ids.tolist()) == (("length",), table.ids("so it is 5"))
        assert (scores.rewards.tolist(), scores.parts["metrics.turns"].tolist()) == ([3.0], [1.0])
        _, scores = table.played(CALL, finish_reason="length")
        assert (scores.rewards.tolist(), scores.parts["metrics.turns"].tolist()) == ([1.0], [1.0])

    @pytest.mark.parametrize(("max_turns", "max_tokens", "reason"), [(1, 1000, "max_turns"), (8, 80, "length")])
    def test_a_play_at_a_generator_bound_is_scored(
        self, table: Table, max_turns: int, max_tokens: int, reason: str
    ) -> None:
        """An answer without a following turn is dropped."""
        sample, scores = table.played(CALL, max_turns=max_turns, max_tokens=max_tokens)
        assert sample.completion_ids.tolist() == table.ids(CALL)
        assert sample.finish_reasons == (reason,)
        assert (scores.rewards.tolist(), scores.parts["metrics.turns"].tolist()) == ([1.0], [1.0])

    def test_a_stop_hook_of_the_task_ends_a_play(self, table: Table) -> None:
        """After three turns, though the third calls a tool."""
        sample, scores = table.played(CALL, CALL, CALL)
        assert sample.completion_ids.tolist() == table.ids(CALL + GIVEN + CALL + GIVEN + CALL)
        assert (sample.metadata["turns"], scores.rewards.tolist()) == ([3], [1.0])

    def test_a_play_that_changes_earlier_tokens_is_a_fault(self, table: Table) -> None:
        """Tokens after the end of a turn are lost when the conversation is rendered."""
        fault = table.fault(CALL + "and more")
        assert fault.reason == "environment_rewritten"
        assert "tokens that differ from its first" in fault.detail or "it already has" in fault.detail

    def test_a_hanging_tool_costs_only_its_group(self, table: Table) -> None:
        """Its play is cancelled; the process goes on."""
        table.played(RIGHT)  # so that the bound is that of the tool alone
        fault = table.fault(HANGS, timeout_s=self.bound_s)
        assert (fault.reason, "did not answer within" in fault.detail) == ("environment_timeout", True)
        assert table.played(RIGHT)[1].rewards.tolist() == [3.0]

    def test_a_raising_reward_costs_only_its_group(self, table: Table) -> None:
        """The fault holds the error."""
        fault = table.fault("raise<|im_end|>")
        assert fault.reason == "environment_raised"
        assert "no parse" in fault.detail

    def test_plays_are_lost_with_their_process_and_the_next_one_starts_another(
        self, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It exits; later it is blocked, and killed while another play goes on in it."""
        fault = table.fault("exit<|im_end|>")
        assert (fault.reason, "ended over it" in fault.detail) == ("environment_raised", True)
        table.played(RIGHT)
        (prompt, _) = table.prompts()
        sign = tmp_path / "blocked"
        monkeypatch.setattr(taskset_process, "GRACE_S", 0.2)
        asked, ask = [], PROCESS.ask

        async def noted(request: Request, answer: type[PlayState]) -> PlayState:
            asked.append(type(request))
            return await ask(request, answer)

        monkeypatch.setattr(PROCESS, "ask", noted)

        async def main() -> list[str]:
            other = asyncio.create_task(table.plays(prompt, table.speaking(HANGS)))
            async with asyncio.timeout(TIMEOUT_S * patience()):
                # Else it would begin, and hang, in the next process.
                await asyncio.to_thread(eventually, lambda: TakeTurn in asked, TIMEOUT_S)
                blocking = table.plays(prompt, table.speaking(f"block {sign}<|im_end|>"), timeout_s=self.bound_s)
                results = await asyncio.gather(other, blocking, return_exceptions=True)
            assert sign.exists()
            return [result.reason for result in results if isinstance(result, RewardFault)]

        assert asyncio.run(main()) == ["environment_raised", "environment_timeout"]
        assert table.played(RIGHT)[1].rewards.tolist() == [3.0]

    def test_a_task_with_one_reply_is_an_episode_of_one_turn(self, table: Table) -> None:
        """For prompts of several tasksets."""
        word, sum_of_two = table.prompts("verifiers:backwards")[0], table.prompts()[0]
        rewards = load_rewards("verifiers")
        check_prompts(rewards, [word])
        assert multi_turn(rewards) is None
        check_prompts(rewards, [word, sum_of_two])
        environment = multi_turn(rewards)
        assert environment is not None

        async def main() -> tuple[Sample, Scores]:
            engine = table.speaking("bac<|im_end|>")
            async with asyncio.timeout(TIMEOUT_S * patience()), engine.up():
                fleet = Fleet([VllmEngine(engine.url, timeout_s=TIMEOUT_S)])
                try:
                    episodes = Episodes(environment, table.tokenizer, max_turns=8, timeout_s=TIMEOUT_S)
                    return await episodes.play(fleet, word, Sampling(n=1, max_tokens=20))
                finally:
                    await fleet.aclose()

        sample, scores = asyncio.run(main())
        assert (sample.metadata["turns"], scores.rewards.tolist()) == ([1], [3.0])

    def test_plays_must_be_the_only_reward_with_a_known_renderer(self, table: Table) -> None:
        """Rejected: another reward beside it, an unknown renderer, and a renderer for a task that is not played."""
        rewards = load_rewards("verifiers")
        check_prompts(rewards, table.prompts())
        with pytest.raises(Invalid, match="environment 'verifiers' plays turns; it must be the only one"):
            Scorer([*rewards, Reward("exact-match", load_rewards("exact-match")[0].environment)], timeout_s=1.0)
        with pytest.raises(Invalid, match=r"renderer .*unheard-of.* name one.*qwen3"):
            table.prompts(renderer="unheard-of")
        with pytest.raises(Invalid, match="backwards has the option renderer, but its tasks are not played"):
            table.prompts("verifiers:backwards", renderer="qwen3")

    def test_generate_stores_played_groups(self, table: Table, tmp_path: Path, run: RunClient) -> None:
        """From tickets to groups, through the command."""
        batch = {"groups_per_batch": 3, "tokens_per_batch": 1 << 14, "seq_len": 2048}
        assert run.put(batch=batch, group_size=4, tickets={"prompts": 2}).status_code == 201
        texts = ([CALL] * 4 + [RIGHT] * 4) * 2

        async def main() -> None:
            engine = table.speaking(*texts)
            engine.version = 0  # what the run has published
            options = {"prompts": SUMS, "environment": "verifiers", "tokenizer": str(table.tokenizer.folder)}
            options |= {"max-tokens": "1000", "max-inflight-groups": "1"}
            async with (
                asyncio.timeout(TIMEOUT_S * patience()),
                engine.up(),
                generator(tmp_path, str(run.http.base_url), run.run, engine.url, **options) as process,
            ):
                _, error = await process.communicate()
                assert process.returncode == 0, error.decode()

        asyncio.run(main())
        groups = stored(run)
        assert len(groups) == 2
        for rollout in (rollout for group in groups for rollout in group["rollouts"]):
            assert rollout["rewards"]["noted"] == 1.0
            assert 0 in rollout["completion_mask"]

"""Plays on verifiers: the contract that its double passes, and features of verifiers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from play_contract import CALL, GIVEN, RIGHT, PlayContract, Table, table
from test_tasksets import folder

from replaybuf.errors import Invalid, RewardFault
from tests.generator.qwen import TEMPLATE, write_qwen

__all__ = ["folder", "table"]

OWN_TOOLS = """
import verifiers.v1 as vf
from sums import Calculator, SumData, SumTask

__all__ = ["Mine"]


class MyTask(SumTask):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]


class Mine(vf.Taskset[MyTask, vf.TasksetConfig]):
    def load(self):
        yield MyTask(SumData(prompt="2+3", answer="5", system_prompt="Add."), self.config.task)
"""
TALK = """
import verifiers.v1 as vf
from sums import SumData, SumTask

__all__ = ["Mine", "Talk"]


class Mine(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        yield SumTask(SumData(prompt="2+3", answer="5", system_prompt="Add."), self.config.task)


class TalkConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()


class Talk(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        async with agents.solver.interaction(task) as talk:
            segment = await talk.turn()
            while "5" not in segment.last_reply and not segment.terminated:
                segment = await talk.turn("no")
"""
POLICED = """
import verifiers.v1 as vf
from sums import Calculator, Sums, SumsConfig, SumData, SumTask

__all__ = ["Mine"]


class MyTask(SumTask):
    @vf.intercept
    def forbid(self, request: vf.Request):
        said = request.messages[-1]
        if said.role == "tool":
            request.messages[-1] = said.model_copy(update={"content": "forbidden" if not said.content else "seen"})
        return request


class Mine(vf.Taskset[MyTask, SumsConfig]):
    def load(self):
        yield MyTask(SumData(prompt="2+3", answer="5", system_prompt="Add."), self.config.task)

    toolsets = Sums.toolsets
"""
NO = "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"


class TestVerifiers(PlayContract):
    """verifiers 0.4."""

    def test_the_prompt_holds_the_tools(self, table: Table) -> None:
        """As the model's chat template writes them."""
        text = table.tokenizer.decode([table.prompts()[0].token_ids])[0]
        assert '"name": "calculator_add", "description": "Add two numbers."' in text
        assert text.endswith("2+3\nassistant\n")

    def test_a_default_renderer_that_differs_from_the_chat_template_is_rejected(self, tmp_path: Path) -> None:
        """Also a model type without a default renderer."""
        table = Table(tmp_path)
        write_qwen(tmp_path, template=TEMPLATE.replace("# Tools", "# Instruments"))
        with pytest.raises(Invalid, match=r"renderer qwen3 differs from the chat template .* name one.*glm-4\.5"):
            table.prompts()
        assert table.prompts(renderer="qwen3"), "one that is named is its user's choice"
        other = Table(tmp_path / "other")
        write_qwen(tmp_path / "other", model_type="unheard_of")
        with pytest.raises(Invalid, match=r"model_type .unheard_of. of .* has no default renderer"):
            other.prompts()

    @pytest.mark.parametrize(("wrong", "message"), [("raises", "no box left"), ("greets", "it opens with more than")])
    def test_a_play_that_does_not_open_like_its_prompt_is_rejected(
        self, table: Table, wrong: str, message: str
    ) -> None:
        """When the first task is read."""
        with pytest.raises(Invalid, match=f"taskset unready cannot be played: .*{message}"):
            table.prompts("verifiers:unready", wrong=wrong)

    def test_a_harness_of_the_taskset_is_used(self, table: Table) -> None:
        """One that needs no container."""
        (prompt,) = table.prompts("verifiers:milled")
        sample, scores = asyncio.run(table.plays(prompt, table.speaking(CALL)))
        assert sample.completion_ids.tolist() == table.ids(CALL), "it makes no call to a tool"
        assert scores.rewards.tolist() == [1.0]


def test_tools_of_a_rollout_hooks_and_turns_of_a_user_are_played(folder: Path, table: Table) -> None:
    """A hook forbids a call; turns of a user keep their reasoning only with that renderer option."""
    (folder / "own_tools.py").write_text(OWN_TOOLS)
    (folder / "talk.py").write_text(TALK)
    (folder / "policed.py").write_text(POLICED)
    (prompt,) = table.prompts("verifiers:own_tools")
    sample, scores = asyncio.run(table.plays(prompt, table.speaking(CALL, RIGHT)))
    assert sample.completion_ids.tolist() == table.ids(CALL + GIVEN + RIGHT)
    assert scores.rewards.tolist() == [3.0]

    (prompt,) = table.prompts("verifiers:policed")
    sample, _ = asyncio.run(table.plays(prompt, table.speaking(CALL, RIGHT)))
    assert sample.completion_ids.tolist() == table.ids(CALL + GIVEN.replace("5", "forbidden") + RIGHT)

    (prompt,) = table.prompts("verifiers:talk")
    sample, scores = asyncio.run(table.plays(prompt, table.speaking("4<|im_end|>", RIGHT)))
    assert sample.completion_ids.tolist() == table.ids("4<|im_end|>" + NO + RIGHT)
    assert scores.rewards.tolist() == [3.0]

    thought = "<think>\nfour\n</think>\n\n4<|im_end|>"
    with pytest.raises(RewardFault) as caught:
        asyncio.run(table.plays(prompt, table.speaking(thought, RIGHT)))
    assert caught.value.reason == "environment_rewritten"
    renderer = {"name": "qwen3", "thinking_retention": "all"}
    (prompt,) = table.prompts("verifiers:talk", renderer=renderer)
    sample, _ = asyncio.run(table.plays(prompt, table.speaking(thought, RIGHT)))
    assert sample.completion_ids.tolist() == table.ids(thought + NO + RIGHT)

"""docs/adapters/producers.md: every example makes groups that a service stores."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replaybuf.client import Client, group_builder
from replaybuf.wire.contract import Ticket
from tests.client.producers.test_responses import chat
from tests.conftest import RunClient, ServeProcess

PAGE = (Path(__file__).parents[2] / "docs" / "adapters" / "producers.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TICKET = Ticket(ticket="t", prompt_index=7)


def names_of(block: int) -> dict[str, Any]:
    """Run a block of the page; return its names."""
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[block], f"docs/adapters/producers.md, block {block}", "exec"), names)
    return names


def test_the_loop_of_the_page_fills_the_run_until_the_prompts_are_used_up(
    own_service: ServeProcess,
    connect: Callable[[str, str], RunClient],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a real engine, whose tokens and logprobs arrive unchanged."""
    pytest.importorskip("torch")
    from tests.trainer.served import oracle, served, write_model

    monkeypatch.setenv("REPLAYBUF_URL", own_service.url)
    with served(write_model(tmp_path / "model", 0)) as engine:
        monkeypatch.setenv("ENGINE_URL", engine.url)
        names_of(0)
        with Client(own_service.url, "main") as client:
            (rollout, *_) = client.get_group("p0").rollouts or []
        expected = oracle(engine.model, rollout.prompt_ids, rollout.completion_ids)
    assert rollout.inference_logprobs == pytest.approx(expected, abs=1e-4)
    assert capsys.readouterr().out.split("\n")[:3] == ["stored ", "stored ", "no ticket: finished"]
    assert connect(own_service.url, "main").state()["groups"]["stored"] == 2


def test_the_agent_of_the_page_masks_what_its_tool_wrote() -> None:
    """Each conversation has two turns and one answer between them."""
    turns = iter([chat(), chat() | {"prompt_token_ids": [1, 2, 3, 4, 8, 9]}] * 4)

    def create(**asked: Any) -> Any:
        assert asked["logprobs"] is True and asked["extra_body"] == {"return_token_ids": True}
        answer = next(turns)
        message = SimpleNamespace(model_dump=lambda **_: answer["choices"][0]["message"])
        return SimpleNamespace(model_dump=lambda: answer, choices=[SimpleNamespace(message=message)])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    tool = lambda talk: {"role": "tool", "content": "5"} if len(talk) < 3 else None  # noqa: E731
    group = names_of(1)["play"](client, "m", [{"role": "user", "content": "2+3"}], tool, len, TICKET, 0)
    assert group.completion_ids.tolist() == [3, 4, 8, 9, 3, 4] * 4
    assert group.completion_mask.tolist() == [True, True, False, False, True, True] * 4
    assert group.rewards.tolist() == [4.0] * 4


def test_the_output_of_a_rollout_function_becomes_a_group() -> None:
    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    output = {"completion_ids": [[3, 9], [4]], "logprobs": [[-0.5, 0.0], [-0.25]], "env_mask": [[1, 0], [1]]}
    builder = group_builder([1], prompt_id="p", policy_version=0, ticket=TICKET)
    group = names_of(2)["add_all"](builder, output, ["p", "p"], ["a", "bb"], [length])
    assert group.rewards.tolist() == [1.0, 2.0] and group.reward_parts["length"].tolist() == [1.0, 2.0]
    assert group.completion_mask.tolist() == [True, False, True]

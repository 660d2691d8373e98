"""Traces of verifiers become rollouts: prompt, mask, logprobs, rewards."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
import verifiers.v1 as vf
from verifiers.v1.state import state_cls
from replaybuf.client import group_builder
from replaybuf.client.producers import add_trace
from replaybuf.errors import GroupRejected
from replaybuf.wire.group import group_to_json
import msgspec

change = json.loads(sys.argv[1])


class Sum(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace): return 1.0


def node(parent, message, ids, mask, logprobs, **fields):
    return vf.MessageNode(parent=parent, message=message, token_ids=ids, mask=mask, logprobs=logprobs,
                          sampled=any(mask), **fields)


task = Sum(vf.TaskData(prompt="2+3"), vf.TaskConfig())
trace = vf.Trace(
    task=vf.TraceTask(type="Sum", data=task.data, key=task.key, hash=task.hash),
    state=state_cls(Sum)(), agent=vf.AgentInfo(config=vf.AgentConfig()),
)
said, tool = vf.AssistantMessage(content="calc"), vf.ToolMessage(content="5", tool_call_id="1")
trace.nodes = [
    node(None, vf.UserMessage(content="2+3"), [1, 2], [False] * 2, []),
    node(0, said, [3, 4, 5], [False, True, True], change.get("logprobs", [-0.5, -0.25])),
    node(1, tool, [6], [False], []),
    node(2, said, [7, 8], [False, True], [-1.0]),
    node(1, tool, [9, 10], [False, True], [-2.0]),
]
trace.rewards = {"right": vf.Reward(score=0.5, weight=2.0), "brief": vf.Reward(score=-1.0, weight=0.5)}
if "rewards" in change:
    trace.rewards = {"right": None}
if change.get("silent"):
    for one in trace.nodes:
        one.mask, one.logprobs = [False] * len(one.mask), []
group = group_builder(prompt_id="p", policy_version=3, group_id="g")
try:
    added = add_trace(group, trace)
    print(json.dumps([added, msgspec.to_builtins(group_to_json(group.build()))]))
except GroupRejected as error:
    print(json.dumps(error.detail.replace(trace.id, "ID")))
"""


def answer(python: Path, **change: Any) -> Any:
    """Run the script on verifiers with a change of its trace."""
    done = subprocess.run(
        [python, "-c", SCRIPT, json.dumps(change)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_branch_of_a_trace_is_a_rollout_with_the_rewards_of_the_trace(python: Path) -> None:
    """The prompt ends before the first sampled token; messages of tools have the mask 0."""
    added, group = answer(python)
    first, second = group["rollouts"]
    assert (added, group["policy_version"]) == (2, 3)
    assert (first["prompt_ids"], second["prompt_ids"]) == ([1, 2, 3], [1, 2, 3])
    assert (first["completion_ids"], first["completion_mask"]) == ([4, 5, 6, 7, 8], [1, 1, 0, 0, 1])
    assert first["inference_logprobs"] == [-0.5, -0.25, 0.0, 0.0, -1.0]
    assert (second["completion_ids"], second["completion_mask"]) == ([4, 5, 9, 10], [1, 1, 0, 1])
    assert [rollout["reward"] for rollout in (first, second)] == [0.5, 0.5]
    assert first["rewards"] == {"right": 0.5, "brief": -1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": None}, "trace ID has no score of right"),
        ({"silent": True}, "branch 0 of trace ID has no sampled token ids; use a TrainClientConfig"),
        ({"logprobs": []}, "branch 0 of trace ID has 0 logprobs for 2 sampled tokens of a message"),
    ],
)
def test_a_trace_that_lacks_something_is_named(python: Path, change: dict[str, Any], message: str) -> None:
    """Logprobs that verifiers does not have would read as 0: certainty."""
    assert answer(python, **change) == message

"""Conversion between tasks, replies and traces of verifiers."""

from __future__ import annotations

from typing import Any

from .messages import Scored, TaskRow, Unfit

_THINK, _THOUGHT = "<think>", "</think>"


def task_row(task: Any) -> TaskRow:
    """Convert a task to a row."""
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.task import Task, task_key

    data = task.data
    content = data.model_dump(mode="json", exclude_defaults=True)
    # The id does not depend on the task's place, so it stays the same in another order of the rows.
    own = type(task).key is not Task.key
    task_id = data.id or (task.key if own else task_key({k: v for k, v in content.items() if k != "idx"})[:16])
    messages = [_flat(message_to_wire(message)) for message in opening(data)]
    answer = content.get("answer")
    needs = [name for name in ("image", "agent_user", "skills", "artifacts") if content.get(name)]
    if any(not isinstance(message.get("content"), str) for message in messages):
        needs.append("images in its prompt")
    return TaskRow(
        task_id=task_id,
        messages=messages,
        answer=answer if isinstance(answer, str | int | float) else None,
        task=content,
        needs=needs,
    )


def opening(data: Any) -> list[Any]:
    """Return the first messages of a task; none if its user opens."""
    import verifiers.v1 as vf

    if data.prompt is None:
        return []
    prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    return [vf.SystemMessage(content=data.system_prompt), *prompt] if data.system_prompt else prompt


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """Join content that has only text parts to one text."""
    parts = message.get("content")
    if isinstance(parts, list) and all(part.get("type") == "text" for part in parts):
        return {**message, "content": "\n".join(part["text"] for part in parts)}
    return message


def split_reasoning(reply: str) -> tuple[str | None, str]:
    """Split a reply into reasoning and content at the closing tag: a chat template may write the opening one."""
    reasoning, closed, content = reply.partition(_THOUGHT)
    if closed:
        return reasoning.strip().removeprefix(_THINK).strip(), content.strip()
    if reply.lstrip().startswith(_THINK):
        return reply.strip().removeprefix(_THINK).strip(), ""
    return None, reply


def reply_trace(task: Any, reply: str) -> Any:
    """Return the trace of a task with one reply, like that of a rollout of one turn."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    trace: Any = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
    )
    reasoning, content = split_reasoning(reply)
    messages = [*opening(task.data), vf.AssistantMessage(content=content, reasoning_content=reasoning)]
    trace.nodes = [
        vf.MessageNode(parent=place - 1 if place else None, message=message, sampled=place == len(messages) - 1)
        for place, message in enumerate(messages)
    ]
    trace.stop("agent_completed")
    return trace


def scores_of(trace: Any) -> Scored:
    """Read the scores of a trace. Raises `Unfit` if a reward is missing."""
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        raise Unfit(f"reward {', '.join(missing) or 'of any name'} is missing")
    return Scored(
        reward=float(trace.reward),
        rewards={name: reward.score for name, reward in trace.rewards.items()},
        metrics={name: value for name, value in trace.metrics.items() if value is not None},
    )

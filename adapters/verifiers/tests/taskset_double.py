"""Double of the process with verifiers, for the tasksets of `modules`.

It replaces the interpreter that has verifiers. `backwards` and `endless_words` take a reply, `sums` is played, and
`contained` is unsupported.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from pathlib import Path
from typing import Any, cast

from replaybuf.wire import pipes
from replaybuf.wire.text.model_tokenizer import Tokenizer
from replaybuf_verifiers.worker.messages import Described, PlayFailed, Rendering, Scored, TaskRow, Unfit
from replaybuf_verifiers.worker.plays import Over, Play
from replaybuf_verifiers.worker.process import run
from replaybuf_verifiers.worker.traces import split_reasoning

GIVEN_UP: list[str] = []
"""Of every reward that was cancelled."""
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


class Words:
    """The tasksets with one reply."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        if name not in ("backwards", "endless_words", "contained") or options.keys() - {"words"}:
            raise Unfit(f"taskset {name!r} does not load: {sorted(options)}")
        self._name = name
        self.infinite = name == "endless_words"
        self._words = options.get("words", ["cab", "fed"])

    def describe(self) -> Described:
        """Describe `contained` as unfit."""
        unfit = "needs a container (NEEDS_CONTAINER)" if self._name == "contained" else None
        return Described(infinite=self.infinite, plays=None, unfit=unfit)

    async def rows(self, first: int, count: int, rendering: Rendering | None) -> list[TaskRow]:
        """Make tasks."""
        if self.infinite:
            return [_row(f"a{number + 1}", "a" * (number + 1)) for number in range(first, first + count)]
        return [_row(f"hash-of-{word}", word) for word in self._words[first : first + count]]

    async def score(self, data: dict[str, Any], reply: str) -> Scored:
        """Act by the words of the reply, as `modules/backwards.py`."""
        thought, said = split_reasoning(reply)
        correct = float(said == data["answer"])
        match said.split():
            case ["raise"]:
                raise ValueError("no parse")
            case ["nan"]:
                correct = float("nan")
            case ["wait", sign]:
                try:
                    Path(sign).touch()
                    await asyncio.Event().wait()
                finally:
                    GIVEN_UP.append(said)
            case ["given", "up"]:
                correct = float(len(GIVEN_UP))
            case ["block", sign]:
                Path(sign).touch()
                time.sleep(3600)  # noqa: ASYNC251 - as a reward must not
            case ["exit"]:
                os._exit(3)
            case ["pid"]:
                correct = float(os.getpid())
        metrics = {"said": float(len(said)), "thought": float(len(thought or ""))}
        return Scored(reward=2 * correct + 1, rewards={"correct": correct, "kept": 1.0}, metrics=metrics)

    async def begin(self, data: dict[str, Any], rendering: Rendering, prompt_ids: list[int]) -> Play:
        """Raise: its tasks take one reply."""
        raise Unfit("takes a reply")


class Sums:
    """As `modules/sums.py`."""

    infinite = False

    def describe(self) -> Described:
        """It is played."""
        return Described(infinite=False, plays="has tools", unfit=None)

    async def rows(self, first: int, count: int, rendering: Rendering | None) -> list[TaskRow]:
        """Make two tasks, rendered with the model's chat template and without tools."""
        rows = []
        for a, b in ((2, 3), (4, 5))[first : first + count]:
            messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{a}+{b}"}]
            prompt_ids = None
            if rendering is not None:
                if rendering.renderer.get("name", "qwen3") != "qwen3":
                    raise Unfit(f"renderer {rendering.renderer} cannot be made; name one, of qwen3")
                tokenizer = Tokenizer(Path(rendering.tokenizer))
                prompt_ids = tokenizer.encode(tokenizer.render(messages), add_special_tokens=False)
            answer = str(a + b)
            row = TaskRow(
                task_id=f"hash-of-{answer}",
                messages=messages,
                prompt_ids=prompt_ids,
                answer=answer,
                task={"answer": answer},
                needs=[],
            )
            rows.append(row)
        return rows

    async def score(self, data: dict[str, Any], reply: str) -> Scored:
        """It is played."""
        raise Unfit("takes more than a reply")

    async def begin(self, data: dict[str, Any], rendering: Rendering, prompt_ids: list[int]) -> Play:
        """Play the task."""
        play = Play(prompt_ids)
        play.start(_sum(data, Tokenizer(Path(rendering.tokenizer)), play, list(prompt_ids)))
        return play


async def _sum(data: dict[str, Any], tokenizer: Tokenizer, play: Play, ids: list[int]) -> Scored:
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    turns, reply = 0, ""
    try:
        while turns < 3:
            token_ids, _ = await play.sample(ids)
            turns += 1
            ids = ids + token_ids
            while end in token_ids and ids[-1] != end:  # as renderers do: nothing follows the end of a turn
                ids.pop()
            ids = ids if ids[-1] == end else [*ids, end]
            call = CALL.search(tokenizer.decode([token_ids])[0])
            reply = "" if call else tokenizer.decode([token_ids])[0]
            if call is None:
                break
            answer = await _called(call[1])
            response = (
                f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            )
            ids = ids + tokenizer.encode(response, add_special_tokens=False)
    except Over:
        pass
    match reply.split():
        case ["raise"]:
            raise PlayFailed("TaskError: no parse")
        case ["exit"]:
            os._exit(3)
        case ["block", sign]:
            Path(sign).touch()
            time.sleep(3600)  # noqa: ASYNC251 - as a reward must not
    right = float(data["answer"] in reply)
    return Scored(reward=2 * right + 1, rewards={"right": right, "noted": 1.0}, metrics={"turns": float(turns)})


async def _called(text: str) -> str:
    call = json.loads(text)["arguments"]
    if call["a"] == -1:
        try:
            await asyncio.Event().wait()
        finally:
            if isinstance(call["b"], str):
                Path(call["b"]).touch()
    return str(call["a"] + call["b"])


def _row(task_id: str, word: str) -> TaskRow:
    messages = [{"role": "system", "content": "say>"}, {"role": "user", "content": word}]
    answer = word[::-1]
    return TaskRow(
        task_id=task_id,
        messages=messages,
        answer=answer,
        task={"prompt": word, "answer": answer},
        needs=[],
    )


if __name__ == "__main__":
    run(lambda: "double", lambda name, options: cast(Any, Sums() if name == "sums" else Words(name, options)), pipes)

"""A taskset as its author would write it, but that a reply can choose what its reward does."""

# mypy: ignore-errors

import asyncio
import os
import time
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["Backwards"]

GIVEN_UP = []


class WordData(vf.TaskData):
    """A word."""

    answer: str


class WordTask(vf.Task[WordData]):
    """Say a word backwards."""

    @vf.reward(weight=2.0)
    async def correct(self, task, trace):
        """Whether the reply is the word backwards; or what the reply asks for."""
        match trace.last_reply.split():
            case ["raise"]:
                raise ValueError("no parse")
            case ["nan"]:
                return float("nan")
            case ["wait", sign]:
                try:
                    Path(sign).touch()
                    await asyncio.Event().wait()
                finally:
                    GIVEN_UP.append(task.answer)
            case ["given", "up"]:
                return float(len(GIVEN_UP))
            case ["block", sign]:
                Path(sign).touch()
                time.sleep(3600)  # noqa: ASYNC251 - as a reward must not
            case ["exit"]:
                os._exit(3)
            case ["pid"]:
                return float(os.getpid())
        return float(trace.last_reply == task.answer)

    @vf.reward
    async def kept(self, trace):
        """Whether the prompt's text is there, as it was."""
        return float([message.content for message in trace.messages[:-1]] == ["say>", trace.task.data.prompt])

    @vf.metric
    async def letters(self, trace):
        """Count those of the reply and of the thought before it."""
        return {"said": len(trace.last_reply), "thought": len(trace.assistant_messages[-1].reasoning_content or "")}


class BackwardsConfig(vf.TasksetConfig):
    """Options of the taskset."""

    words: tuple[str, ...] = ("cab", "fed")


class Backwards(vf.Taskset[WordTask, BackwardsConfig]):
    """Words to say backwards."""

    def load(self):
        """Make one task of each word."""
        for word in self.config.words:
            yield WordTask(WordData(prompt=word, answer=word[::-1], system_prompt="say>"), self.config.task)

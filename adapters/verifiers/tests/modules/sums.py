"""A taskset with tools, hooks and a reward that needs a runtime, as its author would write it."""

# mypy: ignore-errors

import asyncio
import os
import time
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    """A sum."""

    answer: str


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    """It adds."""

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        if a == -1:
            await asyncio.Event().wait()
        return str(a + b)


class SumTask(vf.Task[SumData]):
    """Say a sum."""

    async def setup(self, trace, runtime):
        """Leave a note."""
        await runtime.write("note", b"here")

    @vf.stop
    def enough(self, trace: vf.Trace) -> bool:
        """End after three turns."""
        return trace.num_turns >= 3

    @vf.reward(weight=2.0)
    async def right(self, task, trace):
        """Whether the answer is in the last reply."""
        match trace.last_reply.split():
            case ["raise"]:
                raise ValueError("no parse")
            case ["exit"]:
                os._exit(3)
            case ["block", sign]:
                Path(sign).touch()
                time.sleep(3600)  # noqa: ASYNC251 - as a reward must not
        return float(task.answer in trace.last_reply)

    @vf.reward
    async def noted(self, runtime):
        """Whether the note is there."""
        return float((await runtime.run(["cat", "note"], {})).stdout == "here")

    @vf.metric
    async def turns(self, trace):
        """Count turns, and tool calls."""
        return trace.num_turns


class SumsConfig(vf.TasksetConfig):
    """Options: where the calculator runs."""

    shared: bool = True


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """Two sums."""

    def load(self):
        """Make them."""
        for a, b in ((2, 3), (4, 5)):
            data = SumData(prompt=f"{a}+{b}", answer=str(a + b), system_prompt="Add.")
            yield SumTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        """Lend the calculator."""
        return [Calculator(vf.ToolsetConfig())] if config.shared else []


if __name__ == "__main__":
    Calculator.run()

"""A taskset whose plays do not open as they should."""

# mypy: ignore-errors

import verifiers.v1 as vf
from sums import SumData, SumTask

__all__ = ["Unready"]


class UnreadyData(SumData):
    """A sum, and what is wrong."""

    wrong: str


class UnreadyTask(SumTask, vf.Task[UnreadyData]):
    """Say a sum."""

    async def setup(self, trace, runtime):
        """Prepare nothing."""
        if self.data.wrong == "raises":
            raise ValueError("no box left")

    @vf.intercept
    def greet(self, request: vf.Request):
        """Say something first."""
        if self.data.wrong == "greets":
            request.messages[-1] = request.messages[-1].model_copy(update={"content": "hello"})
        return request


class UnreadyConfig(vf.TasksetConfig):
    """Options: what is wrong."""

    wrong: str


class Unready(vf.Taskset[UnreadyTask, UnreadyConfig]):
    """One sum."""

    def load(self):
        """Make it."""
        data = UnreadyData(prompt="2+3", answer="5", system_prompt="Add.", wrong=self.config.wrong)
        yield UnreadyTask(data, self.config.task)

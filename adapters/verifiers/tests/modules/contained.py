"""A taskset that needs a container."""

# mypy: ignore-errors

import verifiers.v1 as vf
from backwards import BackwardsConfig, WordData, WordTask

__all__ = ["Contained"]


class BoxedTask(WordTask):
    """Say a word backwards, in a box."""

    NEEDS_CONTAINER = True


class Contained(vf.Taskset[BoxedTask, BackwardsConfig]):
    """One word."""

    def load(self):
        """Make it."""
        yield BoxedTask(WordData(prompt="cab", answer="bac", system_prompt="say>"), self.config.task)

"""A taskset that never ends."""

# mypy: ignore-errors

import itertools

import verifiers.v1 as vf
from backwards import WordData, WordTask

__all__ = ["EndlessWords"]


class EndlessWords(vf.Taskset[WordTask, vf.TasksetConfig]):
    """One a, two a, three a."""

    INFINITE = True

    def load(self):
        """Make one task of each."""
        for length in itertools.count(1):
            yield WordTask(
                WordData(id=f"a{length}", prompt="a" * length, answer="a" * length, system_prompt="say>"),
                self.config.task,
            )

"""Names that environments and tasksets build on. The modules under `replaybuf.generator` document each of them."""

from replaybuf.generator.child_process import ChildEnded, ChildProcess
from replaybuf.generator.environments.contract import Environment, Episode, MultiTurnEnvironment, Score, Turn
from replaybuf.generator.environments.scoring import episode_fault, reward_fault
from replaybuf.generator.prompts.prompt import Prompt, invalid_row
from replaybuf.generator.prompts.rows import Row
from replaybuf.generator.prompts.tasksets import Taskset

__all__ = [
    "ChildEnded",
    "ChildProcess",
    "Environment",
    "Episode",
    "MultiTurnEnvironment",
    "Prompt",
    "Row",
    "Score",
    "Taskset",
    "Turn",
    "episode_fault",
    "invalid_row",
    "reward_fault",
]

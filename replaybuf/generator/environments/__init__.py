"""Environments: the reward of a completion or of an episode."""

from replaybuf.generator.environments.contract import (
    Environment,
    Episode,
    MultiTurnEnvironment,
    Score,
    Turn,
    score_of,
)
from replaybuf.generator.environments.reasoning_gym import ReasoningGym
from replaybuf.generator.environments.rewards import (
    ExactMatch,
    Reward,
    check_prompts,
    load_environment,
    load_rewards,
    multi_turn,
)

__all__ = [
    "Environment",
    "Episode",
    "ExactMatch",
    "MultiTurnEnvironment",
    "ReasoningGym",
    "Reward",
    "Score",
    "Turn",
    "check_prompts",
    "load_environment",
    "load_rewards",
    "multi_turn",
    "score_of",
]

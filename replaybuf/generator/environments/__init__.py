"""Environments: the reward of a completion or an episode."""

from replaybuf.generator.environments.contract import (
    TASKSET,
    Environment,
    Episode,
    ExactMatch,
    MultiTurnEnvironment,
    ReasoningGym,
    Reward,
    Score,
    Turn,
    check_prompts,
    load_environment,
    load_rewards,
    multi_turn,
    score_of,
)

__all__ = [
    "TASKSET",
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

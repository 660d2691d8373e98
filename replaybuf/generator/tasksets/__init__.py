"""Tasksets of verifiers: their tasks as prompts, their rewards as an environment."""

from replaybuf.generator.tasksets.environment import Verifiers

__all__ = ["Verifiers"]

"""Prompts of a run: where they come from, and which one a ticket means."""

from replaybuf.generator.prompts.prompt import Encoder, Prompt, PromptOrder, Prompts

__all__ = ["Encoder", "Prompt", "PromptOrder", "Prompts"]

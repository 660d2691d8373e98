"""replaybuf: a replay-buffer database for asynchronous reinforcement learning of language models."""

__version__ = "0.1.0"

__all__ = ["__version__"]

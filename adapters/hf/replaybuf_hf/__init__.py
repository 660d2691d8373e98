"""Train from a replaybuf run with the Hugging Face `Trainer` or with Lightning (`replaybuf_hf.lightning`)."""

from replaybuf_hf.checkpoints import newest_checkpoint
from replaybuf_hf.feed import RunOptions
from replaybuf_hf.losses import clipped_policy_loss, token_logprobs
from replaybuf_hf.trainer import ReplaybufCallback, ReplaybufTrainerMixin

__all__ = [
    "ReplaybufCallback",
    "ReplaybufTrainerMixin",
    "RunOptions",
    "clipped_policy_loss",
    "newest_checkpoint",
    "token_logprobs",
]

"""Figures to a project of Weights & Biases: `--wandb`.

The environment variables of wandb apply, such as WANDB_MODE=offline.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from replaybuf.errors import Invalid, MissingExtra
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.report.sinks.sink import Figures, flat

EXTRA = "wandb"


class WeightsAndBiases:
    """A run of a project, with the options of the trainer as its configuration and the name of the run as its name.

    Raises `Invalid` if wandb does not start, for example without an API key, and `MissingExtra` without wandb.
    """

    name = "Weights & Biases"

    def __init__(self, project: str, options: TrainOptions) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtra("replaybuf train --wandb", EXTRA) from None
        config = msgspec.to_builtins(_fields(options), enc_hook=str)
        try:
            # Its console capture would take the progress line apart.
            self._run = wandb.init(
                project=project, name=options.source, config=config, settings=wandb.Settings(console="off")
            )
        except Exception as error:  # wandb raises many kinds
            raise Invalid(
                f"wandb does not start: {error}; WANDB_MODE=offline writes to a local folder",
                name="wandb",
                value=project,
            ) from error

    def write(self, item: Figures) -> None:
        """Log the figures of one step."""
        self._run.log(flat(item), step=item["step"])

    def close(self) -> None:
        """Send the rest and end the run."""
        self._run.finish()


def _fields(options: TrainOptions) -> dict[str, Any]:
    """Return the options that may be shown: those with a secret have no `repr`."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options) if field.repr}

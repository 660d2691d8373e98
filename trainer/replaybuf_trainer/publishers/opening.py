"""The publisher of a training, by its options."""

from __future__ import annotations

from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.publishers.engines import EnginePublisher


def open_publisher(options: TrainOptions) -> EnginePublisher:
    """Return the publisher that the options choose."""
    return EnginePublisher(options.engines, options.engine_timeout_s, options.on_publish)

"""The report of a training: log lines, and figures to every sink that the options name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from replaybuf_trainer.losses import Row, Tally
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.reading import TensorBatch
from replaybuf_trainer.report.figures import step_figures
from replaybuf_trainer.report.sinks.json_lines import JsonLines
from replaybuf_trainer.report.sinks.sink import Figures, Guard
from replaybuf_trainer.report.stopwatch import Phase, shares

logger = logging.getLogger(__name__)


class Report:
    """What people see of a training, by its first rank. Made -> `open` -> `tally` and `step` for each step -> `close`.

    A sink that fails later than `open` never stops the training.
    """

    def __init__(self, options: TrainOptions, ranks: Ranks) -> None:
        self._options = options
        self._ranks = ranks
        self._sinks: list[Guard[Figures]] = []

    def open(self) -> None:
        """Open all sinks. Raises `Invalid` and `MissingExtra` for a sink that cannot work."""
        self._ranks.first(lambda: self._sinks.extend(_opened(self._options)))

    def tally(self) -> Tally:
        """Return the sums that the next step's loss fills."""
        return Tally()

    def step(
        self, batch: TensorBatch, rows: Sequence[Row], seconds: dict[Phase, float], figures: dict[str, Any]
    ) -> None:
        """Report a step: `seconds` by phase, and other figures of the trainer."""
        figures = step_figures(batch, rows, seconds, self._ranks) | figures
        if not self._ranks.is_first:
            return
        shown = "step=%(step)d reward=%(reward_mean).3f loss=%(loss).4f staleness=%(staleness_max)d took=%(step_s).2fs"
        logger.info(shown % figures + " (%s)", shares(figures["phase_s"]))
        for sink in self._sinks:
            sink.write(figures)

    def close(self) -> None:
        """Close all sinks."""
        while self._sinks:
            self._sinks.pop().close()


def _opened(options: TrainOptions) -> Iterable[Guard[Figures]]:
    if options.metrics_file:
        # In the loop, not in a thread: the line of a step must be on disk before its checkpoint.
        yield Guard(JsonLines(options.metrics_file))

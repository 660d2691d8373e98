"""The report of a training: a progress line or log lines, figures to every sink, and a summary at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from replaybuf_trainer.losses import Tally
from replaybuf_trainer.models.policy import Policy
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.ownership import Confirm
from replaybuf_trainer.parallel.ranks import Ranks
from replaybuf_trainer.reading import TensorBatch
from replaybuf_trainer.report.figures import step_figures
from replaybuf_trainer.report.flops import peak_of
from replaybuf_trainer.report.progress_line import ProgressLine
from replaybuf_trainer.report.session import Session
from replaybuf_trainer.report.sinks.json_lines import JsonLines
from replaybuf_trainer.report.sinks.prometheus import Prometheus
from replaybuf_trainer.report.sinks.sink import Background, Figures, Guard, Waiting
from replaybuf_trainer.report.sinks.tensorboard import TensorBoard
from replaybuf_trainer.report.sinks.weights_and_biases import WeightsAndBiases
from replaybuf_trainer.report.stopwatch import Phase, shares
from replaybuf_trainer.report.tables.folder import RecordedStep, TableFolder
from replaybuf_trainer.report.tables.samples import TokenRecord

logger = logging.getLogger(__name__)

QUEUED_BATCHES = 8
"""Batches in memory that wait for their tables."""


class Report:
    """What people see of a training, by its first rank. Made -> `open` -> `begin` -> `tally`, `step` ... -> `close`.

    A sink that fails later than `open` never stops the training. `confirm` is called before a table is deleted.
    """

    def __init__(self, options: TrainOptions, ranks: Ranks, confirm: Confirm) -> None:
        self._options = options
        self._confirm = confirm
        self._ranks = ranks
        self._sinks: list[Guard[Figures]] = []
        self._session: Session | None = None
        self._tables: Guard[RecordedStep] | None = None
        self._record: TokenRecord | None = None
        self._line: ProgressLine | None = None
        self._waiting: Waiting = lambda: None

    def open(self) -> None:
        """Open all sinks. Raises `Invalid` and `MissingExtra` for a sink that cannot work."""
        self._ranks.first(self._open)

    def begin(self, step: int, steps: int | None, policy: Policy, waiting: Waiting, phase: Callable[[], Phase]) -> None:
        """Start with `step` of `steps`, None = unknown. `waiting` and `phase` return what the trainer does now."""
        self._waiting = waiting
        weight = next(iter(policy.model.parameters()))
        self._cost = policy.cost
        self._device = weight.device
        self._peak = peak_of(weight.device, policy.dtype)
        self._session = Session(step, steps)
        if not self._ranks.is_first:
            return
        logger.info("device=%s peak_flops_per_s=%.3g (%s)", weight.device, *self._peak)
        console = Console(stderr=True)
        if console.is_terminal and not console.is_dumb_terminal:
            self._line = ProgressLine(console, self._session, waiting, phase)

    def tally(self) -> Tally:
        """Return the sums that the loss of the next epoch fills; with tables, also the values of its tokens."""
        self._record = TokenRecord() if self._tables else None
        return self._record or Tally()

    def step(self, batch: TensorBatch, seconds: dict[Phase, float], figures: dict[str, Any]) -> None:
        """Report a step: `seconds` by phase, and other figures of the trainer."""
        if self._session is None:
            raise RuntimeError("begin comes before step")
        figures = (
            step_figures(
                batch, seconds, self._ranks, self._cost, self._peak.flops_per_s, self._device, figures["epochs"]
            )
            | figures
        )
        self._session.add(figures)
        if not self._ranks.is_first:
            return
        level = logging.DEBUG if self._line else logging.INFO
        logger.log(level, "%s (%s)", log_line(figures), shares(seconds))
        for sink in self._sinks:
            sink.write(figures)
        if self._tables and self._record:
            self._tables.write(RecordedStep(batch, self._record))

    def close(self) -> None:
        """End the progress line, close all sinks and log the summary."""
        if self._line:
            self._line.close()
        while self._sinks:
            self._sinks.pop().close()
        if self._tables:
            self._tables.close()
        if self._session and self._ranks.is_first:
            logger.info("summary %s", self._session.summary())

    def _open(self) -> None:
        self._sinks.extend(self._opened())
        if self._options.tables:
            self._tables = Background(TableFolder(self._options, self._confirm), QUEUED_BATCHES)

    def _opened(self) -> Iterator[Guard[Figures]]:
        options = self._options
        if options.metrics_file:
            # In the loop, not in a thread: the line of a step must be on disk before its checkpoint.
            yield Guard(JsonLines(options.metrics_file))
        if options.metrics_address is not None or options.push_metrics is not None:
            metrics = Prometheus(options.source, lambda: self._waiting(), self._lost)
            yield Guard(metrics)  # first: it closes what is open already if the rest fails
            if options.metrics_address is not None:
                metrics.listen(*options.metrics_address)
            if options.push_metrics is not None:
                metrics.push(options.push_metrics, options.push_metrics_every_s)
        if options.tensorboard:
            yield Background(TensorBoard(options.tensorboard))
        if options.wandb is not None:
            yield Background(WeightsAndBiases(options.wandb, options))

    def _lost(self) -> dict[str, int]:
        lost = {sink.name: sink.lost for sink in self._sinks}
        return lost | ({self._tables.name: self._tables.lost} if self._tables else {})


def log_line(figures: Figures) -> str:
    """Format the figures of a step for the log."""
    shown = "step=%(step)d reward=%(reward_mean).3f loss=%(loss).4f staleness=%(staleness_max)d took=%(step_s).2fs"
    memory = f"memory={figures['peak_memory_bytes'] / 2**30:.2f}GiB padding={figures['padding_share']:.1%}"
    return f"{shown % figures} {memory}"

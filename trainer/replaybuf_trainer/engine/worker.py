"""The thread that owns the model: it samples in waves, and pauses or loads weights between two tokens.

Life cycle: `start` -> `submit` and commands from other threads -> `close`. The worker runs commands between two tokens,
so new weights take effect at once, and every token carries the version that sampled it.

Pause modes: `keep` freezes running rows until `resume`, `wait` finishes them first, `abort` ends them as they are.
Requests that arrive during a pause wait in a bounded queue.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import dataclasses
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from replaybuf.errors import NoRoom, ReplaybufError, ServiceUnavailable
from replaybuf_trainer.engine.lora import Lora, read_lora
from replaybuf_trainer.engine.sampler import Row, Wave
from replaybuf_trainer.engine.served_models import ServedModel
from replaybuf_trainer.engine.weight_files import check_finite, read_tensors

logger = logging.getLogger(__name__)

GATHER_S = 0.002
"""Time to wait for more requests: a wave of many rows costs little more than a wave of few."""

LARGEST_QUEUE = 4096
PauseMode = Literal["abort", "wait", "keep"]
Done = concurrent.futures.Future[None]


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Rows of one call; `done` is set when all of them are finished."""

    rows: list[Row]
    done: Done


class Worker(threading.Thread):
    """The sampling thread. Other threads call the public methods.

    `rows_aborted`: rows ended because their caller was gone.
    """

    def __init__(self, model: Any, *, max_rows: int, threads: int) -> None:
        super().__init__(name="engine-worker", daemon=True)
        self.generated_tokens = 0
        self.rows_aborted = 0
        self.paused = False
        self._model = model
        self._max_rows = max_rows
        self._threads = threads
        self._changed = threading.Condition()
        self._queue: deque[Request] = deque()
        self._running: list[Request] = []
        self._commands: deque[tuple[Callable[[Done], None], Done]] = deque()
        self._when_idle: list[Done] = []
        self._frozen = False
        self._aborting = False
        self._closed = False

    @property
    def rows_running(self) -> int:
        """Rows being sampled or in the next wave: an engine with continuous batching would be running both."""
        with self._changed:
            sampled = sum(row.finish_reason is None for request in self._running for row in request.rows)
            return sampled + (0 if self.paused else _rows(self._next_wave()))

    @property
    def rows_waiting(self) -> int:
        """Queued rows that do not fit into the next wave; during a pause all queued rows."""
        with self._changed:
            return _rows(self._queue) - (0 if self.paused else _rows(self._next_wave()))

    def submit(self, rows: list[Row]) -> Done:
        """Queue rows; the future is done when all are finished. Raises `NoRoom` if the queue is full."""
        request = Request(rows, concurrent.futures.Future())
        with self._changed:
            waiting = len(self._queue)
            if waiting >= LARGEST_QUEUE:
                raise NoRoom(
                    f"{waiting} requests are queued; the maximum is {LARGEST_QUEUE}", name="queue", value=waiting
                )
            self._queue.append(request)
            self._changed.notify_all()
        return request.done

    def abort(self, rows: list[Row]) -> Done:
        """End rows whose caller is gone, so that they take no more time; the future is done when they are ended."""

        def command(done: Done) -> None:
            for row in rows:
                if row.finish_reason is None:
                    row.finish_reason = "abort"
                    self.rows_aborted += 1
            with self._changed:
                for request in [request for request in self._queue if request.rows is rows]:
                    self._queue.remove(request)
                    request.done.set_result(None)
            done.set_result(None)

        return self._command(command)

    def pause(self, mode: PauseMode) -> Done:
        """Pause sampling; the future is done when no row is being sampled."""

        def command(done: Done) -> None:
            self.paused, self._frozen, self._aborting = True, mode == "keep", mode == "abort"
            if self._running and not self._frozen:
                self._when_idle.append(done)
            else:
                done.set_result(None)

        return self._command(command)

    def resume(self) -> Done:
        """Continue with frozen and queued rows."""

        def command(done: Done) -> None:
            self.paused = self._frozen = self._aborting = False
            done.set_result(None)

        return self._command(command)

    def reload(self, folder: Path) -> Done:
        """Load the weights of a folder. If they are broken, the future raises `Invalid` and the old weights stay."""

        def command(done: Done) -> None:
            self._model.load_state_dict(checked_weights(self._model, folder), strict=False)
            done.set_result(None)

        return self._command(command)

    def replace(self, weights: dict[str, torch.Tensor]) -> Done:
        """Replace weights by name; they must fit `weight_shapes`. The future raises `Invalid` for NaN and infinity."""

        def command(done: Done) -> None:
            check_finite("of the transfer", weights)
            self._model.load_state_dict(weights, strict=False)
            done.set_result(None)

        return self._command(command)

    def weight_shapes(self) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        """Return the shapes of the model's weights by name, and the names that may be missing."""
        return weight_shapes(self._model)

    def read_lora(self, folder: Path) -> Lora:
        """Read an adapter of the model, in any thread. Raises as `lora.read_lora`."""
        return read_lora(self._model, folder)

    def replace_lora(self, served: ServedModel, lora: Lora, version: int | None) -> Done:
        """Replace the weights of an adapter; None keeps its version."""

        def command(done: Done) -> None:
            served.lora = lora
            served.version = served.version if version is None else version
            done.set_result(None)

        return self._command(command)

    def label(self, served: ServedModel, version: int) -> Done:
        """Set the version of a model's present weights."""

        def command(done: Done) -> None:
            served.version = version
            done.set_result(None)

        return self._command(command)

    def close(self) -> None:
        """End the thread; pending requests fail with `ServiceUnavailable`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _command(self, command: Callable[[Done], None]) -> Done:
        done: Done = concurrent.futures.Future()
        with self._changed:
            self._commands.append((command, done))
            self._changed.notify_all()
        return done

    def run(self) -> None:
        """Sample wave after wave until closed."""
        torch.set_num_threads(self._threads)
        while self._wait_for_requests():
            try:
                self._sample([row for request in self._running for row in request.rows])
            except Exception as error:  # task boundary: the callers get the error, the engine continues
                logger.exception("sampling failed")
                for request in self._running:
                    if not request.done.done():
                        request.done.set_exception(error)
            self._running = []
            for done in self._when_idle:
                done.set_result(None)
            self._when_idle.clear()
        self._reject_all()

    def _wait_for_requests(self) -> bool:
        """Wait for requests and start the next wave; return False when closed."""
        while not self._closed:
            self._run_commands()
            with self._changed:
                if self._queue and not self.paused:
                    self._changed.wait(GATHER_S)
                    break
                if not self._commands and not self._closed:
                    self._changed.wait()
        with self._changed:
            for request in self._next_wave():
                self._queue.popleft()
                self._running.append(request)
        return not self._closed

    def _next_wave(self) -> list[Request]:
        """Return the first queued requests that fit into one wave, at least one request."""
        rows = list(itertools.accumulate(len(request.rows) for request in self._queue))
        fitting = max(1, bisect.bisect_right(rows, self._max_rows))
        return list(itertools.islice(self._queue, fitting))

    def _sample(self, rows: list[Row]) -> None:
        if not rows:
            return
        wave = Wave(self._model, rows)
        while not wave.done and not self._closed:
            self._run_commands()
            wave.drop_finished()
            self._complete_requests()
            if self._frozen:
                with self._changed:
                    if not self._commands and not self._closed:
                        self._changed.wait()
                continue
            if self._aborting:
                for row in wave.active:
                    row.finish_reason = "abort"
                break
            if wave.done:
                break
            self.generated_tokens += len(wave.active)
            wave.step()
            self._complete_requests()
        self._complete_requests()

    def _complete_requests(self) -> None:
        for request in self._running:
            if not request.done.done() and all(row.finish_reason for row in request.rows):
                request.done.set_result(None)

    def _run_commands(self) -> None:
        while self._commands:
            command, done = self._commands.popleft()
            try:
                command(done)
            except (ReplaybufError, RuntimeError) as error:  # the caller of the command gets the error
                done.set_exception(error)

    def _reject_all(self) -> None:
        self._run_commands()
        for request in [*self._running, *self._queue]:
            if not request.done.done():
                request.done.set_exception(ServiceUnavailable("the engine is stopping", name="engine"))


def _rows(requests: Iterable[Request]) -> int:
    return sum(len(request.rows) for request in requests)


def checked_weights(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a model folder. Raises `Invalid` if names, shapes or values do not fit `model`."""
    return read_tensors(folder / "model.safetensors", *weight_shapes(model))


def weight_shapes(model: Any) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return the shapes of a model's weights by name, and the names of tied weights, which may be missing."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return shapes, {"lm_head.weight"} if model.config.tie_word_embeddings else set()

"""The one thread that touches the model: waves of sampling, pauses, changes of weights between two tokens.

Life: `start` -> `submit` and commands from other threads -> `close`. Between two tokens the worker carries out what was
asked meanwhile, so new weights take effect at once and every token is labelled with the version that sampled it.

Pauses: `keep` freezes running rows until `resume`, `wait` finishes them first, `abort` ends them as they are. Requests
that come while the engine is paused wait in a bounded queue.
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
from safetensors import SafetensorError
from safetensors.torch import load_file

from replaybuf.errors import Invalid, NoRoom, ReplaybufError, ServiceUnavailable
from replaybuf_trainer.engine.sampler import Row, Wave

logger = logging.getLogger(__name__)

GATHER_S = 0.002
"""Wait for requests that are about to arrive: one wave of many rows costs little more than one of few."""

LARGEST_QUEUE = 4096
PauseMode = Literal["abort", "wait", "keep"]
Done = concurrent.futures.Future[None]


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Rows that are answered together; `done` is set when all are finished."""

    rows: list[Row]
    done: Done


class Worker(threading.Thread):
    """Owner of the model; see the module docstring. `version` labels the present weights."""

    def __init__(self, model: Any, *, max_rows: int, threads: int) -> None:
        super().__init__(name="engine-worker", daemon=True)
        self.version = 0
        self.generated_tokens = 0
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

    # ------------------------------------------------------------------ called from other threads

    @property
    def rows_running(self) -> int:
        """Rows being sampled, and those that the next wave takes: a continuously batching engine has them running."""
        with self._changed:
            sampled = sum(row.finish_reason is None for request in self._running for row in request.rows)
            return sampled + (0 if self.paused else _rows(self._next_wave()))

    @property
    def rows_waiting(self) -> int:
        """Rows in the queue for which the next wave has no room; all of the queue during a pause."""
        with self._changed:
            return _rows(self._queue) - (0 if self.paused else _rows(self._next_wave()))

    def submit(self, rows: list[Row]) -> Done:
        """Queue rows; the future is done when all are finished. Raises `NoRoom` where the queue is full."""
        request = Request(rows, concurrent.futures.Future())
        with self._changed:
            waiting = len(self._queue)
            if waiting >= LARGEST_QUEUE:
                raise NoRoom(f"{waiting} requests wait; at most {LARGEST_QUEUE}", name="queue", value=waiting)
            self._queue.append(request)
            self._changed.notify_all()
        return request.done

    def pause(self, mode: PauseMode) -> Done:
        """Hold rows back; the future is done when nothing is being sampled any more."""

        def command(done: Done) -> None:
            self.paused, self._frozen, self._aborting = True, mode == "keep", mode == "abort"
            if self._running and not self._frozen:
                self._when_idle.append(done)
            else:
                done.set_result(None)

        return self._command(command)

    def resume(self) -> Done:
        """Go on with frozen and waiting rows."""

        def command(done: Done) -> None:
            self.paused = self._frozen = self._aborting = False
            done.set_result(None)

        return self._command(command)

    def reload(self, folder: Path) -> Done:
        """Swap in the weights of a folder. The future raises `Invalid` where they are broken; the old ones stay."""

        def command(done: Done) -> None:
            self._model.load_state_dict(checked_weights(self._model, folder), strict=False)
            done.set_result(None)

        return self._command(command)

    def label(self, version: int) -> Done:
        """Name the present weights."""

        def command(done: Done) -> None:
            self.version = version
            done.set_result(None)

        return self._command(command)

    def close(self) -> None:
        """End the thread; whoever waits is told."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _command(self, command: Callable[[Done], None]) -> Done:
        done: Done = concurrent.futures.Future()
        with self._changed:
            self._commands.append((command, done))
            self._changed.notify_all()
        return done

    # ------------------------------------------------------------------ the worker thread

    def run(self) -> None:
        """Sample wave after wave until closed."""
        torch.set_num_threads(self._threads)
        while self._wait_for_requests():
            try:
                self._sample([row for request in self._running for row in request.rows])
            except Exception as error:  # the boundary of this task: its callers get it, the engine goes on
                logger.exception("sampling failed")
                for request in self._running:
                    if not request.done.done():
                        request.done.set_exception(error)
            self._running = []
            for done in self._when_idle:
                done.set_result(None)
            self._when_idle.clear()
        self._refuse_all()

    def _wait_for_requests(self) -> bool:
        """Take the requests of the next wave; False when closed."""
        while not self._closed:
            self._obey()
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
        """List the requests at the head of the queue that fit into one wave; the first one always does."""
        rows = list(itertools.accumulate(len(request.rows) for request in self._queue))
        fitting = max(1, bisect.bisect_right(rows, self._max_rows))
        return list(itertools.islice(self._queue, fitting))

    def _sample(self, rows: list[Row]) -> None:
        if not rows:
            return
        wave = Wave(self._model, rows)
        while not wave.done and not self._closed:
            self._obey()
            if self._frozen:
                with self._changed:
                    if not self._commands and not self._closed:
                        self._changed.wait()
                continue
            if self._aborting:
                for row in wave.active:
                    row.finish_reason = "abort"
                break
            self.generated_tokens += len(wave.active)
            wave.step(self.version)
            self._answer()
        self._answer()

    def _answer(self) -> None:
        for request in self._running:
            if not request.done.done() and all(row.finish_reason for row in request.rows):
                request.done.set_result(None)

    def _obey(self) -> None:
        while self._commands:
            command, done = self._commands.popleft()
            try:
                command(done)
            except (ReplaybufError, RuntimeError) as error:  # who gave the command gets the error
                done.set_exception(error)

    def _refuse_all(self) -> None:
        self._obey()
        for request in [*self._running, *self._queue]:
            if not request.done.done():
                request.done.set_exception(ServiceUnavailable("the engine is stopping", name="engine"))


def _rows(requests: Iterable[Request]) -> int:
    return sum(len(request.rows) for request in requests)


def checked_weights(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a model folder and check names, shapes and values against `model`. Raises `Invalid`."""
    path = folder / "model.safetensors"
    try:
        weights: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise Invalid(f"weights {path} cannot be read: {error}", name="weights_path", value=str(folder)) from error
    expected = model.state_dict()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    missing, unknown = expected.keys() - weights.keys() - tied, weights.keys() - expected.keys()
    if missing or unknown:
        raise Invalid(
            f"weights {path} do not fit the model: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}",
            name="weights_path",
            value=str(folder),
        )
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)}, the model has {tuple(expected[name].shape)}"
            raise Invalid(f"weights {path}: {name} has shape {shapes}", name=name, value=list(tensor.shape))
        if not bool(torch.isfinite(tensor).all()):
            raise Invalid(f"weights {path}: {name} holds NaN or infinity", name=name)
    return weights

"""Seconds per step of TRL on a run, beside TRL's own queue with the same rollouts, in alternating trainings.

    PYTHONPATH=. .venv-adapters/trl/bin/python adapters/trl/tests/step_time.py --pairs 5

TRL's own worker needs vLLM. So its queue is measured alone: a child process sends the rollouts through the
`multiprocessing.Queue` of `AsyncRolloutWorker`, generated beforehand. Both write the weights to a folder in each step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from training import Recorded, fill, make_trainer
from transformers import PrinterCallback, TrainerCallback
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from replaybuf.wire.batch import read_batch
from replaybuf_trainer.models.tiny import character_tokenizer, new_model
from replaybuf_trl import allow_cpu
from replaybuf_trl.samples import samples_of
from replaybuf_trl.transfer import SentWeights, beside_weights
from tests.conftest import RunClient, ServeProcess

GROUPS, SIZE, STEPS, WARM_UP = 8, 4, 52, 2
ARGUMENTS = {
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "save_strategy": "no",
    "logging_strategy": "no",
}
CONFIG = {
    "batch": {"groups_per_batch": GROUPS, "tokens_per_batch": None, "seq_len": 128},
    "group_size": SIZE,
    "max_steps": STEPS + 1,  # TRL fetches one micro-batch behind its last step
    "strategy": {"name": "one-step-off-policy", "options": {"max_staleness": STEPS + 1}},
}


class OwnQueue:
    """TRL's own queue, filled by a child process."""

    def __init__(self, samples: list[RolloutSample]) -> None:
        context = multiprocessing.get_context("fork")
        self.rollout_buffer = context.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._child = context.Process(target=self._send, args=(samples,), daemon=True)

    def _send(self, samples: list[RolloutSample]) -> None:
        for sample in samples:
            self.rollout_buffer.put(sample)

    def start(self) -> None:
        self._child.start()

    def stop(self) -> None:
        self._child.kill()
        self._child.join()

    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...


class Folder:
    """A weight transfer that writes a folder and tells nobody."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._beside, self._folder = beside_weights(str(model)), folder

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...
    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        SentWeights(self._beside, {name: tensor.detach() for name, tensor in iterator}).save_weights(self._folder)


class Clock(TrainerCallback):
    """Records the end of each step, with its publication."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends_s.append(time.perf_counter())


def step_s(trainer: Recorded) -> list[float]:
    """Train; return the seconds of each step behind the first ones."""
    clock = Clock()
    trainer.add_callback(clock)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [end - start for start, end in pairwise(clock.ends_s[WARM_UP - 1 :])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    allow_cpu()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        new_model(0).save_pretrained(folder / "model")
        character_tokenizer().save_pretrained(folder / "model")
        service = ServeProcess(folder / "data").start()
        try:
            figures = measure(service.url, folder, pairs)
        finally:
            service.end()
    for name, trainings in figures.items():
        medians = [statistics.median(steps) for steps in trainings]
        print(f"{name:10} median {statistics.median(medians):.3f} s per step, {min(medians):.3f} to {max(medians):.3f}")
    ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(*figures.values(), strict=True)]
    print(f"ratio      median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}, {pairs} pairs")


def measure(url: str, folder: Path, pairs: int) -> dict[str, list[list[float]]]:
    """Train pair by pair, in turns."""
    figures: dict[str, list[list[float]]] = {"replaybuf": [], "own queue": []}
    for pair in range(pairs):
        run = RunClient(url, f"run-{pair}")
        fill(run, groups=GROUPS, size=SIZE, steps=STEPS + 1, **CONFIG)
        out = folder / f"out-{pair}"
        samples = received(run)
        for name in sorted(figures, reverse=pair % 2 == 1):
            own: dict[str, Any] = {}
            if name == "own queue":
                transfer = Folder(folder / "model", out / "own")
                own = {"callback": False, "worker": OwnQueue(samples), "weight_transfer": transfer}
            trainer = make_trainer(run, folder / "model", out, max_staleness=99, **own, **ARGUMENTS)
            figures[name].append(step_s(trainer))
        run.http.close()
    return figures


def received(run: RunClient) -> list[RolloutSample]:
    """The rollouts of all steps, as the worker makes them."""
    epoch = run.attach()
    samples = []
    for step in range(STEPS + 1):
        samples += samples_of(read_batch(run.batch(step, epoch).content))
        run.ack(step, epoch)
        run.publish(step + 1, epoch)
    return samples


if __name__ == "__main__":
    main()

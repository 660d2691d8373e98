"""prime-rl's trainer without a GPU: its own data loader, its folders and the order of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.ticket_producer import Rows
from tests.waiting import patience

RANKS = 2
TIMEOUT_S = 90.0


def eventually(condition: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
    """Wait for a condition of another process, which tells nobody."""
    ends_s = time.monotonic() + TIMEOUT_S * patience()
    while not condition():
        meanwhile()
        assert time.monotonic() < ends_s
        time.sleep(0.01)


class PrimeTrainer:
    """Trains on CPU. `model`: tokens that trained it, by step."""

    def __init__(self, prime_data: Any, output_dir: Path, steps_done: int = 0, model: list[Rows] | None = None) -> None:
        self._output_dir, self._done, self.model = output_dir, steps_done, list(model or [])
        self._loaders = []
        for rank in range(RANKS):
            world = SimpleNamespace(world_size=RANKS, rank=rank)
            prime_data.get_world = lambda world=world: world
            transport = SimpleNamespace(type="filesystem")
            self._loaders.append(prime_data.DataLoader(output_dir, steps_done + 1, RANKS, transport))
        self._broadcast()

    def batch(self, meanwhile: Callable[[], None]) -> list[list[Any]]:
        """Wait for the next batch; return the micro-batches of each rank, as prime-rl's tensors."""
        for loader in self._loaders:
            eventually(loader.receiver.can_receive, meanwhile)
            loader.wait_for_batch()
        return [loader.get_batch() for loader in self._loaders]

    def train(self, meanwhile: Callable[[], None], steps: int = 1) -> None:
        for _ in range(steps):
            ranks = self.batch(meanwhile)
            assert len({len(rank) for rank in ranks}) == 1  # FSDP needs as many on every rank
            self.model.append(sorted(row for rank in ranks for micro in rank for row in sequences(micro)))
            self._done += 1
            self._broadcast()

    def checkpoint(self) -> tuple[int, list[Rows]]:
        """Write a checkpoint; return what a trainer that resumes from it is made with."""
        folder = self._output_dir / "checkpoints" / f"step_{self._done}" / "trainer"
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
        return self._done, list(self.model)

    def _broadcast(self) -> None:
        folder = self._output_dir / "broadcasts" / f"step_{self._done}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "STABLE").touch()


def sequences(micro: Any) -> Rows:
    """Return the tokens of each sequence of a micro-batch that has a loss."""
    rows, start = [], 0
    for length in micro["sequence_lengths"]:
        if micro["loss_mask"][0, start : start + length].any():
            rows.append(tuple(micro["input_ids"][0, start : start + length].tolist()))
        start += length
    return rows

"""The folder that prime-rl's trainer and this process share.

::

    rollouts/step_N/rank_R.bin         written here; N counts from 1: step N - 1 of the run
    broadcasts/step_N/STABLE           touched by the trainer: it has policy N, so N steps are trained
    checkpoints/step_N/trainer/.metadata   written last by the trainer: it can resume with N steps done
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

STEP = re.compile(r"step_(\d+)")


class Folders:
    """What the trainer has done, and what it is given."""

    def __init__(self, output_dir: Path) -> None:
        self.rollouts = output_dir / "rollouts"
        self.broadcasts = output_dir / "broadcasts"
        self.checkpoints = output_dir / "checkpoints"

    def steps_done(self) -> int | None:
        """Return the steps that the trainer has done, None before its first broadcast.

        It broadcasts its weights when it starts and after each step, so the newest marker is its present step. After a
        resume from an older checkpoint that is not the highest one.
        """
        touched = []
        for step, folder in _steps(self.broadcasts):
            try:
                touched.append(((folder / "STABLE").stat().st_mtime_ns, step))
            except FileNotFoundError:
                continue  # not complete, or the trainer removes old ones right now
        return max(touched)[1] if touched else None

    def saved_steps(self) -> list[int]:
        """Return the steps done in each complete checkpoint, in order."""
        return sorted(step for step, folder in _steps(self.checkpoints) if (folder / "trainer" / ".metadata").exists())

    def weights(self, steps_done: int) -> Path:
        """Return the folder of the weights after so many steps."""
        return self.broadcasts / f"step_{steps_done}"

    def write(self, step: int, ranks: list[bytes], confirm: Callable[[], object]) -> None:
        """Write the files of a step of the run, durable and whole, the last rank last.

        `confirm` is called before files get their names, which another process may have written; it raises `Fenced`.
        """
        folder = self.rollouts / f"step_{step + 1}"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as scratch:
            files = [Path(scratch, f"rank_{rank}.bin") for rank in range(len(ranks))]
            for path, content in zip(files, ranks, strict=True):
                with path.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            confirm()
            for path in files:
                path.rename(folder / path.name)

    def has_rank(self, rank: int) -> bool:
        """Return whether there is a file of a rank from `rank` on: of a trainer with more ranks."""
        names = [path.stem for _, folder in _steps(self.rollouts) for path in folder.glob("rank_*.bin")]
        return any(int(name.removeprefix("rank_")) >= rank for name in names)

    def remove_before(self, step: int) -> None:
        """Remove the files of steps that are trained: a trainer that resumes must wait for them."""
        for number, folder in _steps(self.rollouts):
            if number <= step:
                shutil.rmtree(folder, ignore_errors=True)

    def remove_all(self) -> None:
        """Remove the files of all steps."""
        for _, folder in _steps(self.rollouts):
            shutil.rmtree(folder, ignore_errors=True)


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    if folder.is_dir():
        for path in list(folder.iterdir()):
            if match := STEP.fullmatch(path.name):
                yield int(match[1]), path

"""Plays of a taskset over a double of their process; `make test-verifiers` has the same on verifiers itself."""

from __future__ import annotations

from pathlib import Path

from tests.generator.tasksets.play_contract import HANGS, TIMEOUT_S, PlayContract, Table, table
from tests.generator.tasksets.test_tasksets import python
from tests.waiting import eventually

__all__ = ["python", "table"]


class TestDouble(PlayContract):
    """The double."""

    bound_s = 3.0

    def test_a_play_that_nobody_waits_for_is_cancelled(self, table: Table, tmp_path: Path) -> None:
        """Not only what waits for it."""
        cancelled = tmp_path / "cancelled"
        table.played("so<|im_end|>")
        assert (
            table.fault(HANGS.replace("3}", f'"{cancelled}"}}'), timeout_s=self.bound_s).reason == "environment_timeout"
        )
        eventually(cancelled.exists, TIMEOUT_S)

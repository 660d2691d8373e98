"""Plays on a double of their process; `test_plays.py` runs the same contract on verifiers."""

from __future__ import annotations

from pathlib import Path

from play_contract import HANGS, TIMEOUT_S, PlayContract, Table, table
from test_double import python

from tests.waiting import eventually

__all__ = ["python", "table"]


class TestDouble(PlayContract):
    """The double."""

    bound_s = 3.0

    def test_a_play_is_cancelled_when_its_rollout_times_out(self, table: Table, tmp_path: Path) -> None:
        """The play itself is cancelled, not only the waiting rollout."""
        cancelled = tmp_path / "cancelled"
        table.played("so<|im_end|>")
        assert (
            table.fault(HANGS.replace("3}", f'"{cancelled}"}}'), timeout_s=self.bound_s).reason == "environment_timeout"
        )
        eventually(cancelled.exists, TIMEOUT_S)

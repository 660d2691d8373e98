"""Short texts of `replaybuf top`."""

from __future__ import annotations

from replaybuf.cli.top.texts import sparkline


def test_a_sparkline_spans_lowest_to_highest() -> None:
    assert sparkline([0.0, 1.0], 12) == "▁█"
    assert sparkline([3.0, 3.0, 3.0], 12) == "▁▁▁"
    assert sparkline([], 12) == ""
    assert len(sparkline([float(i) for i in range(1000)], 12)) == 12

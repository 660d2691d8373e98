"""Time by phase."""

from __future__ import annotations

from replaybuf_trainer.report.stopwatch import Phase, Stopwatch, shares


def test_phases_add_up_to_the_whole_time() -> None:
    """A phase that comes again is added; a taken phase goes on from 0."""
    now = [0.0]
    watch = Stopwatch(lambda: now[0])
    entered: list[tuple[float, Phase]] = [(1.0, "forward"), (3.0, "backward"), (4.0, "forward"), (6.0, "backward")]
    for now[0], phase in entered:
        watch.enter(phase)
    now[0] = 8.0
    assert watch.take() == {"wait": 1.0, "forward": 4.0, "backward": 3.0}
    now[0] = 10.5
    assert watch.take() == {"backward": 2.5}


def test_shares_show_the_largest_first_and_nothing_below_one_percent() -> None:
    assert shares({"wait": 1.0, "backward": 2.99, "ack": 0.01}) == "backward 75 %, wait 25 %"
    assert shares({}) == ""

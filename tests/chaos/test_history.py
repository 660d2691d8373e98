"""Events survive what kills their writer, and come back in the order in which they happened."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.history import Drained, Faulted, Recorder, now_s, read_history


def test_events_of_several_processes_are_merged_by_time(tmp_path: Path) -> None:
    """Every process has a file of its own."""
    early, late = Drained(at_s=now_s(), run="r", drained=True), Drained(at_s=now_s(), run="r", drained=False)
    for name, event in (("b", late), ("a", early)):
        recorder = Recorder(tmp_path, name)
        recorder.write(event)
        recorder.close()
    assert read_history(tmp_path) == [early, late]


def test_the_line_that_a_kill_cut_is_left_out(tmp_path: Path) -> None:
    """The lines before it are kept."""
    recorder = Recorder(tmp_path, "a")
    event = Faulted(at_s=1.0, process="p", role="trainer", kind="kill")
    recorder.write(event)
    recorder.close()
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes() + path.read_bytes()[:-5])
    assert read_history(tmp_path) == [event]

"""The report: names and figures in report.json, the picture, and a page that needs no network."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from replaybuf.errors import NotFound
from replaybuf.lab.demo.findings import findings
from replaybuf.lab.demo.picture import draw, rolling
from replaybuf.lab.demo.report import KILLED, Report, Session, append_line, build_report, figure_rows, read_sessions
from replaybuf.lab.demo.summary import introduce, print_report
from replaybuf.launch.progress import Evaluation, LineReader, Progress


def test_report_json_has_the_names_others_read(report: Report) -> None:
    """The literal shape of `report.json`."""
    document = msgspec.json.decode(msgspec.json.encode(report))
    assert (document["seed"], document["steps"], document["wall_s"]) == (7, 10, 25.0)
    assert document["accuracy"] == {
        "sampled": {"before": 0.25, "after": 0.625},
        "greedy": {"before": 0.8, "after": 0.85},
    }
    assert sorted(document) == [
        "accuracy",
        "changes",
        "cores",
        "cpu_s",
        "curve",
        "evaluations",
        "generator_waiting",
        "groups",
        "hyperparameters",
        "killed",
        "peak_memory_bytes",
        "phases",
        "seed",
        "sessions",
        "staleness",
        "staleness_shares",
        "steps",
        "trained_tokens",
        "versions",
        "waiting",
        "wall_s",
    ]
    assert sorted(document["curve"]) == ["publish_s", "reward", "staleness_mean", "step", "train_s", "wait_s"]
    assert {len(column) for column in document["curve"].values()} == {10}


def test_figures_are_those_that_were_measured(report: Report) -> None:
    """Times are sums over the sessions, memory is a maximum, the rest are means over the steps."""
    assert report.phases == {"warm start": 15.0, "training": 10.0}
    assert report.peak_memory_bytes == {"serve": 90_000_000, "train": 500_000_000}
    assert report.cpu_s == {"serve": 5.0, "train": 8.5}
    assert report.staleness.mean == pytest.approx(0.45)
    assert report.staleness.max == 1
    assert report.waiting.share == pytest.approx(0.25)
    assert report.waiting.by_reason == pytest.approx({"too_few_groups": 0.2, "fetching": 0.05})
    assert (report.groups.stored, report.groups.used, report.groups.live) == (350, 320, 20)
    assert report.groups.dropped == {"too_stale": 10}
    assert report.trained_tokens == 40_000
    assert report.staleness_shares == pytest.approx({"0": 0.1, "1": 0.9})
    assert (report.generator_waiting.reports, report.generator_waiting.by_reason) == (10, {"rate_limited": 0.5})


def test_the_number_of_steps_comes_from_the_service_if_a_line_is_lost(
    progress: Progress, sessions: list[Session]
) -> None:
    """A trainer that is killed after the ack leaves no line for its step."""
    del progress.steps[4]
    report = build_report(progress, sessions, {})
    assert (report.steps, len(report.curve.step)) == (10, 9)


def test_appended_lines_are_read_back(tmp_path: Path) -> None:
    lines = [
        Evaluation(step=step, problems=200, samples=4, sampled=0.5, greedy=greedy)
        for step, greedy in ((0, 0.9), (5, None))
    ]
    for line in lines:
        append_line(tmp_path / "evaluations.jsonl", line)
    assert LineReader(tmp_path / "evaluations.jsonl", Evaluation).new_lines() == lines


def test_a_demo_without_measured_accuracy_has_no_report(progress: Progress, sessions: list[Session]) -> None:
    progress.evaluations.pop()
    with pytest.raises(NotFound, match="not measured"):
        build_report(progress, sessions, {})


def test_the_printed_report_has_result_figures_findings_and_paths(report: Report) -> None:
    console = Console(width=500, record=True, file=io.StringIO())
    print_report(console, report, ["out/report.html"])
    text = console.export_text()
    assert "sampled accuracy 25.0% → 62.5% (+37.5 ± 3.4), greedy accuracy 80.0% → 85.0% (+5.0 ± 1.5), 10 steps" in text
    assert re.search(r"sampled, T = 1 +25\.0 ± 3\.0% +40\.0 ± 3\.0% +62\.5 ± 3\.0%", text)
    assert re.search(r"greedy +80\.0 ± 2\.5% +- +85\.0 ± 2\.5%", text)
    assert re.search(r"abc> +cba +cb\s✗ +cba\s✓ +cba\s✓, <b>\s✗", text)
    assert "350 stored, 320 used, 10 dropped (too_stale 10), 20 left" in text
    assert "serve 90 MB, train 500 MB" in text
    assert "serve 5 s, train 8 s" in text
    assert "out/report.html" in text
    assert all(sentence in text for sentence in findings(report))


def test_a_killed_session_counts_with_its_last_line(
    progress: Progress, sessions: list[Session], tmp_path: Path
) -> None:
    killed = [
        Session(started=1.0, phases={"training": seconds}, peaks={}, cpu_s={"serve": seconds}, outcome=KILLED)
        for seconds in (1.0, 3.0)
    ]
    for session in (*killed, sessions[1]):
        append_line(tmp_path / "sessions.jsonl", session)
    report = build_report(progress, read_sessions(tmp_path / "sessions.jsonl"), {})
    assert (report.sessions, report.killed, report.phases, report.cpu_s["serve"]) == (2, 1, {"training": 9.0}, 6.0)
    assert ("starts", "2, 1 killed: up to 5 s of each are not counted") in figure_rows(report)


def test_the_picture_is_a_png_of_the_promised_size(report: Report, tmp_path: Path) -> None:
    """1800 x 750 pixels, read from the file's own header."""
    path = tmp_path / "report.png"
    draw(report, path)
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")) == (1800, 750)


def test_the_picture_of_a_single_step_can_be_drawn(report: Report, tmp_path: Path) -> None:
    curve = type(report.curve)(*(column[:1] for column in msgspec.structs.astuple(report.curve)))
    draw(msgspec.structs.replace(report, steps=1, curve=curve), tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_the_page_begins_with_what_was_measured(report: Report) -> None:
    begin = introduce(report)
    sections = "".join(begin.sections)
    assert begin.headline.startswith("sampled accuracy 25.0% → 62.5%")
    assert "supervised warm start" in sections
    assert "strategy one-step-off-policy, max_staleness 1" in sections and "learning_rate 0.0001" in sections
    assert "&lt;b&gt;" in sections and "<b>" not in sections, "what a model wrote is text"


def test_smoothing_keeps_the_length_and_a_constant() -> None:
    assert rolling([2.0] * 7, window=3) == pytest.approx([2.0] * 7)
    assert np.allclose(rolling([0.0, 3.0, 0.0], window=3), [1.5, 1.0, 1.5])
    assert len(rolling([])) == 0

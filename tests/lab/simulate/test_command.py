"""The command line of studies: table, files, refusals."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from replaybuf.cli.main import main
from replaybuf.lab.simulate import command
from replaybuf.lab.simulate.report import Study

SMALL = ["--slots", "8", "--length-mean", "50", "--train-s", "5", "--publish-s", "1", "--steps", "20"]


@pytest.fixture
def run_config(tmp_path: Path) -> Path:
    """A run configuration as PUT takes it."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"group_size": 4, "batch": {"tokens_per_batch": None, "groups_per_batch": 4}}))
    return path


def test_several_strategies_are_shown_side_by_side(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column each, and the same figures with a picture in the folder of the report."""
    monkeypatch.setenv("COLUMNS", "160")
    folder = tmp_path / "report"
    strategies = ["--strategy", "on-policy", "--strategy", "one-step-off-policy:max_staleness=3"]
    main(["simulate", *strategies, "--config-run", str(run_config), "--report-dir", str(folder), *SMALL])
    shown = capsys.readouterr().out
    assert "on-policy" in shown and "max_staleness=3" in shown, "options that are not as by default"
    for row in ("trainer waits", "staleness mean", "producers idle", "wasted", "length bias"):
        assert row in shown
    study = msgspec.json.decode((folder / "report.json").read_bytes(), type=Study)
    assert [(run.strategy, run.options, run.steps) for run in study.runs] == [
        ("on-policy", {}, 20),
        ("one-step-off-policy", {"max_staleness": 3}, 20),
    ]
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_the_content_of_the_report(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["simulate", "--json", "--config-run", str(run_config), "--report-dir", str(tmp_path), *SMALL])
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "report.json").read_bytes())


def test_the_progress_bar_counts_the_steps_of_all_strategies(
    run_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def bar(_: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: seen.append((done, total))

    monkeypatch.setattr(command, "work_bar", bar)
    main(["simulate", "--strategy", "on-policy", "--strategy", "replay", "--config-run", str(run_config), *SMALL])
    assert capsys.readouterr().out and seen == [(step, 40) for step in range(1, 41)]


def test_without_matplotlib_there_is_a_report_and_the_name_of_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is written all the same."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    main(["simulate", "--report-dir", str(tmp_path), *SMALL])
    assert "replaybuf[demo]" in capsys.readouterr().out
    assert (tmp_path / "report.json").is_file() and not (tmp_path / "report.png").exists()


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--strategy", "nobody"], "strategy is 'nobody'; installed: "),
        (["--option", "max_staleness=-1"], "max_staleness"),
        (["--strategy", "on-policy:colour=red"], "options of strategy 'on-policy'"),
        (["--option", "max_staleness"], "option is 'max_staleness'; it must be KEY=VALUE"),
        (["--steps", "0"], "steps is 0; it must be in 1.."),
        (["--seed", "-1"], "seed is -1; it must be in 0.."),
        (["--slots", "-3"], "slots is -3; needed: int >= 1"),
        (["--token-s", "-0.1"], "token_s is -0.1; needed: float >= 0"),
        (["--from", "http://127.0.0.1:1"], "needs --run"),
        (["--from", "/no/such/file"], "recording /no/such/file cannot be read"),
        (["--config-run", "/no/such/file"], "run configuration /no/such/file cannot be read"),
    ],
)
def test_wrong_input_ends_with_a_message_that_names_it(
    arguments: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, one line, before anything is simulated."""
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    assert ended.value.code == 1
    assert reported in capsys.readouterr().err

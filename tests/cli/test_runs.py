"""The commands that list, show and change runs, and that look at groups and ledger."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from replaybuf.cli.main import main
from replaybuf.cli.service import printable
from tests.conftest import RunClient, ServeProcess, group
from tests.service.test_evaluations import post, result


class Terminal:
    """The command line in this process, for one service."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> str:
        """Run a command that succeeds; return what it prints."""
        main([*map(str, arguments)])
        return self._capsys.readouterr().out

    def json(self, *arguments: object) -> Any:
        """Run a command with --json."""
        return json.loads(self(*arguments, "--json"))

    def refused(self, *arguments: object) -> str:
        """Run a command that fails with exit code 1; return its message."""
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        assert ended.value.code == 1
        return self._capsys.readouterr().err


@pytest.fixture
def terminal(service: ServeProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Find the service by its environment variable."""
    monkeypatch.setenv("REPLAYBUF_URL", service.url)
    monkeypatch.setenv("COLUMNS", "200")
    return Terminal(capsys)


@pytest.mark.parametrize(
    ("name", "text"),
    [("c.json", '{"batch": {"groups_per_batch": 3}}'), ("c.toml", "[batch]\ngroups_per_batch = 3\n")],
)
def test_a_run_is_created_from_a_file_changed_and_deleted(
    terminal: Terminal, run: RunClient, tmp_path: Path, name: str, text: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert f"{run.run} is running" in terminal("runs", "create", run.run, "--from", file)
    assert run.state()["config"]["batch"]["groups_per_batch"] == 3
    changed = terminal("runs", "set", run.run, "batch.groups_per_batch=4", "strategy.name=on-policy")
    assert re.search(r"batch\.groups_per_batch +3 +4", changed)
    assert re.search(r'strategy\.name +"one-step-off-policy" +"on-policy"', changed)
    assert "is paused" in terminal("runs", "pause", run.run)
    assert run.state()["paused_reason"] == "operator"
    assert terminal.json("runs", "resume", run.run)["state"] == "running"
    assert "only a finished run can be deleted" in terminal.refused("runs", "delete", run.run, "--yes")
    assert "is finished" in terminal("runs", "finish", run.run)
    assert terminal.json("runs", "delete", run.run, "--yes") == {"run": run.run, "deleted": True}
    assert run.run not in [known["run"] for known in terminal.json("runs", "list")]


def test_a_run_is_not_deleted_unless_its_name_is_typed(
    terminal: Terminal, run: RunClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.put(batch={"groups_per_batch": 1})
    terminal("runs", "finish", run.run)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "give --yes" in terminal.refused("runs", "delete", run.run)
    typed = io.StringIO("another\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    assert "stays" in terminal.refused("runs", "delete", run.run)
    assert run.state()["state"] == "finished"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs", "set", "{run}", "batch.groups"], "'batch.groups' has no value to set; write KEY=VALUE"),
        (["runs", "set", "{run}", "batch=1", "batch.tail=drop"], "changes a part of a value"),
        (["runs", "set", "{run}", "batch.foo=1"], "unknown field `foo`"),
        (["runs", "set", "{run}", "tickets.ttl_s=9"], "tickets is fixed when the run is created"),
        (["runs", "create", "other", "--from", "nowhere.json"], "nowhere.json cannot be read"),
        (["runs", "show", "nobody"], "create it with `replaybuf runs create nobody --from FILE`"),
        (["status", "nobody"], "runs here: run-"),
        (["ledger", "nobody"], "create it with `replaybuf runs create nobody --from FILE`"),
        (["groups", "show", "{run}", "nothing"], "nothing"),
    ],
)
def test_a_command_that_cannot_be_carried_out_says_why(
    terminal: Terminal, run: RunClient, arguments: list[str], message: str
) -> None:
    run.put(batch={"groups_per_batch": 1})
    assert message in terminal.refused(*(word.format(run=run.run) for word in arguments))


def test_results_on_held_out_prompts_are_listed_newest_first(terminal: Terminal, run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 1})
    run.reach_version(1)
    for version, error in ((0, None), (1, 0.125)):
        assert post(run, result(version, standard_error=error, failed=1)).status_code == 200
    lines = [line.split() for line in terminal("evals", run.run).splitlines() if "held-out" in line]
    assert lines == [["held-out", "1", "0.500", "0.125", "4", "1"], ["held-out", "0", "0.500", "-", "4", "1"]]
    assert [evaluation["version"] for evaluation in terminal.json("evals", run.run)] == [1, 0]


def test_a_held_out_set_has_the_same_name_in_list_status_and_report(
    terminal: Terminal, run: RunClient, tmp_path: Path
) -> None:
    """The name of the adapter follows a comma."""
    adapters = {"math": {"groups_per_batch": 1}}
    assert run.put(batch={"tokens_per_batch": 512, "seq_len": 64}, adapters=adapters).status_code == 201
    assert post(run, result(adapter="math")).status_code == 200
    terminal("report", run.run, "--to", tmp_path / "report.html")
    shown = terminal("evals", run.run), terminal("status", run.run), (tmp_path / "report.html").read_text()
    assert all("held-out, math" in text for text in shown), shown


def test_groups_are_listed_by_condition_and_shown_with_their_rollouts(terminal: Terminal, run: RunClient) -> None:
    """Text of producers is shown without markup."""
    run.put(batch={"groups_per_batch": 2})
    low, high = group("low"), group("[red]high", rollouts=3)
    low["rollouts"][1]["reward"] = 0.25
    run.append(low, high | {"rollouts": high["rollouts"][1:2] * 2})
    listed = terminal("groups", "list", run.run, "--min-reward", 0.5)
    assert "[red]high" in listed and "low" not in listed
    first = terminal("groups", "list", run.run, "--limit", 1)
    after = re.search(r"--after (\d+)", first)
    assert after and "high" in first, "the newest"
    assert [group["group_id"] for group in terminal.json("groups", "list", run.run, "--after", after[1])["groups"]] == [
        "low"
    ]
    shown = terminal("groups", "show", run.run, "low")
    assert "rollout 1: reward 0.25" in shown and re.search(r"reward_mean +0\.125", shown)
    assert len(terminal.json("groups", "show", run.run, "low")["rollouts"]) == 2


def test_the_ledger_is_shown_page_by_page_newest_first(terminal: Terminal, run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"))
    run.batch(0, epoch := run.attach())
    run.ack(0, epoch)
    assert re.findall(r"\b(CONFIG|ATTACH|BATCH|ACK)\b", terminal("ledger", run.run)) == [
        "ACK",
        "BATCH",
        "ATTACH",
        "CONFIG",
    ]
    page = terminal("ledger", run.run, "--limit", 2)
    assert "ATTACH" not in page and "more: --before 3" in page
    rest = terminal.json("ledger", run.run, "--before", 3)
    assert [record["type"] for record in rest["records"]] == ["ATTACH", "CONFIG"] and rest["before"] is None
    assert "create it with `replaybuf runs create nobody" in terminal.refused("ledger", "nobody")


def test_runs_are_listed_with_what_they_wait_for(terminal: Terminal, run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 2})
    run.append(group("a"))
    assert re.search(rf"{run.run} +running +0 +0 +1 +0 +too_few_groups", terminal("runs", "list"))
    assert terminal.json("status", run.run)["groups"]["live"] == 1
    assert "too_few_groups" in terminal("runs", "show", run.run)


def test_text_of_users_cannot_drive_the_terminal() -> None:
    """Line breaks stay: completions have them."""
    assert printable("a\x1b[2Jb\nc\x07\u202e") == "a\ufffd[2Jb\nc\ufffd\ufffd"

"""Numbers with a noun: one of something is in the singular, in every command that shows a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replaybuf.errors import counted
from tests.cli.test_runs import Terminal as Terminal
from tests.cli.test_runs import terminal as terminal
from tests.conftest import RunClient, ServeProcess, group
from tests.service.test_evaluations import post, result

# A rate keeps its unit: at one group in a second `top` writes "1 groups/s".
PLURAL_OF_ONE = re.compile(r"(?<![\d.,])1 (?:more )?[a-z]+s\b(?!/)")


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "group", "0 groups"), (1, "group", "1 group"), (2, "batch", "2 batches"), (1, "process", "1 process")],
)
def test_only_one_is_in_the_singular(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


def test_the_digits_may_be_shown_otherwise() -> None:
    assert counted(12_300, "token", "12.3k") == "12.3k tokens"


def test_a_run_with_one_group_is_shown_in_the_singular(
    terminal: Terminal, run: RunClient, service: ServeProcess, tmp_path: Path
) -> None:
    """One rollout with one completion token, one rank, one row, one evaluated completion."""
    run.put(batch={"groups_per_batch": 1, "seq_len": 8})
    epoch = run.attach()
    run.append(group("a", rollouts=1, tokens=3))
    post(run, result(rollouts=1, failed=1))
    waiting = terminal("explain", run.run, 0)
    assert run.batch(0, epoch).status_code == 200
    backup = ("backup", run.run, "--to", tmp_path / "backup", "--redis-url", f"unix://{service.valkey_socket}")
    shown = {
        "waiting": waiting,
        "batch": terminal("explain", run.run, 0),
        "next": terminal("explain", run.run, 1),
        "status": terminal("status", run.run),
        "list": terminal("runs", "list"),
        "show": terminal("runs", "show", run.run),
        "groups": terminal("groups", "list", run.run),
        "group": terminal("groups", "show", run.run, "a"),
        "ledger": terminal("ledger", run.run),
        "top": terminal("top", run.run),
        "backup": terminal(*backup),
    }
    assert {name: wrong for name, text in shown.items() if (wrong := PLURAL_OF_ONE.findall(text))} == {}
    assert "1 group" in shown["waiting"] and "1 rank" in shown["batch"] and "1 payload" in shown["backup"]

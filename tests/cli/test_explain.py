"""The command `replaybuf explain`: funnel, order and packing on a terminal of any width."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from replaybuf.cli.look.explain import show_explanation
from replaybuf.cli.service import draw_bar
from replaybuf.wire.answer.explain import BatchExplanation
from tests.cli.test_runs import Terminal as Terminal
from tests.cli.test_runs import terminal as terminal
from tests.conftest import RunClient
from tests.service.test_explain import start


def test_a_batch_is_shown_from_its_candidates_to_its_rows(terminal: Terminal, run: RunClient) -> None:
    epoch = start(run)
    assert run.batch(0, epoch).status_code == 200
    shown = terminal("explain", run.run, 0)
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0] == f"step 0 of {run.run}: assembled, trains version 0"
    assert any("6 groups stored, 2 dropped as zero_variance, 1 rejected as" in line for line in lines)
    for start_of_line in ("live 4", "usable 4", "- for later batches 2", "chosen 2", "rank 0", "rank 1"):
        assert any(line.startswith(start_of_line) for line in lines), start_of_line
    assert "order of the strategy: 2 groups, 5 rollouts, 28 tokens" in shown
    assert terminal.json("explain", run.run, 0)["choice"]["groups"] == 2


def test_the_next_step_is_shown_with_its_reason(terminal: Terminal, run: RunClient) -> None:
    start(run, batch={"groups_per_batch": 9})
    waits = "waits: too_few_groups, blocked on producers; has 4 groups and 48 tokens, needs 9 groups"
    assert f"{waits}\n" in terminal("explain", run.run, 0)
    assert "step 5 is not assembled" in terminal.refused("explain", run.run, 5)


@pytest.mark.parametrize(("encoding", "bar"), [("utf-8", "██▌ "), ("ascii", "##  ")])
def test_bars_are_ascii_where_the_terminal_is(encoding: str, bar: str) -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding))
    assert draw_bar(0.62, 4, console) == bar
    assert draw_bar(0, 4, console) == "    "
    assert draw_bar(1e-9, 4, console).strip()


def test_names_from_users_cannot_change_the_terminal() -> None:
    """Ids with escape sequences and markup are shown as text, also at 40 columns."""
    evil = "\x1b[2J[red]x"
    first = {"group_id": evil, "prompt_id": evil, "policy_version": 0, "staleness": 0, "times_sampled": 1, "tokens": 3}
    choice = {"groups": 1, "rollouts": 1, "tokens": 3, "staleness": {"0": 1}, "times_sampled": {"1": 1}}
    raw = {"run": "r", "step": 0, "generation": 0, "state": "acked", "strategy": evil, "unknown": [evil]}
    raw |= {"choice": choice | {"adapters": {evil: 1}, "first": [first]}}
    raw |= {"candidates": {evil: {"live": 1, "live_tokens": 3, "usable": 1, "budget": {"groups": 1, "tokens": 0}}}}
    written = io.StringIO()
    show_explanation(msgspec.convert(raw, BatchExplanation), Console(file=written, width=40))
    assert "\x1b" not in written.getvalue() and "[red]" in written.getvalue()

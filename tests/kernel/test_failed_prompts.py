"""Share of failed prompts: its window, and what the rule decides; a restart changes neither."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.kernel.decide.config import decide_failed_share, decide_patch
from replaybuf.kernel.decide.prompts import decide_failed_prompt
from replaybuf.kernel.state.failed_prompts import LEAST_ENDED, WINDOW, FailedShare, FailedWindow
from replaybuf.kernel.state.lookups import explain_failed_share, read_failed_share
from replaybuf.kernel.state.snapshot import decode_snapshot, encode_snapshot, take
from replaybuf.kernel.state.tickets import Ticket
from replaybuf.wire.config_patch import ConfigPatch
from replaybuf.wire.ledger import ConfigRecord
from tests.builders import entries
from tests.kernel.test_snapshot import restarted
from tests.kernel.test_state import Run


def ruled(share: float = 0.25, then: str = "pause") -> Run:
    """Begin a run with the rule."""
    return Run(tickets={"max_failed_share": share, "on_failed_share": then})


def fail(run: Run, *prompts: int) -> None:
    for prompt in prompts:
        ticket = Ticket("", 0, prompt, 1, 1)
        run.apply(decide_failed_prompt(run.state, ticket, "engine_timeout: late", 1.0))


def store(run: Run, *prompts: int) -> None:
    first = run.state.stored + 1
    stored = entries(*({"prompt_index": prompt} for prompt in prompts))
    run.state.store(np.arange(first, first + len(prompts)), stored)


@given(st.lists(st.booleans(), max_size=3 * WINDOW))
def test_the_window_holds_the_newest_ended_prompts(failures: list[bool]) -> None:
    """Against the plain count of the last 200 outcomes."""
    window, stored = FailedWindow(), 0
    for failed in failures:
        stored += not failed
        if failed:
            window.add(stored)
    newest = failures[-WINDOW:]
    assert window.read(stored) == FailedShare(sum(newest), len(newest))
    assert len(window.after) <= WINDOW


def test_the_rule_acts_above_its_share_once_enough_prompts_have_ended() -> None:
    run = ruled(0.25)
    store(run, *range(LEAST_ENDED - 6))
    fail(run, *range(100, 105))
    assert read_failed_share(run.state) == FailedShare(5, LEAST_ENDED - 1)
    assert decide_failed_share(run.state, 1.0) is None, "19 prompts are not enough"
    store(run, 50)
    assert read_failed_share(run.state) == FailedShare(5, LEAST_ENDED)
    assert decide_failed_share(run.state, 1.0) is None, "a quarter is allowed"
    fail(run, 105)
    record = decide_failed_share(run.state, 7.0)
    assert record is not None and (record.state, record.at_s) == ("paused", 7.0)
    assert record.reason == (
        "failed_share: 6 of the last 21 prompts failed; tickets.max_failed_share is 0.25; the last one failed for: "
        "engine_timeout: late"
    )


@pytest.mark.parametrize(("then", "state"), [("alarm", None), ("pause", "paused"), ("finish", "finished")])
def test_the_rule_does_what_the_configuration_says(then: str, state: str | None) -> None:
    run = ruled(0.0, then)
    fail(run, *range(LEAST_ENDED))
    assert explain_failed_share(run.state)
    record = decide_failed_share(run.state, 1.0)
    assert (record and record.state) == state
    if record:
        run.apply(record)
        assert decide_failed_share(run.state, 1.0) is None, "once"


def test_a_run_without_the_rule_records_failures_as_before() -> None:
    run = Run()
    fail(run, *range(LEAST_ENDED))
    assert read_failed_share(run.state) is None and explain_failed_share(run.state) is None
    assert decide_failed_share(run.state, 1.0) is None
    assert all(failed.stored is None for failed in run.state.failed.newest.values())


def test_a_prompt_whose_group_comes_late_after_all_is_no_failure() -> None:
    run = ruled(0.0)
    store(run, *range(LEAST_ENDED))
    fail(run, 100, 101)
    store(run, 100)
    assert read_failed_share(run.state) == FailedShare(1, LEAST_ENDED + 2)
    store(run, 101)
    assert read_failed_share(run.state) == FailedShare(0, LEAST_ENDED + 2)


def test_a_resume_starts_the_window_anew() -> None:
    run = ruled(0.25)
    store(run, *range(10))
    fail(run, *range(100, 115))
    record = decide_failed_share(run.state, 1.0)
    assert record is not None
    run.apply(record)
    store(run, 10, 11)  # appended while the run was paused
    resumed = decide_patch(run.state, ConfigPatch(state="running"), 1.0)
    assert isinstance(resumed, ConfigRecord)
    run.apply(resumed)
    assert read_failed_share(run.state) == FailedShare(0, 2)
    fail(run, *range(120, 125))
    assert decide_failed_share(run.state, 1.0) is None
    store(run, *range(20, 33))
    assert read_failed_share(run.state) == FailedShare(5, LEAST_ENDED)
    fail(run, 130)
    assert decide_failed_share(run.state, 1.0) is not None


@pytest.mark.parametrize("resumed", [False, True])
def test_a_restart_neither_forgets_nor_counts_twice(resumed: bool) -> None:
    """From the streams alone, and from a snapshot in the middle with the rest of the index."""
    run, prompts = ruled(0.1), list(range(30))
    store(run, *prompts)
    fail(run, *range(100, 110))
    record = decide_failed_share(run.state, 1.0)
    assert record is not None
    run.apply(record)
    if resumed:
        patched = decide_patch(run.state, ConfigPatch(state="running"), 1.0)
        assert isinstance(patched, ConfigRecord)
        run.apply(patched)
        fail(run, 110, 111)
    raw = encode_snapshot(take(run.state))
    store(run, 31, 100 if not resumed else 110)
    stream = entries(*({"prompt_index": prompt} for prompt in [*prompts, 31, 100 if not resumed else 110]))
    again = restarted(run.state, stream, raw)
    assert (
        read_failed_share(again)
        == read_failed_share(run.state)
        == (FailedShare(1, 3) if resumed else FailedShare(9, 41))
    )
    assert decode_snapshot(raw).failed_start == (30 if resumed else 0)

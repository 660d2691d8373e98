"""Prompts that are issued again because their group was too stale: when, how often, and what the tickets say."""

from __future__ import annotations

from typing import Any

import pytest

from replaybuf.kernel.decide.intake import decide_tickets
from replaybuf.kernel.decide.records import decide_rewind
from replaybuf.kernel.rows.index import IN_BATCHES, LIVE
from replaybuf.kernel.state import reissues
from replaybuf.kernel.state.tickets import Ticket, TicketBook
from replaybuf.lab.simulate.virtual import VirtualRun
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec, TicketSpec
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.group import hash_name
from replaybuf.wire.ledger import BatchRecord
from tests.builders import entries


def start(**changes: Any) -> VirtualRun:
    """Begin a run of one group per batch, at most one version behind."""
    batch = BatchSpec(groups_per_batch=1, tokens_per_batch=None)
    config: dict[str, Any] = {"batch": batch, "on_stale": "reissue"}
    return VirtualRun(RunConfig(**config | changes), 1)


def take(run: VirtualRun) -> Ticket:
    """Take one ticket."""
    (ticket,) = run.take_tickets(1)
    return ticket


def append(run: VirtualRun, *tickets: Ticket, version: int, source: str = "code") -> None:
    """Store the groups of tickets, sampled with this version."""
    values = {"policy_version": version, "policy_version_max": version, "source": hash_name(source)}
    run.append(entries(*({"prompt_index": ticket.prompt_index} | values for ticket in tickets)))


def train(run: VirtualRun) -> int | None:
    """Train one step and publish; return the prompt of its group."""
    batch = run.batch(run.state.step)
    assert isinstance(batch, BatchRecord), batch
    run.ack(0.0)
    run.publish()
    return batch.groups[0].prompt_index


def fall_behind(run: VirtualRun) -> Ticket:
    """Take a ticket and train two steps with others; return it: a group of version 0 is too stale now."""
    slow = take(run)
    for version in range(2):
        append(run, take(run), version=version)
        train(run)
    return slow


def test_a_group_that_is_too_stale_as_it_arrives_brings_its_prompt_back() -> None:
    """The ticket has the same prompt index, says that it is a reissue, and is the next one; its group is trained."""
    run = start()
    slow = fall_behind(run)
    append(run, slow, version=0)
    assert (run.state.totals.evicted, list(run.state.reissues.waiting)) == ({"too_stale": 1}, [("", 0)])
    again = take(run)
    assert (again.prompt_index, again.reissue, again.attempt, again.key) == (slow.prompt_index, 1, 1, "p0-1")
    append(run, again, version=2)
    assert train(run) == slow.prompt_index
    assert (run.state.reissues.total, run.state.reissues.waiting) == (1, {})


def test_a_group_that_becomes_too_stale_while_it_waits_brings_its_prompt_back() -> None:
    """Here a batch takes a younger group: the order of `replay` may leave one behind."""
    options = {"max_staleness": 1, "max_uses": 1, "order": "newest", "look_ahead": 1}
    run = start(strategy=StrategySpec("replay", options))
    first, second = run.take_tickets(2)
    append(run, first, second, version=0)
    train(run)
    append(run, take(run), version=1)
    train(run)
    assert run.state.totals.evicted == {"too_stale": 1}
    assert take(run).prompt_index == first.prompt_index


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_prompt_is_issued_again_at_most_max_reissues_times(most: int) -> None:
    """After that it is dropped."""
    run = start(max_reissues=most)
    ticket = fall_behind(run)
    for reissue in range(most + 1):
        assert ticket.reissue == reissue
        append(run, ticket, version=0)
        ticket = take(run)
    assert (ticket.prompt_index, run.state.reissues.total) == (3, most)
    assert run.state.totals.evicted == {"too_stale": most + 1}


@pytest.mark.parametrize(("source", "index"), [("code", 0), ("math", 3)])
def test_each_source_has_its_policy(source: str, index: int) -> None:
    """Only prompts of the source code are issued again."""
    run = start(on_stale={"code": "reissue"})
    append(run, fall_behind(run), version=0, source=source)
    assert take(run).prompt_index == index


def test_a_reissue_that_fails_ends_the_prompt() -> None:
    """It is recorded as failed, and no ticket comes."""
    run = start(tickets=TicketSpec(max_attempts=1))
    append(run, fall_behind(run), version=0)
    run.return_ticket(take(run), "engine_error")
    assert not run.state.reissues.waiting and ("", 0) in run.state.failed.prompts
    assert take(run).prompt_index == 3


def test_a_rewind_brings_no_group_back_whose_prompt_was_issued_again() -> None:
    """Else its prompt would be trained twice. A group that was only dropped comes back."""
    for on_stale, evicted in (("reissue", {"too_stale": 1, "lost_lineage": 1}), ("drop", {"lost_lineage": 1})):
        run = start(on_stale=on_stale)
        append(run, fall_behind(run), version=0)
        rewind = decide_rewind(run.state, 0, "resample", run.now_s)
        run.state.apply(run.state.entries + 1, rewind)
        assert +run.state.totals.evicted == evicted
        assert list(run.state.reissues.waiting) == [("", 0)] * (on_stale == "reissue")


def test_a_prompt_whose_group_was_trained_once_is_not_issued_again() -> None:
    """The group could have been used a second time, but is too stale now."""
    run = start(strategy=StrategySpec("replay", {"max_staleness": 0, "max_uses": 2}))
    append(run, take(run), version=0)
    assert train(run) == 0
    assert (run.state.count(LIVE), run.state.count(IN_BATCHES)) == (0, 1)
    assert not run.state.reissues.waiting


def test_two_groups_of_a_prompt_bring_it_back_once() -> None:
    """Two attempts at the prompt brought a group each, both too late."""
    run = start()
    slow = fall_behind(run)
    append(run, slow, slow, version=0)
    assert (run.state.totals.evicted, run.state.reissues.total) == ({"too_stale": 2}, 1)


def test_a_list_that_is_full_drops_the_prompts_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of prompts that wait is bounded."""
    monkeypatch.setattr("replaybuf.kernel.decide.prompts.MOST_WAITING", 1)
    run = start()
    slow = fall_behind(run), take(run)
    append(run, *slow, version=0)
    assert run.state.totals.evicted == {"too_stale": 2}
    assert list(run.state.reissues.waiting) == [("", 0)]
    assert reissues.MOST_WAITING == 10_000


def test_producers_stay_while_a_live_group_may_bring_its_prompt_back() -> None:
    """No prompt is left, but the answer does not say that nothing can come; after the last batch it does."""
    run = start(tickets=TicketSpec(prompts=1))
    append(run, take(run), version=0)

    def answer() -> WaitingAnswer:
        waits = decide_tickets(run.state, run.book, run.selector, "", 1, run.now_s)
        assert isinstance(waits, WaitingAnswer) and waits.reason == "finished"
        return waits

    assert answer().blocked_on == "trainer"
    train(run)
    assert answer().blocked_on == "nothing"


def test_a_new_book_issues_a_waiting_prompt_only_without_a_ticket_in_storage() -> None:
    """A leader may die before it stored the ticket, or after."""
    run = start()
    append(run, fall_behind(run), version=0)
    out = take(run)
    for stored in ([], [(str(out), 60.0)]):
        book = TicketBook(600.0, 3, {"": None})
        book.restore(stored, {"next:": 3}, 0.0)
        book.reissue(run.state.reissues)
        assert book.pending_prompts() == {("", 0): 1}
        assert (book.out, book.due_of("")) == (len(stored), 1 - len(stored))
        assert [str(ticket) for ticket in book.issue("", 1, 0, 0.0).issued] == ["t0-3-1-1" if stored else str(out)]


def test_a_stored_group_ends_only_its_own_issue_of_the_prompt() -> None:
    """The group that was dropped may be settled again while its prompt is due."""
    run = start()
    append(run, fall_behind(run), version=0)
    assert not run.book.complete([("", 0)])
    assert run.book.complete([("", 0)], {("", 0): 1}).drop
    assert run.book.due_of("") == 0

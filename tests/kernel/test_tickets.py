"""Ticket book, compared with a model, also after it is restored from storage."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replaybuf.errors import NotFound
from replaybuf.kernel.state.return_reasons import FORGIVEN_REASONS, is_forgiven
from replaybuf.kernel.state.tickets import (
    Ticket,
    TicketBook,
    TicketChange,
    parse_ticket,
    prompt_key,
)

ADAPTERS = ("", "a/b")
NUMBERS = st.integers(0, 10**18 - 1)
COUNTS = st.integers(1, 10**9 - 1)

# ---------------------------------------------------------------------- the text of a ticket


@given(st.builds(Ticket, st.text(max_size=6), NUMBERS, NUMBERS, COUNTS, COUNTS, st.just(0) | COUNTS))
def test_a_ticket_equals_its_parsed_text(ticket: Ticket) -> None:
    assert parse_ticket(str(ticket)) == ticket


@given(st.text(alphabet="0123456789t-/ab٣ \n", max_size=12) | st.text(max_size=20))
def test_every_ticket_has_exactly_one_text(text: str) -> None:
    """Any other text raises `NotFound` and no other error."""
    try:
        ticket = parse_ticket(text)
    except NotFound as error:
        assert error.value == text and error.name == "ticket"
    else:
        assert str(ticket) == text and ticket.attempt >= 1 and ticket.serial >= 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "t0-0-1",
        "t0-0-0-1",
        "t0-0-1-0",
        "t00-0-1-1",
        "t0-0-1-01",
        "t-1-0-1-1",
        "t0-0-1-1 ",
        "T0-0-1-1",
        "/t0-0-1-1",
        "t٣-0-1-1",
        "t0-0-1-2-0",
        "t0-0-1-2-3-4",
    ],
)
def test_an_invalid_text_is_not_found(text: str) -> None:
    with pytest.raises(NotFound, match="is not one this service issued"):
        parse_ticket(text)


def test_a_number_of_thousands_of_digits_is_not_found() -> None:
    """Python cannot convert so many digits; the caller must not see that error."""
    with pytest.raises(NotFound):
        parse_ticket("t" + "9" * 5000 + "-0-1-1")


def test_the_default_group_id_contains_the_prompt_and_its_adapter() -> None:
    assert (prompt_key("", 7), prompt_key("math", 7)) == ("p7", "math/p7")


# ---------------------------------------------------------------------- the book against a model


@dataclasses.dataclass
class Prompt:
    """State of one prompt: `out` until a deadline, `due` again, `failed` or `stored`; its failed tries and tickets.

    `loaded`: its ticket was out when the service started.
    """

    state: str
    generation: int
    failures: int = 0
    issued: int = 0
    deadline_s: float = 0.0
    loaded: bool = False


class Storage:
    """Changes as the service stores them: tickets by deadline on the wall clock (None = due again), counters."""

    def __init__(self) -> None:
        self.tickets: dict[str, float | None] = {}
        self.counts: Counter[str] = Counter()

    def keep(self, change: TicketChange, deadline_s: float) -> None:
        for ticket in change.drop:
            del self.tickets[str(ticket)]
        put: dict[str, float | None] = dict.fromkeys(map(str, change.due), None)
        put |= dict.fromkeys(map(str, change.issued), deadline_s)
        assert not self.tickets.keys() & put.keys()
        self.tickets.update(put)
        self.counts.update(change.counts)


class TicketMachine(RuleBasedStateMachine):
    """Producers take, lose, return and complete tickets, in any order."""

    @initialize(ttl_s=st.integers(1, 20), max_attempts=st.integers(1, 3), prompts=st.none() | st.integers(1, 6))
    def start(self, ttl_s: int, max_attempts: int, prompts: int | None) -> None:
        self.terms = (ttl_s, max_attempts, prompts)
        self.book = TicketBook(*self.book_options())
        self.storage = Storage()
        self.prompts: dict[str, list[Prompt]] = {adapter: [] for adapter in ADAPTERS}
        self.counts: Counter[str] = Counter()
        self.now_s, self.jumped_s = 1000.0, 0.0
        self.generation = 0
        self.texts: set[str] = set()

    def keep(self, change: TicketChange) -> None:
        self.storage.keep(change, self.now_s + self.jumped_s + self.terms[0])

    def book_options(self) -> tuple[int, int, dict[str, int | None]]:
        ttl_s, max_attempts, prompts = self.terms
        return ttl_s, max_attempts, dict.fromkeys(ADAPTERS, prompts)

    def those(self, state: str) -> dict[tuple[str, int], Prompt]:
        return {
            (adapter, index): prompt
            for adapter, prompts in self.prompts.items()
            for index, prompt in enumerate(prompts)
            if prompt.state == state
        }

    def ticket_of(self, key: tuple[str, int]) -> Ticket:
        prompt = self.prompts[key[0]][key[1]]
        return Ticket(key[0], prompt.generation, key[1], prompt.failures + 1, prompt.issued)

    def take_back(self, key: tuple[str, int], *, failed: bool = True) -> None:
        prompt = self.prompts[key[0]][key[1]]
        prompt.failures += failed
        prompt.state = "failed" if prompt.failures == self.terms[1] else "due"
        prompt.deadline_s, prompt.loaded = 0.0, False

    # -- rules

    @rule(adapter=st.sampled_from(ADAPTERS), count=st.sampled_from([1, 2, 4, 0]))
    def issue(self, adapter: str, count: int) -> None:
        """Prompts that are due again come first, then new indexes in order, until the supply ends."""
        ttl_s, _, supply = self.terms
        due = {key for key in self.those("due") if key[0] == adapter}
        prompts = self.prompts[adapter]
        fresh = count - min(len(due), count)
        if supply is not None:
            fresh = min(fresh, supply - len(prompts))
        change = self.book.issue(adapter, count, self.generation, self.now_s)
        again = {ticket.prompt for ticket in change.issued[: min(len(due), count)]}
        assert again <= due and len(again) == min(len(due), count)
        new = [ticket.prompt_index for ticket in change.issued[len(again) :]]
        assert new == list(range(len(prompts), len(prompts) + fresh))
        prompts += [Prompt("out", 0) for _ in new]
        for ticket in change.issued:
            prompt = prompts[ticket.prompt_index]
            prompt.state, prompt.generation, prompt.deadline_s = "out", self.generation, self.now_s + ttl_s
            prompt.issued += 1
            assert ticket == self.ticket_of(ticket.prompt)
            assert str(ticket) not in self.texts, "no two tickets have one text"
            self.texts.add(str(ticket))
        self.counts["issued"] += len(change.issued)
        self.keep(change)

    @rule(seconds=st.integers(0, 30))
    def expire(self, seconds: int) -> None:
        """A ticket expires at its deadline, not earlier; a loaded one without a failed attempt."""
        self.now_s += seconds
        late = [key for key, prompt in self.those("out").items() if prompt.deadline_s <= self.now_s]
        tickets = {key: self.ticket_of(key) for key in late}
        for key in late:
            self.take_back(key, failed=not self.prompts[key[0]][key[1]].loaded)
        change = self.book.expire(self.now_s)
        assert set(change.failed) == {tickets[key] for key in late if key in self.those("failed")}
        assert bool(change) == bool(late)
        self.counts["expired"] += len(late)
        self.keep(change)

    @precondition(lambda self: self.those("out"))
    @rule(
        data=st.data(),
        reason=st.sampled_from(["engine_error: x", "", *(f"{word}: x" for word in sorted(FORGIVEN_REASONS))]),
    )
    def give_back(self, data: st.DataObject, reason: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.those("out"))))
        ticket = self.ticket_of(key)
        assert self.book.holds(ticket)
        change = self.book.give_back(ticket, reason)
        self.take_back(key, failed=reason.partition(":")[0] not in FORGIVEN_REASONS)
        assert change.failed == ([ticket] if key in self.those("failed") else [])
        self.counts["returned"] += 1
        self.keep(change)

    @precondition(lambda self: any(self.prompts.values()))
    @rule(data=st.data(), attempts=st.integers(-1, 1), serials=st.integers(-1, 1), generations=st.integers(-1, 1))
    def give_back_a_ticket_that_is_not_out(
        self, data: st.DataObject, attempts: int, serials: int, generations: int
    ) -> None:
        """For an earlier, later or never issued attempt: `NotFound`, without a change."""
        key = data.draw(st.sampled_from([(a, index) for a, all_ in self.prompts.items() for index in range(len(all_))]))
        newest = self.ticket_of(key)
        ticket = newest._replace(
            generation=newest.generation + generations,
            attempt=newest.attempt + attempts,
            serial=newest.serial + serials,
        )
        if key in self.those("out") and ticket == newest:
            return
        assert not self.book.holds(ticket)
        with pytest.raises(NotFound, match="is not out"):
            self.book.give_back(ticket, "engine_error")

    @precondition(lambda self: any(self.prompts.values()))
    @rule(data=st.data())
    def store_groups(self, data: st.DataObject) -> None:
        """A stored group removes its ticket; a second group, or one of a failed prompt, changes nothing."""
        every = [(a, index) for a, prompts in self.prompts.items() for index in range(len(prompts) + 1)]
        stored = data.draw(st.lists(st.sampled_from(every), unique=True, min_size=1, max_size=3))
        completed = set(stored) & (self.those("out").keys() | self.those("due").keys())
        tickets = {text for text in self.storage.tickets if parse_ticket(text).prompt in completed}
        change = self.book.complete(stored)
        assert set(map(str, change.drop)) == tickets and not change.counts and not change.due
        for key in completed:
            self.prompts[key[0]][key[1]].state = "stored"
        self.keep(change)

    @rule()
    def rewind(self) -> None:
        self.generation += 1

    @rule(by_s=st.sampled_from([-1000.0, -5.0, 5.0, 1000.0]))
    def set_the_wall_clock(self, by_s: float) -> None:
        """No deadline changes."""
        self.jumped_s += by_s

    @rule()
    def restart(self) -> None:
        """Continue with the book restored from storage; each ticket has between nothing and all of its time left."""
        self.book, ttl_s = self.restored(), self.terms[0]
        for key, prompt in self.those("out").items():
            stored_s = self.storage.tickets[str(self.ticket_of(key))]
            assert stored_s is not None
            left_s = stored_s - self.now_s - self.jumped_s
            prompt.deadline_s, prompt.loaded = self.now_s + min(max(left_s, 0.0), ttl_s), True

    @rule()
    def reload(self) -> None:
        """The same process reads storage again, as after a lost answer of Redis: no deadline changes."""
        self.load(self.book)

    def restored(self) -> TicketBook:
        book = TicketBook(*self.book_options())
        self.load(book)
        return book

    def load(self, book: TicketBook) -> None:
        wall_s = self.now_s + self.jumped_s
        tickets = ((text, None if at_s is None else at_s - wall_s) for text, at_s in self.storage.tickets.items())
        book.restore(tickets, dict(self.storage.counts), self.now_s)

    # -- invariants

    @invariant()
    def the_book_equals_the_model(self) -> None:
        for book in (self.book, self.restored()):
            out, due = self.those("out"), self.those("due")
            assert book.out == len(out)
            assert sorted(book.pending_prompts()) == sorted([*out, *due])
            assert all(book.holds(self.ticket_of(key)) for key in out)
            assert not any(book.holds(self.ticket_of(key)) for key in due)
            assert {a: book.out_of(a) for a in ADAPTERS} == {a: sum(key[0] == a for key in out) for a in ADAPTERS}
            for a in ADAPTERS:
                awaited = sorted(index for adapter, index in [*out, *due] if adapter == a)
                assert book.first_awaited(a, 3) == tuple(awaited[:3])
                assert book.due_of(a) == sum(key[0] == a for key in due)
            assert book.counts == self.counts
            issued = {adapter: len(prompts) for adapter, prompts in self.prompts.items() if prompts}
            assert book.next_index == issued
            for adapter, prompts in self.prompts.items():
                left = self.terms[2] is None or len(prompts) < self.terms[2]
                assert book.prompts_exhausted(adapter) == (not left and not any(key[0] == adapter for key in due))
        assert all(self.book.may_expire(p.deadline_s) for p in out.values())
        for adapter in ADAPTERS:
            deadlines_s = [prompt.deadline_s for key, prompt in out.items() if key[0] == adapter]
            assert self.book.oldest_deadline_s(adapter) == min(deadlines_s, default=None)

    @invariant()
    def a_prompt_has_failed_exactly_when_it_has_no_attempt_left(self) -> None:
        for prompts in self.prompts.values():
            for prompt in prompts:
                assert (prompt.failures == self.terms[1]) == (prompt.state == "failed")
                assert prompt.issued >= 1 and prompt.failures <= prompt.issued


TestTicketBookAgainstAModel = TicketMachine.TestCase
TestTicketBookAgainstAModel.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None
)

# ---------------------------------------------------------------------- single decisions


def test_a_book_may_have_issued_only_what_it_issued() -> None:
    """Prompt 0 came back, then failed once; prompt 1 failed twice; prompt 2 has its first ticket, prompt 3 none."""
    book = TicketBook(ttl_s=10, max_attempts=3, supplies={})
    tickets = book.issue("", 3, 4, 0.0).issued
    for prompt, reasons in enumerate((("shutdown", "engine_error"), ("engine_error", "engine_error"))):
        newest = tickets[prompt]
        for reason in reasons:
            book.give_back(newest, reason)
            (newest,) = book.issue("", 1, 4, 0.0).issued
            tickets.append(newest)
    issued = ["t4-0-1-1", "t4-0-1-2", "t4-0-2-3", "t4-1-1-1", "t4-1-2-2", "t4-1-3-3", "t4-2-1-1"]
    assert sorted(map(str, tickets)) == issued
    assert all(map(book.may_have_issued, tickets))
    for made_up in (
        *("t4-3-1-1", "t4-0-1-3", "t4-0-2-4", "t4-0-3-3", "t4-0-3-2", "t5-0-1-1", "t3-0-2-3", "t4-1-1-2"),
        *("t4-2-1-2", "t4-2-2-1", "t5-2-1-1", "other/t4-0-1-1", "t4-0-1-1-1"),
    ):
        assert not book.may_have_issued(parse_ticket(made_up)), made_up
    book.complete([("", 2)])  # nothing is kept of it but its index
    assert book.may_have_issued(parse_ticket("t4-2-1-1")) and not book.may_have_issued(parse_ticket("t4-2-4-1"))


@pytest.mark.parametrize("reason", sorted(FORGIVEN_REASONS))
def test_a_return_for_a_forgiven_reason_is_not_a_failed_attempt(reason: str) -> None:
    """Ten restarts of a generator fail no prompt, and all tickets have different texts."""
    book = TicketBook(ttl_s=10, max_attempts=1, supplies={})
    texts = set()
    for _ in range(10):
        (ticket,) = book.issue("", 1, 0, 0.0).issued
        texts.add(str(ticket))
        assert (ticket.prompt_index, ticket.attempt) == (0, 1)
        assert book.give_back(ticket, f"{reason}: the producer ends").failed == []
    assert len(texts) == 10


@pytest.mark.parametrize("reason", ["", "engine_timeout", "engine_lost", "not shutdown", "shutdowns", "x: shutdown"])
def test_a_return_for_any_other_reason_is_a_failed_attempt(reason: str) -> None:
    assert not is_forgiven(reason)
    book = TicketBook(ttl_s=10, max_attempts=1, supplies={})
    (ticket,) = book.issue("", 1, 0, 0.0).issued
    assert book.give_back(ticket, reason).failed == [ticket]


def test_the_oldest_deadline_of_each_adapter_is_the_same_after_a_restart() -> None:
    """Storage returns tickets in the order of deadlines; a ticket that is issued again is the newest."""
    book = TicketBook(ttl_s=10, max_attempts=2, supplies={})
    first = book.issue("a", 1, 0, 1.0).issued[0]
    book.issue("b", 1, 0, 2.0)
    last = book.issue("a", 1, 0, 3.0).issued[0]
    assert (book.oldest_deadline_s("a"), book.oldest_deadline_s("b"), book.oldest_deadline_s("c")) == (11.0, 12.0, None)
    book.give_back(first, "shutdown")
    book.issue("a", 1, 0, 5.0)
    assert book.oldest_deadline_s("a") == 13.0
    restored = TicketBook(ttl_s=10, max_attempts=2, supplies={})
    restored.restore([(str(last), 7.0), (str(first), 9.0)], {}, 6.0)
    assert restored.oldest_deadline_s("a") == 13.0


def test_storage_replaces_a_ticket_that_it_has_a_newer_one_of_and_leaves_the_deadline_of_others() -> None:
    """A follower reads the tickets of its leader again and again; its clock may be behind."""
    book = TicketBook(ttl_s=10, max_attempts=2, supplies={})
    kept, replaced = book.issue("", 2, 0, 4.0).issued
    newer = replaced._replace(serial=2, attempt=2)
    book.restore([(str(kept), 1.0), (str(newer), 5.0)], {}, 5.0)
    assert (book.holds(kept), book.holds(replaced), book.holds(newer)) == (True, False, True)
    assert book.oldest_deadline_s("") == 10.0


def test_a_new_leader_takes_the_deadlines_of_its_earlier_term_from_storage() -> None:
    """Its issue may not have reached storage; then another leader has issued the same ticket later."""
    book = TicketBook(ttl_s=10, max_attempts=2, supplies={})
    (again,) = book.issue("", 1, 0, 4.0).issued
    book.forget_issued()
    book.restore([(str(again), 8.0)], {}, 12.0)
    assert book.oldest_deadline_s("") == 20.0
    assert not book.expire(14.0)


def test_an_empty_change_is_false() -> None:
    book = TicketBook(ttl_s=10, max_attempts=2, supplies={"": 1})
    assert not book.issue("", 0, 0, 0.0)
    assert not book.expire(1e9)
    assert not book.complete([("", 0)])
    assert book.issue("", 1, 0, 0.0)


def test_storage_has_the_names_of_producers_that_send_heartbeats() -> None:
    """A ticket that is due again and issued again has the same text, and only one of the two has a name."""
    book = TicketBook(ttl_s=10, max_attempts=1, supplies={})
    issued = book.issue("", 3, 0, 0.0)
    named, plain = issued.issued[:2], issued.issued[2:]
    book.assign(issued, named, "a@b", named=True)
    book.assign(issued, plain, "c", named=False)
    assert issued.texts_to_add == ["t0-0-1-1@a@b", "t0-1-1-1@a@b", "t0-2-1-1"]
    assert (book.out_with("a@b"), book.out_with("c"), book.named_producers) == (2, 1, {"a@b"})

    later = TicketBook(ttl_s=10, max_attempts=1, supplies={})
    later.restore([(text, 10.0) for text in issued.texts_to_add], {"next:": 3}, 0.0)
    assert later.named_producers == {"a@b"} and later.out == 3
    lost = later.take_back({"a@b"}, most=1)
    assert (lost.texts_to_drop, lost.producers) == (["t0-0-1-1@a@b"], {"a@b": 1})
    assert later.take_back({"a@b", "c"}, most=9).texts_to_drop == ["t0-1-1-1@a@b"], "the third has no name"
    again = later.issue("", 1, 0, 0.0)
    later.assign(again, again.issued, "d", named=True)
    assert (again.texts_to_drop, again.texts_to_add) == (["t0-0-1-2"], ["t0-0-1-2@d"])
    assert later.complete([("", 0)]).texts_to_drop == ["t0-0-1-2@d"]
    assert later.out_with("d") == 0

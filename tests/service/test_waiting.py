"""Why there is no batch or no ticket: every reason of the closed list, in every place that tells it, in its order."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from rich.console import Console

from replaybuf.cli.look.status import show_status
from replaybuf.cli.service import ServiceOptions
from replaybuf.wire.wait_reasons import REASONS, WAIT_REASONS
from tests.conftest import ClockedServe, RunClient, ServeProcess, group

_names = itertools.count()
ON_POLICY = {"name": "on-policy"}
SILENCE_S = 61.0


@pytest.fixture
def run(clocked: ClockedServe) -> Iterator[RunClient]:
    """A run of the test's own on it, not created yet."""
    client = RunClient(clocked.url, f"waits-{next(_names)}")
    yield client
    client.http.close()


# ---------------------------------------------------------------------- how each reason comes about


def trained(run: RunClient, steps: int = 1, **config: Any) -> int:
    """Create a run of 2 groups per batch with 2 groups stored, and train; return the epoch."""
    assert run.put(batch={"groups_per_batch": 2, "tokens_per_batch": None}, **config).status_code == 201
    epoch = run.attach()
    run.append(group("a"), group("b"))
    run.train(epoch, range(steps))
    return epoch


def replay(**options: Any) -> dict[str, Any]:
    """A strategy with two uses per group."""
    return {"name": "replay", "options": {"max_uses": 2, "order": "fifo", "look_ahead": 1, **options}}


def finished(run: RunClient) -> int:
    """One step was wanted; a group is left."""
    epoch = trained(run, 0, max_steps=1)
    run.append(group("left"))
    run.train(epoch, range(1))
    return epoch


def paused(run: RunClient) -> int:
    epoch = trained(run, 0)
    run.http.patch(run.path, json={"state": "paused"})
    return epoch


def awaiting_ack(run: RunClient) -> int:
    """Without look-ahead; the version of step 1 is not published either."""
    epoch = trained(run, 0, strategy=ON_POLICY)
    assert run.batch(0, epoch).status_code == 200
    return epoch


def awaiting_publication(run: RunClient) -> int:
    """Step 0 is acked and not published; the group that is left would be too stale for step 1."""
    epoch = trained(run, 0, strategy=ON_POLICY)
    run.append(group("left"))
    run.batch(0, epoch)
    run.ack(0, epoch)
    return epoch


def rate_limited(run: RunClient) -> int:
    """One use per stored group; what is stored was used once, and rests besides."""
    return trained(run, strategy=replay(samples_per_insert=1, error_buffer=1.5, cooldown=1))


def all_stale(run: RunClient) -> int:
    """A group was left over, and is too stale now; nobody ever asked for a ticket."""
    epoch = trained(run, 0, strategy=ON_POLICY)
    run.append(group("left"))
    run.train(epoch, range(1))
    return epoch


def resting(run: RunClient) -> int:
    """Both groups have a use left, after a rest."""
    return trained(run, strategy=replay(cooldown=1))


def used_up(run: RunClient) -> int:
    """Both groups served two batches; nobody ever asked for a ticket."""
    return trained(run, 2, strategy=replay())


def no_producers(run: RunClient) -> int:
    return trained(run)


def no_groups(run: RunClient) -> int:
    """A ticket is out."""
    epoch = trained(run)
    assert len(run.post("tickets", producer="p", count=1).json()["tickets"]) == 1
    return epoch


def filtered(run: RunClient) -> int:
    """What came was dropped by a filter, and is not stale."""
    epoch = trained(run, filters=[{"name": "overlong", "options": {"max_tokens": 9}}])
    run.append(group("long", 1, tokens=10))
    assert run.state()["groups"]["evicted"] == {"overlong_rollout": 1}
    return epoch


def too_few_groups(run: RunClient) -> int:
    epoch = trained(run)
    run.append(group("c", 1, tokens=6))
    return epoch


def too_few_tokens(run: RunClient) -> int:
    run.put(batch={"tokens_per_batch": 25})
    epoch = run.attach()
    run.append(group("a", tokens=6))
    return epoch


def awaiting_columns(run: RunClient) -> int:
    """There are enough groups; one lacks what the strategy requires."""
    options = {"max_staleness": 9, "requires": ["ref_logprobs"]}
    run.put(batch={"groups_per_batch": 2}, strategy={"name": "one-step-off-policy", "options": options})
    run.append(group("a"), group("b"))
    epoch = run.attach()
    columns = {"ref_logprobs": [[-1.0, -2.0, -3.0]] * 2}
    assert run.http.put(f"{run.path}/groups/a/columns", json={"columns": columns}).status_code == 200
    return epoch


class Case(NamedTuple):
    """A state of a run: the step that is asked for, the answer, and the reason (of the trainer) a ticket is denied.

    `have` and `need` are (groups, tokens). `ticket`: None where one is issued.
    """

    begin: Callable[[RunClient], int]
    step: int
    reason: str
    have: tuple[int, int]
    blocked_on: str
    need: tuple[int, int] = (2, 0)
    ticket: tuple[str, str] | None = None
    detail: str | None = None


CASES = [
    Case(finished, 1, "finished", (1, 10), "nothing", ticket=("finished", "nothing")),
    Case(paused, 0, "paused", (2, 20), "operator", ticket=("paused", "operator")),
    Case(awaiting_ack, 1, "awaiting_ack", (0, 0), "trainer", ticket=("rate_limited", "trainer")),
    Case(awaiting_publication, 1, "awaiting_publication", (0, 0), "trainer", ticket=("rate_limited", "trainer")),
    Case(rate_limited, 1, "rate_limited", (1, 10), "producers"),
    Case(all_stale, 1, "all_stale", (0, 0), "producers"),
    Case(resting, 1, "reuse_exhausted", (0, 0), "producers"),
    Case(used_up, 2, "reuse_exhausted", (0, 0), "producers"),
    Case(no_producers, 1, "no_producers", (0, 0), "producers"),
    Case(no_groups, 1, "no_groups", (0, 0), "producers"),
    Case(filtered, 1, "no_producers", (0, 0), "producers"),
    Case(too_few_groups, 1, "too_few_groups", (1, 12), "producers"),
    Case(
        awaiting_columns,
        0,
        "awaiting_columns",
        (1, 10),
        "producers",
        detail="groups that lack columns: 1; required: ref_logprobs",
    ),
    Case(too_few_tokens, 0, "too_few_tokens", (1, 12), "producers", need=(0, 25)),
]


def waited_s(server: ServeProcess, run: str) -> dict[str, float]:
    """Read the waiting seconds of a run off `/metrics`, those that are not 0."""
    text = httpx.get(f"{server.url}/metrics").text
    series = re.findall(rf'^replaybuf_waiting_seconds_total{{reason="(\w+)",run="{run}"}} (\S+)$', text, re.MULTILINE)
    assert [reason for reason, _ in series] == list(REASONS), "one label each, from the start"
    return {reason: float(value) for reason, value in series if float(value)}


def status(server: ServeProcess, run: str) -> str:
    """Return what `replaybuf status` prints."""
    shown = Console(file=io.StringIO(), width=200)
    show_status(ServiceOptions(url=server.url), run, shown)
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_every_reason_of_the_closed_list_has_a_case() -> None:
    assert {case.reason for case in CASES} == set(REASONS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.begin.__name__)
def test_all_calls_report_the_same_reason(clocked: ClockedServe, run: RunClient, case: Case) -> None:
    """Batch answer, state, status, metric; and the answer to a producer at that moment."""
    epoch = case.begin(run)
    reported = {
        "status": "waiting",
        "reason": case.reason,
        "have": dict(zip(("groups", "tokens"), case.have, strict=True)),
        "need": dict(zip(("groups", "tokens"), case.need, strict=True)),
        "blocked_on": case.blocked_on,
        "retry_after_s": 0.5,
    } | ({"detail": case.detail} if case.detail else {})
    before_s = waited_s(clocked, run.run).get(case.reason, 0.0)
    first = run.batch(case.step, epoch)
    clocked.put_forward(2.0)
    again = run.batch(case.step, epoch)
    if case.reason == "finished":
        assert (first.status_code, first.json()["type"]) == (410, "urn:replaybuf:problem:finished")
        assert case.reason not in waited_s(clocked, run.run), "nobody waits for a run that is over"
    else:
        for answer in (first, again):
            missing = [client["name"] for client in answer.json().get("missing", [])]
            assert (answer.status_code, answer.json() | {"missing": missing}) == (202, reported | {"missing": missing})
            assert missing in ([], ["trainer"] if case.blocked_on == "trainer" else [])
        assert 2.0 <= waited_s(clocked, run.run)[case.reason] - before_s < 2.0 + 30.0
    assert run.state()["waiting"] == reported
    (g, t), (more_g, more_t) = case.have, case.need
    sentence = f"{case.reason}: have groups {g}, tokens {t}; need groups {more_g}, tokens {more_t}; "
    actor = "nobody has to act" if case.blocked_on == "nothing" else f"waiting for {case.blocked_on}"
    printed = status(clocked, run.run)
    assert sentence + actor in printed
    assert str(WAIT_REASONS[case.reason]) in printed

    answer = run.post("tickets", producer="p", count=1).json()
    denied = answer.get("waiting")
    assert (denied and (denied["reason"], denied["blocked_on"])) == case.ticket
    assert bool(answer["tickets"]) == (case.ticket is None)
    if denied:
        assert denied["need"] == reported["need"] and denied["have"].keys() == {"groups", "tokens"}


# ---------------------------------------------------------------------- the order, and what changes a reason


def test_paused_comes_before_awaiting_ack(run: RunClient) -> None:
    """The first reason that holds; what was served before is served still."""
    epoch = awaiting_ack(run)
    run.http.patch(run.path, json={"state": "paused"})
    assert run.batch(1, epoch).json()["reason"] == run.state()["waiting"]["reason"] == "paused"
    assert run.batch(0, epoch).status_code == 200


def test_producers_silent_for_a_minute_count_as_none_without_tickets_out(clocked: ClockedServe, run: RunClient) -> None:
    epoch = no_groups(run)
    clocked.put_forward(SILENCE_S)
    assert run.batch(1, epoch).json()["reason"] == "no_groups"
    (ticket,) = run.post("tickets", producer="p", count=1).json()["tickets"]
    for out in (ticket["ticket"], ticket["ticket"].replace("-1-1-1", "-0-1-1")):
        assert run.http.delete(f"{run.path}/tickets/{out}?reason=shutdown").status_code == 200
    assert run.batch(1, epoch).json()["reason"] == "no_groups", "asked for a moment ago"
    clocked.put_forward(SILENCE_S)
    assert run.batch(1, epoch).json()["reason"] == run.state()["waiting"]["reason"] == "no_producers"
    run.post("tickets", producer="p", count=1)
    assert run.batch(1, epoch).json()["reason"] == "no_groups"


def test_a_run_with_a_ready_batch_reports_no_waiting(clocked: ClockedServe, run: RunClient) -> None:
    trained(run, 0)
    assert run.state()["waiting"] is None
    assert re.search("next batch +│ ready", status(clocked, run.run))


def denied(run: RunClient, **fields: Any) -> dict[str, Any]:
    """Ask for a ticket while the window is full; return the waiting answer."""
    answer = run.post("tickets", producer="q", count=1, **fields).json()
    assert answer["tickets"] == [] and answer["waiting"]["reason"] == "rate_limited", answer
    reported: dict[str, Any] = answer["waiting"]
    return reported


def test_a_window_full_of_tickets_that_are_out_waits_for_producers_as_the_trainer_does(
    clocked: ClockedServe, run: RunClient
) -> None:
    """Nobody is sent to the other one: who has the tickets is dead, and the trainer can do nothing about it."""
    run.put(batch={"groups_per_batch": 2}, tickets={"ttl_s": 700})
    epoch = run.attach()
    tickets = run.post("tickets", producer="dead", count=9).json()["tickets"]
    clocked.put_forward(100.0)
    reported, batch = denied(run), run.batch(0, epoch).json()
    assert (reported["blocked_on"], reported["have"]["groups"]) == ("producers", 4)
    assert (batch["reason"], batch["blocked_on"]) == ("no_groups", "producers")
    match = re.fullmatch(r"tickets out: 4; the oldest expires in (\d+) s", reported["detail"])
    assert match and 500 <= int(match[1]) <= 600
    run.append(group(None, ticket=tickets[0]["ticket"]))
    assert denied(run)["detail"].startswith("tickets out: 3; "), "the next batch still lacks one"
    run.append(group(None, ticket=tickets[1]["ticket"]))
    reported = denied(run)
    assert (reported["blocked_on"], reported.get("detail")) == ("trainer", None), "there is a batch, it is not fetched"
    assert run.batch(0, epoch).status_code == 200
    assert run.ack(0, epoch).status_code == 200
    assert denied(run)["blocked_on"] == run.batch(1, epoch).json()["blocked_on"] == "producers"


def test_a_window_full_of_tickets_waits_for_the_trainer_while_its_publication_is_awaited(run: RunClient) -> None:
    """What is out would be too stale: only a publication opens the window."""
    run.put(batch={"groups_per_batch": 2}, strategy=ON_POLICY)
    epoch = run.attach()
    tickets = run.post("tickets", producer="p", count=2).json()["tickets"]
    run.append(group("a"), group("b"))
    assert run.batch(0, epoch).status_code == 200
    assert run.ack(0, epoch).status_code == 200
    assert run.state()["tickets"]["out"] == len(tickets)
    assert denied(run)["blocked_on"] == run.batch(1, epoch).json()["blocked_on"] == "trainer"


def test_an_adapter_whose_tickets_are_all_out_waits_for_producers(run: RunClient) -> None:
    """Its own tickets count: the other adapter has groups for the trainer."""
    spec = {"groups_per_batch": 1}
    run.put(batch={}, adapters={"code": spec, "math": spec})
    run.append(group("c") | {"adapter": "code"})
    assert len(run.post("tickets", producer="dead", count=9, adapter="math").json()["tickets"]) == 2
    run.post("tickets", producer="p", count=9, adapter="code")
    assert denied(run, adapter="math")["detail"].startswith("tickets out: 2; ")
    assert denied(run, adapter="code")["blocked_on"] == "trainer"


def test_a_used_up_supply_waits_for_the_tickets_that_are_out(run: RunClient) -> None:
    """Told to producers as finished, for now by other producers; to the trainer as what it lacks."""
    run.put(batch={"groups_per_batch": 2}, tickets={"prompts": 2})
    epoch = run.attach()
    first, second = run.post("tickets", producer="p", count=2).json()["tickets"]
    denied = run.post("tickets", producer="q", count=1).json()["waiting"]
    assert (denied["reason"], denied["blocked_on"]) == ("finished", "producers")
    assert run.batch(0, epoch).json()["reason"] == "no_groups"
    run.append(group(None, ticket=first["ticket"]))
    assert run.batch(0, epoch).json()["reason"] == "too_few_groups"
    run.append(group(None, ticket=second["ticket"]))
    assert run.batch(0, epoch).status_code == 200

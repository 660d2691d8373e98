"""Report of a chaos run, as a table and as JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from tests.chaos.checker import GUARANTEES, Violation
from tests.chaos.faults import OTHERS
from tests.chaos.history import (
    OK,
    AnyEvent,
    Attached,
    Attacked,
    BatchAsked,
    Call,
    Faulted,
    GroupSent,
    Healed,
    LedgerSeen,
    RanksWaited,
    StateSeen,
    TicketsTaken,
    TrainerWrote,
    of_type,
)

BACK_S = 3.0
"""About the time that a restarted server needs to fold the streams."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one chaos run. `kills`: faults by role of the process and kind.

    `takeovers_s`: seconds from the fault on a leader to the first write that another server answered, per run it led;
    apart from them those during which Valkey or the other server was hurt too. `wanted`: faults that were asked for.
    """

    seed: int
    wanted: int
    wall_s: float
    kills: dict[str, dict[str, int]]
    groups_stored: int
    steps_acked: int
    bodies_served: int
    attaches: int
    rewinds: dict[str, int]
    attacks: dict[str, dict[str, int]]
    waits_of_ranks: dict[str, int]
    calls: int
    takeovers_s: list[float]
    disturbed_takeovers_s: list[float]
    ended_by_themselves: list[str]
    violations: list[Violation]

    @property
    def good(self) -> bool:
        """Whether there is no violation, no crash, and no fault was left out."""
        return not self.violations and not self.ended_by_themselves and self.done >= self.wanted

    @property
    def done(self) -> int:
        """Count the faults."""
        return sum(sum(kinds.values()) for kinds in self.kills.values())


def build(
    history: Sequence[AnyEvent],
    violations: list[Violation],
    ended: list[str],
    seed: int,
    wall_s: float,
    wanted: int = 0,
) -> Report:
    """Count what happened."""
    faults: list[Faulted] = of_type(history, Faulted)
    kills: dict[str, dict[str, int]] = {}
    for (role, kind), count in sorted(Counter((fault.role, fault.kind) for fault in faults).items()):
        kills.setdefault(role, {})[kind] = count
    takeovers = list(_takeovers(history))
    last = {seen.run: seen.state for seen in of_type(history, StateSeen)}
    records = {(seen.run, seen.entry): seen.record for seen in of_type(history, LedgerSeen)}.values()
    return Report(
        seed=seed,
        wanted=wanted,
        wall_s=round(wall_s, 1),
        kills=kills,
        groups_stored=sum(state["groups"]["stored"] for state in last.values()),
        steps_acked=sum(record["type"] == "ACK" for record in records),
        bodies_served=sum(asked.body is not None for asked in of_type(history, BatchAsked)),
        attaches=sum(bool(attached.epoch) for attached in of_type(history, Attached)),
        rewinds=dict(Counter(record["on_resume"] for record in records if record["type"] == "REWIND")),
        attacks=_attacks(history),
        waits_of_ranks=_waits_of_ranks(history),
        calls=sum(isinstance(event, Call) for event in history),
        takeovers_s=[takeover.seconds for takeover in takeovers if not takeover.disturbed],
        disturbed_takeovers_s=[takeover.seconds for takeover in takeovers if takeover.disturbed],
        ended_by_themselves=ended,
        violations=violations,
    )


def show(report: Report, console: Console) -> None:
    """Print the report."""
    table = Table("process", "killed", "stopped", title=f"chaos, seed {report.seed}", title_justify="left")
    total = Counter[str]()
    for role, kinds in report.kills.items():
        total.update(kinds)
        if kinds.keys() & {"kill", "stop"}:
            table.add_row(role, str(kinds.get("kill", 0)), str(kinds.get("stop", 0)))
    table.add_row("all", str(total["kill"]), str(total["stop"]))
    console.print(table)
    for name, value in (
        *((name, total[kind]) for kind, name in OTHERS.items()),
        (
            "answers to attacks",
            "; ".join(f"{name}: {_counts(answers)}" for name, answers in report.attacks.items()) or 0,
        ),
        ("calls of ranks", _counts(report.waits_of_ranks) or 0),
        ("groups stored", report.groups_stored),
        ("steps acked", report.steps_acked),
        ("batch bodies served", report.bodies_served),
        ("trainers attached", report.attaches),
        ("rewinds", ", ".join(f"{count} {kind}" for kind, count in report.rewinds.items()) or 0),
        ("takeovers", _spread(report.takeovers_s)),
        ("with other faults", _spread(report.disturbed_takeovers_s)),
        ("calls checked", report.calls),
        ("seconds", report.wall_s),
        ("violations", len(report.violations)),
    ):
        console.print(f"{name:>20}: {value}", highlight=False)
    for guarantee, count in sorted(Counter(violation.guarantee for violation in report.violations).items()):
        sentence = (GUARANTEES[guarantee].__doc__ or "").splitlines()[0]
        console.print(f"VIOLATED {count} times: {sentence}", highlight=False, markup=False)
        for violation in [broken for broken in report.violations if broken.guarantee == guarantee][:5]:
            console.print(f"  {violation.run}: {violation.what}", highlight=False, markup=False)
    if report.done < report.wanted:
        console.print(f"ENDED EARLY: {report.done} faults of {report.wanted}", highlight=False)
    for ended in report.ended_by_themselves:
        console.print(f"ENDED WITH AN ERROR: {ended}", highlight=False, markup=False)
    verdict = "GOOD" if report.good else "BAD"
    console.print(f"{verdict}: {report.done} faults, {len(report.violations)} violations, seed {report.seed}")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _attacks(history: Sequence[AnyEvent]) -> dict[str, dict[str, int]]:
    """Count the answers to each attack."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for attacked in of_type(history, Attacked):
        ends = {0: "ended", -1: "open"}
        answers[attacked.attack][ends.get(attacked.status, str(attacked.status))] += 1
    return {attack: dict(statuses) for attack, statuses in sorted(answers.items())}


def _waits_of_ranks(history: Sequence[AnyEvent]) -> dict[str, int]:
    total = Counter[str]()
    for waited in of_type(history, RanksWaited):
        total.update(waited.outcomes)
    return dict(total)


def _spread(times_s: Sequence[float]) -> str:
    times = sorted(times_s)
    return f"{len(times)}" + (
        f", {times[0]:.1f} to {times[-1]:.1f} s, median {times[len(times) // 2]:.1f} s" if times else ""
    )


class _Takeover(NamedTuple):
    seconds: float
    disturbed: bool


def _takeovers(history: Sequence[AnyEvent]) -> Iterator[_Takeover]:
    writes = [event for event in history if isinstance(event, Call) and _is_write(event)]
    away = list(_times_away(history))
    for fault in of_type(history, Faulted):
        for run in fault.led:
            after = (call for call in writes if call.run == run and call.sent_s > fault.at_s)
            first = min(after, key=lambda call: call.at_s, default=None)
            if first is not None and first.server != fault.server:
                others = (hurt for hurt in away if hurt.process != fault.process)
                disturbed = any(hurt.from_s < first.at_s and hurt.until_s > fault.at_s for hurt in others)
                yield _Takeover(round(first.at_s - fault.at_s, 2), disturbed)


class _Away(NamedTuple):
    process: str
    from_s: float
    until_s: float


def _times_away(history: Sequence[AnyEvent]) -> Iterator[_Away]:
    """Tell when Valkey or a server was hurt, and the time it needs to serve again."""
    since_s: dict[str, float] = {}
    for event in history:
        if isinstance(event, Faulted) and event.role in ("valkey", "leader", "standby"):
            since_s[event.process] = event.at_s
        elif isinstance(event, Healed) and event.process in since_s:
            yield _Away(event.process, since_s.pop(event.process), event.at_s + BACK_S)


def _is_write(event: Call) -> bool:
    match event:
        case GroupSent():
            return event.outcome in ("stored", "duplicate")
        case TicketsTaken() | TrainerWrote() | Attached():
            return event.outcome == OK
    return False

"""History of a chaos run: one event per answered call or observation, one JSON-lines file per process.

An event carries both instants of its call, `sent_s` and `at_s` (answered), of CLOCK_MONOTONIC, which all processes of
one machine share. A call that a kill left without an answer leaves no event: the guarantees promise nothing about it,
it may have happened or not. Each event is one `write` on a file opened with O_APPEND, so a kill loses at most the one
being written.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from replaybuf.wire.answer.browse import GroupSummary

OK = "ok"
Prompt = tuple[str, int]
"""Adapter and prompt index."""
UNAVAILABLE = ("unavailable", "not-leader", "not-durable", "no-room", "data-lost")
"""Outcomes of calls that the service did not decide; clients retry them."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that was seen at `at_s` seconds, by the clock of `now_s`; `run` is "" where no run is concerned."""

    at_s: float
    run: str = ""


class Call(Event, frozen=True, kw_only=True):
    """A call that was answered by `server`: `outcome` is `ok` or the slug of the error, `detail` the error's text."""

    sent_s: float
    server: str = ""
    outcome: str = OK
    detail: str = ""


class TicketsTaken(Call, frozen=True):
    """Tickets, as (ticket, prompt_index, attempt), of an adapter, or why there were none."""

    adapter: str = ""
    tickets: list[tuple[str, int, int]] = []
    waiting: dict[str, Any] | None = None


class TicketReturned(Call, frozen=True, kw_only=True):
    """A ticket that was given back."""

    ticket: str


class GroupSent(Call, frozen=True, kw_only=True):
    """One group of an append; `outcome` is `stored`, `duplicate`, `rejected` (with `reason`) or an error's slug."""

    group_id: str
    prompt_index: int | None
    policy_version: int
    adapter: str = ""
    reason: str | None = None

    @property
    def prompt(self) -> Prompt | None:
        """Which prompt it is the group of, if of any."""
        return None if self.prompt_index is None else (self.adapter, self.prompt_index)


class Attached(Call, frozen=True, kw_only=True):
    """A trainer attached; `epoch` 0 where it was refused."""

    resume_step: int | None
    on_resume: str
    world: int
    epoch: int = 0
    step: int = 0
    generation: int = 0


class Rollout(msgspec.Struct, frozen=True, array_like=True):
    """One rollout of a batch body: `tokens` is the checksum of its token ids (`content.checksum`).

    `micro_batch`: its row on its rank. `reference`: its late column has the values of `content.references`; None
    without that column.
    """

    group_id: str
    rollout: int
    policy_version: int
    staleness: int
    times_sampled: int
    tokens: int
    micro_batch: int = 0
    reference: bool | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch body held: `adapters` by micro-batch, `completed` own steps by adapter."""

    sha256: str
    generation: int
    batch_id: str
    digest: str
    version: int
    batch_groups: int
    rollouts: list[Rollout]
    adapters: list[str] = []
    completed: dict[str, int] = {}


class BatchAsked(Call, frozen=True, kw_only=True):
    """A rank's part of a batch: `body`, or `waiting` (why there is none), or an error in `outcome`."""

    epoch: int
    step: int
    rank: int
    world: int
    body: Body | None = None
    waiting: dict[str, Any] | None = None


class TrainerWrote(Call, frozen=True, kw_only=True):
    """An `ack` or `checkpoint` of step `value`, or a `publish` of version `value`, of an adapter."""

    kind: str
    epoch: int
    value: int
    adapter: str = ""


class StateSeen(Call, frozen=True, kw_only=True):
    """The state of a run; `moment` is `before` and `after` for the last two, around the last restart."""

    state: dict[str, Any]
    moment: str = ""


class Folded(Event, frozen=True, kw_only=True):
    """The counts of groups that the streams fold to, read from Redis at the very end."""

    groups: dict[str, Any]


class LedgerSeen(Event, frozen=True, kw_only=True):
    """One ledger entry, as `server` gave it."""

    server: str
    entry: int
    record: dict[str, Any]


class GroupSeen(Event, frozen=True, kw_only=True):
    """One group in the listing of `server`; `last`: in the listing at the very end."""

    server: str
    number: int
    group_id: str
    prompt_index: int | None
    policy_version: int
    adapter: str = ""
    state: str
    last: bool = False

    @classmethod
    def of(cls, group: GroupSummary, *, at_s: float, run: str, server: str, last: bool) -> GroupSeen:
        """Record a group of a listing."""
        return cls(
            at_s=at_s,
            run=run,
            server=server,
            number=group.number,
            group_id=group.group_id,
            prompt_index=group.prompt_index,
            adapter=group.adapter,
            policy_version=group.policy_version,
            state=group.state,
            last=last,
        )


class PayloadRead(Event, frozen=True, kw_only=True):
    """A group that may still be needed, read at the very end: checksums of its rollouts' tokens, None where gone."""

    group_id: str
    prompt_id: str
    rollouts: list[int] | None


class Drained(Event, frozen=True, kw_only=True):
    """Whether the load came to rest after the faults, and what was left if not."""

    drained: bool
    stood: str = ""


class OlderRedis(Event, frozen=True, kw_only=True):
    """An older Redis, which lacked acknowledged writes of this run, was served from `from_s` to `at_s`.

    From `right_s` on the right one answered again, and servers may report the loss until they have looked. `kind`: from
    an older file (`older`) or a lagging replica (`lagging`). `written`: parts of the run that the service changed in
    it. `silent`: servers that did not report lost data.
    """

    from_s: float
    right_s: float
    kind: str
    written: list[str]
    silent: list[str]


class RanksWaited(Event, frozen=True, kw_only=True):
    """Many ranks waited for batches from `from_s` to `at_s`: how many calls ended how."""

    from_s: float
    ranks: int
    outcomes: dict[str, int]


class Attacked(Event, frozen=True, kw_only=True):
    """A hostile request to `server`, from `from_s` to `at_s`.

    `status`: 0 = the connection ended without an answer, -1 = it was still open at the end. `sent_bytes`: what the
    server took. `beside`: status of each call that others made meanwhile.
    """

    server: str
    attack: str
    from_s: float
    status: int
    sent_bytes: int
    beside: dict[str, int]


class CursorRead(Call, frozen=True, kw_only=True):
    """A page of the run's cursor: numbers of its groups, how many `missed` before its end, what is `wrong`.

    `last`: the cursor was read to its end at rest.
    """

    numbers: list[int] = []
    missed: int = 0
    wrong: list[str] = []
    last: bool = False


class CursorMoved(Call, frozen=True, kw_only=True):
    """The groups up to `number` are done."""

    number: int


class Restored(Event, frozen=True, kw_only=True):
    """A side run was backed up, deleted, restored and trained to its end: what was not as before."""

    side: str
    differences: list[str]


class LossAccepted(Event, frozen=True, kw_only=True):
    """A side run lost acknowledged groups in a failover, and went on: what was not as the command had said."""

    side: str
    differences: list[str]


class Faulted(Event, frozen=True, kw_only=True):
    """A fault: `kind` is `kill`, `stop` or one of `faults.OTHERS`; `led` are the runs that the server `server` led."""

    process: str
    role: str
    kind: str
    server: str = ""
    led: list[str] = []


class Healed(Event, frozen=True, kw_only=True):
    """A process that was hurt goes on, or was started again."""

    process: str


AnyEvent = (
    TicketsTaken
    | TicketReturned
    | GroupSent
    | Attached
    | BatchAsked
    | TrainerWrote
    | StateSeen
    | Folded
    | LedgerSeen
    | GroupSeen
    | PayloadRead
    | Drained
    | OlderRedis
    | RanksWaited
    | Attacked
    | CursorRead
    | CursorMoved
    | Restored
    | LossAccepted
    | Faulted
    | Healed
)

_decode = msgspec.json.Decoder(AnyEvent).decode


def now_s() -> float:
    """Read the clock that all processes of this machine share."""
    return time.monotonic()


class Recorder:
    """Appends events to the file of this process. Threads may share it."""

    def __init__(self, folder: Path, name: str) -> None:
        path = folder / f"{name}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()

    def write(self, *events: Event) -> None:
        """Append events to the file, each with one write."""
        with self._lock:
            for event in events:
                os.write(self._file, msgspec.json.encode(event) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_history(folder: Path) -> list[AnyEvent]:
    """Merge the events of all processes by time, without the incomplete last line of a killed process."""
    events: list[AnyEvent] = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_bytes().split(b"\n")[:-1]
        events += [_decode(line) for line in lines]
    return sorted(events, key=lambda event: event.at_s)


def of_type(events: Sequence[AnyEvent], kind: type[Any]) -> list[Any]:
    """Keep the events of one kind."""
    return [event for event in events if isinstance(event, kind)]

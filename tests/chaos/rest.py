"""Brings a run to rest after the faults, and looks at it closely, before and after a last restart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from replaybuf.client.client import Client
from replaybuf.errors import LedgerGap
from replaybuf.kernel.state.tickets import prompt_key
from replaybuf.service.report.status import group_counts
from replaybuf.service.run.journal import Journal
from replaybuf.store import Store, keys
from replaybuf.store.redis.topology import open_reader
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.group import Group
from tests.chaos.calling import TIMEOUT_S, observed
from tests.chaos.content import checksum, make_group
from tests.chaos.history import (
    AnyEvent,
    Attached,
    BatchAsked,
    Drained,
    Folded,
    GroupSent,
    PayloadRead,
    Recorder,
    StateSeen,
    TicketsTaken,
    now_s,
)
from tests.chaos.reader import move, read_page
from tests.chaos.run_history import RunHistory
from tests.chaos.trainer import read_body
from tests.waiting import eventually

T = TypeVar("T")

DRAIN_TIMEOUT_S = 45.0
RETRY_FOR_S = 30.0
PAYLOADS_READ = 200
SENT_AGAIN = 50
FOLD_TRIES = 3
WORLD = 2
PAUSE_S = 0.2
"""Between two takes of tickets: the tickets of stored groups leave Redis a little later."""


class Rest:
    """One run on its way to rest. Trainers still go on while `drain` works."""

    def __init__(self, url: str, run: str, recorder: Recorder, redis_url: str, policies: Sequence[str] = ("",)) -> None:
        self._policies = policies
        self._run, self._recorder, self._redis_url = run, recorder, redis_url
        self._client = Client(url, run, timeout_s=TIMEOUT_S, retry_for_s=RETRY_FOR_S)
        self._epoch = 0
        self._pausing = threading.Event()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def drain(self) -> None:
        """Take every prompt that is due again and append its group, until no ticket is out and no prompt due.

        Tickets of producers that died expire first. How many are left is read where the service keeps them: a prompt
        that was given back looks, from outside, like one that was never issued.
        """
        ends_s = now_s() + DRAIN_TIMEOUT_S

        def append_due() -> int:
            if left := self._tickets_left():
                for adapter in self._policies:
                    self._append_due(adapter)
                self._pausing.wait(PAUSE_S)
            return left

        left = eventually(append_due, 2 * DRAIN_TIMEOUT_S, lambda left: not left or now_s() > ends_s)
        stood = f"{left} tickets are left: {self._client.get_run()}" if left else ""
        self._recorder.write(Drained(at_s=now_s(), run=self._run, drained=not left, stood=stood))

    def _tickets_left(self) -> int:
        with open_reader(self._redis_url, socket_timeout=TIMEOUT_S) as storage:
            return int(storage.zcard(keys.tickets(self._run)))

    def _append_due(self, adapter: str) -> None:
        client = self._client
        taken = observed(self._run, client, lambda: client.take_tickets("rest", 4, adapter, wait_ms=500))
        tickets = taken.result.tickets if taken.result else []
        named = [(ticket.ticket, ticket.prompt_index, ticket.attempt) for ticket in tickets]
        waiting = msgspec.to_builtins(taken.result.waiting) if taken.result else None
        self._recorder.write(TicketsTaken(**taken.seen, adapter=adapter, tickets=named, waiting=waiting))
        for ticket in tickets:
            name = prompt_key(adapter, ticket.prompt_index)
            version = taken.result.published_version if taken.result else 0
            group = make_group(name, version, named=False, ticket=ticket.ticket, adapter=adapter)
            self._send(name, ticket.prompt_index, group)

    # ------------------------------------------------------------------ looking

    def attach(self) -> None:
        """Attach at the current step, to ask for a batch before and after the restart."""
        client = self._client
        done = self._until_answered(lambda: client.attach(WORLD))
        self._epoch = done.epoch
        self._recorder.write(
            Attached(
                at_s=now_s(),
                run=self._run,
                sent_s=now_s(),
                server=client.address,
                resume_step=None,
                on_resume="redeliver",
                world=WORLD,
                epoch=done.epoch,
                step=done.step,
                generation=done.generation,
            )
        )

    def look(self, moment: str) -> None:
        """Write down the state, and the newest batch that is still kept."""
        client = self._client
        seen = observed(self._run, client, client.get_run)
        if seen.result is None:
            raise RuntimeError(f"run {self._run} has no state at rest: {seen.seen}")
        self._recorder.write(StateSeen(**seen.seen, state=msgspec.to_builtins(seen.result), moment=moment))
        step = seen.result.step - 1
        if step < seen.result.oldest_step:
            return
        for rank in range(WORLD):
            asked = observed(self._run, client, lambda rank=rank: client.fetch_batch(step, self._epoch, rank))  # type: ignore[misc]
            body = None if asked.result is None or isinstance(asked.result, WaitingAnswer) else read_body(asked.result)
            waiting = msgspec.to_builtins(asked.result) if isinstance(asked.result, WaitingAnswer) else None
            self._recorder.write(
                BatchAsked(
                    **asked.seen, epoch=self._epoch, step=step, rank=rank, world=WORLD, body=body, waiting=waiting
                )
            )

    def send_again(self, history: Sequence[AnyEvent]) -> None:
        """Send groups again that are stored: some, and all that nobody has seen, as their history may be trimmed."""
        events = RunHistory([event for event in history if event.run == self._run])
        stored = events.stored_groups().values()
        answered = {
            sent.group_id: (sent.adapter, sent.prompt_index) for sent in events.sent if sent.outcome == "stored"
        }
        ids, prompts = {group.group_id for group in stored}, {group.prompt for group in stored}
        unseen = events.issued() - prompts - events.failed()
        again = dict(list(answered.items())[:: len(answered) // SENT_AGAIN + 1])
        again |= {name: prompt for name, prompt in answered.items() if name not in ids}
        again |= {prompt_key(*prompt): prompt for prompt in unseen}
        for name, (adapter, prompt_index) in again.items():
            self._send(name, prompt_index, make_group(name, 0, named=True, adapter=adapter))

    def _send(self, name: str, prompt_index: int | None, group: Group) -> bool:
        """Append a group; return whether it is stored now."""
        sent = observed(self._run, self._client, lambda: self._client.append([group]))
        result = sent.result[0] if sent.result else None
        outcome = result.status if result else str(sent.seen["outcome"])
        self._recorder.write(
            GroupSent(
                **(sent.seen | {"outcome": outcome}),
                group_id=name,
                prompt_index=prompt_index,
                policy_version=group.policy_version,
                adapter=group.adapter,
                reason=result.reason if result else None,
            )
        )
        return outcome in ("stored", "duplicate")

    def read_payloads(self) -> None:
        """Read groups that may still be needed, some of each kind."""
        for state in ("live", "in_batches"):
            for listed in self._client.list_groups(state, PAYLOADS_READ).groups:
                group = self._client.get_group(listed.group_id)
                sums = None
                if group.rollouts is not None:
                    sums = [checksum(rollout.prompt_ids + rollout.completion_ids) for rollout in group.rollouts]
                self._recorder.write(
                    PayloadRead(
                        at_s=now_s(),
                        run=self._run,
                        group_id=listed.group_id,
                        prompt_id=listed.prompt_id,
                        rollouts=sums,
                    )
                )

    def read_cursor(self) -> None:
        """Read the cursor to its end."""

        def at_the_end() -> bool:
            page = read_page(self._client, self._run, self._recorder, last=True)
            return page is None or not move(self._client, self._run, self._recorder, *page)

        eventually(at_the_end, RETRY_FOR_S)

    def _until_answered(self, call: Callable[[], T]) -> T:
        done = eventually(lambda: observed(self._run, self._client, call), RETRY_FOR_S, lambda done: done.result)
        assert done.result is not None
        return done.result


async def fold(redis_url: str, run: str) -> Folded:
    """Fold the streams anew, without any service. A server may trim them between two reads: they are read again."""
    store = await Store.open(redis_url)
    try:
        for tries_left in reversed(range(FOLD_TRIES)):
            journal = Journal(run, store)
            try:
                await journal.load()
                break
            except LedgerGap:
                if not tries_left:
                    raise
        return Folded(at_s=now_s(), run=run, groups=group_counts(journal.state))
    finally:
        await store.close()

"""Appends of one run: check groups, store them, read them into the index.

Any server may store groups, not only the leader. A rewind or a change of the run may come between check and storing:
Redis then refuses to store (`CheckOutdated`), and the groups are checked again. Admission plug-ins take long, so they
are asked before.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

from msgspec import UNSET

from replaybuf.errors import (
    CheckOutdated,
    DataLost,
    GroupRejected,
    Invalid,
    InvalidGroups,
    NoRoom,
    RunFinished,
    ServiceUnavailable,
    TooLarge,
)
from replaybuf.kernel.decide.intake import NO_LOAD, decide_room, has_limits
from replaybuf.kernel.state.limits import Load
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.service.run.append.admission_plugins import AdmissionPlugins, PluginTime
from replaybuf.service.run.append.arrivals import Arrivals
from replaybuf.service.run.append.group_check import LARGE_GROUP_BYTES, GroupCheck, Incoming
from replaybuf.service.run.append.group_commit import APPEND_CHUNK, GroupCommit
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.side_state import SideState
from replaybuf.service.run.spill import Spill
from replaybuf.service.turns import Turn
from replaybuf.store import AppendResult, PendingGroup
from replaybuf.store.chunks import Chunk
from replaybuf.tracing import spans
from replaybuf.wire import contract
from replaybuf.wire.config import AdmissionSpec

logger = logging.getLogger(__name__)
_nbytes_of = operator.attrgetter("nbytes")

MOST_CHECKS = 8
"""Groups that are outdated as often have met as many changes of the run: their producer sends them again."""
SWEEP_PERIOD_S = 600.0
"""An attempt may take so long. One that takes twice as long is refused, and starts again."""


class Appends:
    """Stores the groups that producers send to one run."""

    def __init__(
        self,
        journal: Journal,
        side_state: SideState,
        selector: Selector,
        group_check: GroupCheck,
        arrivals: Arrivals,
        spill: Spill,
        admission_plugins: AdmissionPlugins,
    ) -> None:
        self._journal = journal
        self._admission_plugins = admission_plugins
        self._side_state = side_state
        self._selector = selector
        self._group_check = group_check
        self._arrivals = arrivals
        self._spill = spill
        self._entering = Load()
        self._commit = GroupCommit(self._publish)
        self.used = False
        """Whether a group came this way since the server started."""
        self.truncated = 0
        """Groups with rollouts cut to `batch.seq_len`."""

    @property
    def idle(self) -> bool:
        """Whether no group is being stored."""
        return not self._entering.groups

    async def append(self, incoming: AsyncIterator[Incoming]) -> list[contract.AppendResult]:
        """Store groups in chunks, as they arrive; return one result each.

        Raises `TooLarge`, `RunFinished` or `InvalidGroups` if all are rejected, `NoRoom` after which some may be
        stored, and what `incoming` raises.
        """
        journal = self._journal
        lead = journal.token, journal.terms
        results: list[contract.AppendResult] = []
        chunk: Chunk[Incoming] = Chunk(APPEND_CHUNK)
        plugin_time = PluginTime()
        async for item in incoming:
            if not chunk.fits(needed := item.nbytes):
                results += await self._append(chunk.take(), plugin_time)
            chunk.add(item, needed)
        if chunk.items:
            results += await self._append(chunk.items, plugin_time)
        # Last: after `NoRoom` the producer sends everything again, and rejections are counted then.
        rejected = [result.reason or "" for result in results if result.status == "rejected"]
        if rejected:
            # The token of the count proves that no other server led when the groups were rejected. A server that has
            # lost the lead since then has no token, and may lack the tickets of the next leader.
            if (journal.token, journal.terms) != lead:
                how = f"the lead of run {journal.name} changed while the groups were checked; send them again"
                raise ServiceUnavailable(how, name="leader", value=journal.leader_url)
            await self._side_state.count_rejected(Counter(rejected))
        if len(rejected) == len(results):
            raise _refusal(results)
        return results

    async def _append(self, chunk: Sequence[Incoming], plugin_time: PluginTime) -> list[contract.AppendResult]:
        specs = self._journal.config.admissions
        verdicts, overdue = await self._ask_plugins(chunk, specs, plugin_time) if specs else ([None] * len(chunk), None)
        chunk = chunk[: len(verdicts)]
        await self._spill.make_room(self._entering.in_memory + sum(map(_nbytes_of, chunk)))
        for checks_left in reversed(range(MOST_CHECKS)):
            if self._journal.config.admissions != specs:
                raise NoRoom("the admission plug-ins have changed; send the groups again", name="admissions")
            try:
                results, refusal = await self._store(chunk, verdicts)
                break
            except CheckOutdated:
                if not checks_left:
                    raise
                await self._look_again()
        if overdue := refusal or overdue:
            raise overdue
        return list(map(results.__getitem__, range(len(chunk))))

    async def _store(
        self, chunk: Sequence[Incoming], verdicts: Sequence[GroupRejected | None]
    ) -> tuple[dict[int, contract.AppendResult], NoRoom | None]:
        """Check and store groups; return their results by position, and what stops the first one without a result."""
        results: dict[int, contract.AppendResult] = {}
        taken, began_ns, checked_at = NO_LOAD, time.time_ns(), self._journal.state.entries
        try:
            ready, refused = await self._check(chunk, verdicts)
            checked, refusal = [item for _, item in ready], None
            if has_limits(self._journal.config.limits):
                fits, refusal = await self._fitting(checked)
                del checked[fits:]
            # Reserve what they take until they are in the index.
            taken = _load(checked)
            self._entering += taken
            appended = await self._commit.append(checked, checked_at)
            if spans.enabled():
                stored = [result.group_id for result in appended if result.stored]
                spans.store_groups(self._journal.name, stored, began_ns)
            if appended:
                self.used = True
                await self._arrivals.settle()
        finally:
            self._entering -= taken
        for (position, item), outcome in zip(ready, appended, strict=False):
            results[position] = _result(outcome)
            sent = chunk[position].group
            self.truncated += sent is not None and len(sent.completion_ids) > len(item.group.completion_ids)
        if refused:
            await self._answer_refused(chunk, refused, results)
        return results, refusal

    async def _look_again(self) -> None:
        """Take in what was decided since the last check. Raises `NotLeader` if this server has just lost the lead."""
        journal = self._journal
        if not journal.token:
            await self._arrivals.read_streams()
            await self._side_state.reload_followed()
        if journal.token:  # this server leads, or takes over meanwhile
            async with journal.decision():
                pass

    async def _ask_plugins(
        self, chunk: Sequence[Incoming], specs: Sequence[AdmissionSpec], plugin_time: PluginTime
    ) -> tuple[list[GroupRejected | None], NoRoom | None]:
        """Return what the admission plug-ins say about the first groups, and why the next one was not asked about.

        They see no group that is rejected without them, and no repeat of a stored one.
        """
        journal, verdicts = self._journal, list[GroupRejected | None]()
        identities = [self._group_check.identity(item) for item in chunk]
        numbers = await journal.store.groups.find_numbers(journal.name, [name for pair in identities for name in pair])
        for item, by_id, by_prompt in zip(chunk, numbers[::2], numbers[1::2], strict=True):
            verdict = None
            if by_id is None and by_prompt is None:
                try:
                    pending = await self._check_one(item)
                    verdict = await self._admission_plugins.check(pending, specs, plugin_time.until_s)
                except GroupRejected:
                    pass  # for a reason that is found again before it is stored
                except NoRoom as error:
                    return verdicts, error
            verdicts.append(verdict)
        return verdicts, None

    async def _check(
        self,
        chunk: Sequence[Incoming],
        verdicts: Sequence[GroupRejected | None],
    ) -> tuple[list[tuple[int, PendingGroup]], dict[int, GroupRejected]]:
        """Return accepted groups with their position, and why the others are refused, by position."""
        journal = self._journal
        ready: dict[int, PendingGroup] = {}
        refused: dict[int, GroupRejected] = {}
        led, term = journal.leading, journal.terms
        await self._check_each(chunk, verdicts, range(len(chunk)), ready, refused)
        if refused and not (led and journal.leading and journal.terms == term):
            # The leader may know tickets, versions and adapters that have not come here yet.
            await self._look_again()
            unclear = list(refused)
            refused.clear()
            await self._check_each(chunk, verdicts, unclear, ready, refused)
        return sorted(ready.items()), refused

    async def _check_each(
        self,
        chunk: Sequence[Incoming],
        verdicts: Sequence[GroupRejected | None],
        positions: Iterable[int],
        ready: dict[int, PendingGroup],
        refused: dict[int, GroupRejected],
    ) -> None:
        turn = Turn()
        for position in positions:
            try:
                pending = await self._check_one(chunk[position])
                if verdict := verdicts[position]:
                    raise verdict
                ready[position] = pending
            except GroupRejected as rejection:
                refused[position] = rejection
            if len(chunk) > 1:
                await turn.pause()

    async def _check_one(self, item: Incoming) -> PendingGroup:
        if item.nbytes <= LARGE_GROUP_BYTES:
            return self._group_check.check(item)
        return await asyncio.to_thread(self._group_check.check, item)

    async def _answer_refused(
        self,
        chunk: Sequence[Incoming],
        refused: Mapping[int, GroupRejected],
        results: dict[int, contract.AppendResult],
    ) -> None:
        """Answer `duplicate` for a repeat of a stored group, even if a bound has changed since; else `rejected`."""
        journal = self._journal
        with journal.recording_refusals():
            identities = [self._group_check.identity(chunk[position]) for position in refused]
            repeats = await journal.store.groups.find_repeats(journal.name, identities)
        for (position, rejection), repeat in zip(refused.items(), repeats, strict=True):
            self._side_state.duplicates += repeat is not None
            named = chunk[position].group or chunk[position]
            results[position] = _result(repeat) if repeat else _rejected(named.group_id, rejection)

    async def _publish(self, items: list[PendingGroup], checked_at: int) -> list[AppendResult]:
        """Store and fold groups; `checked_at`: newest ledger entry that they were checked against."""
        journal = self._journal
        try:
            appended = await journal.store.groups.append(
                journal.name, items, journal.state.published, journal.clock.wall(), checked_at
            )
        except DataLost as error:
            journal.lose(error)
            raise
        await journal.fold_published(appended)
        for outcome in appended:
            if outcome.entry is None:
                self._side_state.duplicates += not outcome.taken
            elif outcome.entry.source:
                journal.presence.record_source(outcome.entry.source)
        return appended

    async def _fitting(self, items: Sequence[PendingGroup]) -> tuple[int, NoRoom | None]:
        """Return how many of the first groups fit, and the bound that stops the next one.

        A stored group takes no space. Its ticket tells whether it is stored; Redis is asked only if a bound is met.
        """
        loads = [_load([item]) for item in items]
        fits, refusal = self._fit(loads, [self._has_group(item) for item in items])
        if refusal:
            store, name = self._journal.store, self._journal.name
            numbers = await store.groups.find_numbers(name, [item.group_id for item in items])
            stored = [n is not None or self._has_group(item) for item, n in zip(items, numbers, strict=True)]
            fits, refusal = self._fit(loads, stored)
        return fits, refusal

    def _fit(self, loads: Sequence[Load], stored: Sequence[bool]) -> tuple[int, NoRoom | None]:
        coming = [NO_LOAD if there else load for load, there in zip(loads, stored, strict=True)]
        return decide_room(self._journal.state, self._selector, coming, self._entering, self._spill.state.use.in_memory)

    def _has_group(self, item: PendingGroup) -> bool:
        """Return whether the group of a ticket's prompt is stored."""
        if not item.prompt_key or item.group.prompt_index is None:
            return False
        prompt = item.group.adapter, item.group.prompt_index
        return not self._side_state.book.awaits(prompt) and prompt not in self._journal.state.failed.prompts


def _refusal(results: list[contract.AppendResult]) -> Invalid | TooLarge | RunFinished:
    if not results:
        return Invalid("groups is empty; send at least 1 group", name="groups", value=0, bound=1)
    first = results[0]
    detail = first.detail or ""
    if all(result.reason == "too_large" for result in results):
        return TooLarge(detail, name=first.name, value=first.value, bound=first.bound)
    if all(result.reason == "run_finished" for result in results):
        how = 'PATCH {"state": "running"} opens a run again that did not reach max_steps'
        return RunFinished(f"{detail}; {how}", name="groups", value="run_finished")
    which = "the group was rejected" if len(results) == 1 else f"all {len(results)} groups were rejected; the first"
    return InvalidGroups(f"{which}: {first.reason}: {detail}", results, name="groups", value=first.reason)


def _result(outcome: AppendResult) -> contract.AppendResult:
    if outcome.taken:
        detail = f"group {outcome.group_id!r} is stored and is not of this ticket's prompt; use another group_id"
        return _rejected(outcome.group_id, GroupRejected("group_id_taken", detail))
    return contract.AppendResult(group_id=outcome.group_id, status="stored" if outcome.stored else "duplicate")


def _rejected(group_id: str | None, rejection: GroupRejected) -> contract.AppendResult:
    named = rejection.name is not None
    return contract.AppendResult(
        group_id=group_id,
        status="rejected",
        reason=rejection.reason,
        detail=rejection.detail,
        name=rejection.name,
        value=rejection.value if named else UNSET,
        bound=rejection.bound if named else UNSET,
    )


def _load(items: Sequence[PendingGroup]) -> Load:
    tokens = nbytes = 0
    for item in items:
        tokens += item.group.tokens
        nbytes += len(item.frame)
    return Load(len(items), tokens, nbytes, nbytes)


class AttemptSweep:
    """Deletes what append attempts left behind that were cut between their two steps, on a Redis Cluster."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._next_s = journal.clock.monotonic() + SWEEP_PERIOD_S

    async def tick(self) -> None:
        """Sweep when it is due. Raises `NotLeader`."""
        journal = self._journal
        if journal.store.groups.buckets is None or journal.clock.monotonic() < self._next_s:
            return
        self._next_s = journal.clock.monotonic() + SWEEP_PERIOD_S
        if swept := await journal.store.groups.sweep(journal.name, journal.token):
            logger.info("cut appends removed run=%s payloads=%d", journal.name, swept)

"""One run: wires its parts, starts and stops them, changes its configuration.

Life: `Run.create`, or `Run.load` (fold of both streams) and, with the lease, `lead` -> requests and `tick` -> `close`.

Who holds whom: journal <- side state <- tickets <- arrivals <- appends;  journal <- eviction <- batches;
tickets <- batches <- trainer calls.
"""

from __future__ import annotations

import logging
import math

import msgspec

from replaybuf.errors import Conflict, ReplaybufError
from replaybuf.kernel.decide.config import check_deletable, check_revision, decide_create, decide_patch
from replaybuf.kernel.decide.records import decide_purge
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.tickets import TicketBook, prompt_key
from replaybuf.kernel.strategy.plugin_set import resolve_config
from replaybuf.kernel.strategy.rates import MeasuredRates, Rates
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.service.clock import SYSTEM_CLOCK, Clock
from replaybuf.service.report.state_cache import StateCache
from replaybuf.service.run.append.admission_plugins import AdmissionPlugins
from replaybuf.service.run.append.appends import Appends, AttemptSweep
from replaybuf.service.run.append.arrivals import Arrivals
from replaybuf.service.run.append.eviction import Eviction
from replaybuf.service.run.append.group_check import GroupCheck
from replaybuf.service.run.append.late_columns import LateColumnWriter
from replaybuf.service.run.batches import Batches
from replaybuf.service.run.cursors import Cursors
from replaybuf.service.run.evaluations import RecordedEvaluations
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.lease_timer import LeaseTimer
from replaybuf.service.run.samples import Samples
from replaybuf.service.run.side_state import SideState
from replaybuf.service.run.spill import Spill
from replaybuf.service.run.tickets import Tickets
from replaybuf.service.run.trainer_calls import TrainerCalls
from replaybuf.service.run.trimming import Trimming
from replaybuf.store import Ends, RunTickets, Store
from replaybuf.wire.answer.run_status import ChosenStrategy, RunStatus
from replaybuf.wire.config import RunConfig, read_config
from replaybuf.wire.config_patch import ConfigPatch, differing_fields

logger = logging.getLogger(__name__)

LONGEST_LOGGED = 500
"""Characters of a change in the log; the ledger has all of it."""
QUIET_AFTER_S = 10.0
"""A run without a change for so long, without tickets out, heartbeats and clients that call, is quiet."""
SILENT_S = 60.0
DIRECT_WRITES_S = 60.0
"""For so long after a direct write of a producer, its index is read as soon as it grows, not once a second."""


class Run:
    """One run: `appends` stores groups, `tickets` admits them, `batches` serves them to the trainer of `trainer_calls`.

    `selector` calls the strategy, `journal` keeps state and ledger, `rates` are measured by this server.
    """

    def __init__(self, journal: Journal) -> None:
        tickets = journal.config.tickets
        self.journal = journal
        self.book = TicketBook(tickets.ttl_s, tickets.max_attempts, journal.config.supplies)
        self.side_state = SideState(journal, self.book)
        self.rates = Rates(journal.clock.monotonic())
        self.selector = Selector(journal.name, journal.state, self.book, journal.clock.monotonic, self.rates)
        self.eviction = Eviction(journal, self.selector, self.book)
        self.tickets = Tickets(journal, self.side_state, self.selector, self.rates)
        self.arrivals = Arrivals(journal, self.tickets, self.eviction, self.rates)
        self.group_check = GroupCheck(journal, self.book)
        self.admission_plugins = AdmissionPlugins(journal)
        self.spill = Spill(journal, self.selector)
        self.attempt_sweep = AttemptSweep(journal)
        self.appends = Appends(
            journal,
            self.side_state,
            self.selector,
            self.group_check,
            self.arrivals,
            self.spill,
            self.admission_plugins,
        )
        self.batches = Batches(journal, self.selector, self.eviction, self.tickets)
        self.late_columns = LateColumnWriter(journal, self.arrivals, self.eviction, self.spill)
        self.cursors = Cursors(journal)
        self.evaluations = RecordedEvaluations(journal)
        self.samples = Samples(journal, self.batches)
        self.trainer_calls = TrainerCalls(
            journal, self.selector, self.eviction, self.batches, self.rates, self.cursors, self.samples
        )
        self.trimming = Trimming(journal)
        self.state_cache = StateCache(journal.name, journal.state, self.book, self.selector, journal.clock)
        self.lease = LeaseTimer(journal.clock.monotonic)
        self.durability = "strict"
        self._direct_writes_until_s = -math.inf
        self._seen_changes = -1
        self._busy_until_s = -math.inf

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.journal.name

    @property
    def state(self) -> RunState:
        """State of the run."""
        return self.journal.state

    @property
    def takes_groups_anywhere(self) -> bool:
        """Whether followers store groups too: the admission plug-ins and the spill are the leader's alone."""
        return not (self.journal.config.admissions or self.journal.config.spill)

    @property
    def measured(self) -> MeasuredRates:
        """Measured speed of producers and trainer."""
        return self.rates.measure(self.journal.clock.monotonic())

    # ------------------------------------------------------------------ life

    @classmethod
    async def create(
        cls, name: str, store: Store, token: str, config: RunConfig, clock: Clock = SYSTEM_CLOCK, *, by: str = ""
    ) -> Run:
        """Write the first ledger record of a new run and lead it. Raises `Invalid`."""
        record = msgspec.structs.replace(decide_create(config, clock.wall()), by=by)
        journal = Journal(name, store, clock)
        await store.runs.add(name)
        async with journal.taking_over(token):
            await journal.append(record)
        return cls(journal)

    @classmethod
    async def load(cls, name: str, store: Store, clock: Clock = SYSTEM_CLOCK) -> Run | None:
        """Rebuild a run from its streams, as a follower; None if its creation never finished."""
        journal = Journal(name, store, clock)
        await journal.load()
        if journal.state.config is None:
            return None
        # Only appends read these keys. One of another type makes the run unreadable now, not its appends later.
        await store.groups.find_numbers(name, [prompt_key(adapter, 0) for adapter in ("", *journal.config.adapters)])
        run = cls(journal)
        await run.side_state.reload()
        return run

    async def lead(self, token: str, ends: tuple[int, int] | None = None) -> None:
        """Read all that the older leader wrote, then decide from here on. Raises `DataLost`.

        `ends`: newest ledger entry and group when Redis gave us the token; what is folded already is not read again.
        """
        quiet, before = self.quiet(), self.journal.ends
        async with self.journal.taking_over(token, ends):
            self.book.forget_issued()
            await self.tickets.reload()
            self.tickets.start_over()
            await self.cursors.take_over()
            await self.evaluations.take_over()
            await self.samples.take_over()
            await self.spill.take_over()
            await self.eviction.take_over()
        self.journal.notify()
        if quiet and self.journal.ends == before:  # else a takeover of many runs would make all of them busy
            self._seen_changes = self.journal.changes

    def wake(self) -> None:
        """Wake every waiter, now and later; each gets its waiting answer."""
        self.journal.close()

    def close(self) -> None:
        """Wake every waiter, and close what the work of this run needs: nothing of it may go on."""
        self.wake()
        self.spill.close()
        self.admission_plugins.close()

    @property
    def written_by_others(self) -> bool:
        """Whether another server leads, or producers write to Redis themselves; before the first append all may."""
        written_directly = not self.appends.used or self.journal.clock.monotonic() < self._direct_writes_until_s
        return not self.journal.leading or written_directly

    def quiet(self, for_s: float = 0.0) -> bool:
        """Return whether nothing has happened in the run, `for_s` long: periodic work then looks at it more rarely."""
        journal, now_s = self.journal, self.journal.clock.monotonic()
        if journal.changes != self._seen_changes or journal.lost or self.book.out:
            self._seen_changes, self._busy_until_s = journal.changes, now_s + QUIET_AFTER_S
        presence = journal.presence
        trained = self.state.epoch and presence.trainer_s <= SILENT_S
        produced = presence.producers_s is not None and presence.producers_s <= SILENT_S
        watched = trained or produced or presence.producers.any_announced()
        return now_s >= self._busy_until_s + for_s and not watched

    async def read_streams(self) -> None:
        """Read what is new in the streams."""
        await (self._pull() if self.journal.leading else self.arrivals.read_streams())

    async def check_ends(self, shown: Ends | ReplaybufError) -> None:
        """Check that Redis kept what it acknowledged; read groups that producers wrote to it directly."""
        self.journal.check_ends(shown)
        if self.journal.leading and isinstance(shown, Ends) and shown.group > self.state.stored:
            await self._pull()

    async def _pull(self) -> None:
        """Read new groups. If no append is under way, producers wrote them directly."""
        stored, idle = self.state.stored, self.appends.idle
        await self.arrivals.pull()
        if idle and self.state.stored > stored:
            self._direct_writes_until_s = self.journal.clock.monotonic() + DIRECT_WRITES_S

    def restore_side_state(self, stored: RunTickets | ReplaybufError, term: int) -> None:
        """Replace a follower's tickets and counters by those of the leader; `term` was ours when they were read.

        Raises what was wrong with them.
        """
        if isinstance(stored, ReplaybufError):
            raise stored
        self.side_state.restore_followed(stored, term)

    async def tick(self) -> None:
        """Do what time requires: what a leader owes, and a look at why the run waits."""
        if self.journal.leading:
            await self._tick_leader()
        self.admission_plugins.tick()
        self.state_cache.look()

    async def _tick_leader(self) -> None:
        """Expire tickets and cursors, finish an exhausted run, keep samples, delete freed payloads, trim."""
        await self.arrivals.settle()
        await self.side_state.write_removed()
        await self.tickets.take_back(heard=not self.lease.ended())
        await self.tickets.expire()
        await self.tickets.apply_failed_rule()
        if all(self.book.prompts_exhausted(name) for name in self.journal.config.kept_adapters):
            await self.batches.end_if_exhausted()
        await self.samples.keep()
        await self.journal.free_payloads(self.spill.forget)
        self.spill.start()
        await self.trimming.tick()
        await self.attempt_sweep.tick()
        await self.cursors.expire()

    # ------------------------------------------------------------------ operator

    async def patch(self, patch: ConfigPatch, revision: int | None = None, *, by: str = "") -> None:
        """Change plug-ins, limits, adapters or status of a live run. Raises `Conflict`, `Invalid`.

        `revision`: that of the status that the caller has seen; None = any. `by`: who does it, for the ledger.
        """
        journal = self.journal
        async with journal.decision():
            check_revision(self.state, revision)
            record = decide_patch(self.state, patch, journal.clock.wall())
            if record is None:
                return
            await journal.append(msgspec.structs.replace(record, by=by))
            changes = {name: part for name, part in msgspec.to_builtins(patch).items() if part is not None}
            change = msgspec.json.encode(changes).decode()[:LONGEST_LOGGED]
            logger.info("run changed run=%s by=%s change=%s", self.name, by or "-", change)
            self.tickets.follow_config()
        await self.eviction.evict_all()
        journal.notify()

    def preview(self, patch: ConfigPatch, revision: int | None = None) -> RunStatus:
        """Return the status that a change would give, and change nothing. Raises `Conflict`, `Invalid`."""
        check_revision(self.state, revision)
        record, status = decide_patch(self.state, patch, self.journal.clock.wall()), self.describe()
        if record is None:
            return status
        config = read_config(record.config, "the change")
        spec = config.strategy
        return msgspec.structs.replace(
            status,
            state=record.state,
            strategy=ChosenStrategy(name=spec.name, options=spec.options),
            config=msgspec.to_builtins(config),
        )

    async def delete(self) -> None:
        """Record that the run is deleted, and stop deciding. Raises `Conflict` unless it is finished."""
        async with self.journal.decision():
            check_deletable(self.state, self.name)
            await self.journal.store.runs.mark_deleted(self.name, self.journal.check_leading())
            self.journal.become_follower(None)

    async def purge(self, *, by: str = "") -> int:
        """Delete the bytes of dead letters, except those in batches that may be requested again; return how many.

        `by`: who does it, for the ledger.
        """
        purged = 0
        while True:
            async with self.journal.decision():
                record = decide_purge(self.state, self.journal.clock.wall())
                if record is None:
                    return purged
                await self.journal.append(msgspec.structs.replace(record, by=by))
            purged += len(record.numbers)
            logger.info("dead letters purged run=%s groups=%d by=%s", self.name, len(record.numbers), by)

    def check_config(self, config: RunConfig) -> None:
        """Raise `Conflict` if `config` differs from the run's, which may be older than some options."""
        ours, wanted = self.journal.config, resolve_config(config)[0]
        fields = differing_fields(ours, wanted) and differing_fields(resolve_config(ours)[0], wanted)
        if fields:
            detail = (
                f"run {self.name!r} exists with another configuration; these fields differ: {', '.join(fields)}. "
                "Change strategy, filters, limits or adapters with PATCH, keep the stored configuration with PUT "
                "?if_absent=true, or choose another name"
            )
            raise Conflict(detail, name="config", value=fields, bound="the stored configuration")

    def describe(self) -> RunStatus:
        """Render the state of the run."""
        return self.state_cache.state(
            durability=self.durability,
            rejected=dict(self.side_state.rejected),
            presence=self.journal.presence,
            spill=self.spill.describe(),
        )

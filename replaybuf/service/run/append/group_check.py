"""Check a group before it is stored: its ticket, its contents, its size. A group is accepted or rejected whole."""

from __future__ import annotations

import contextlib

import msgspec

from replaybuf.errors import GroupRejected, Invalid, NotFound, TooLarge, counted
from replaybuf.kernel.state.history import lost_version_since
from replaybuf.kernel.state.tickets import TicketBook, parse_ticket
from replaybuf.kernel.strategy.advantages import group_advantages
from replaybuf.service.run.journal import Journal
from replaybuf.store import PendingGroup
from replaybuf.wire.config import RunConfig
from replaybuf.wire.frame import encode_frame, is_compressed, stored_checksum
from replaybuf.wire.group import Group
from replaybuf.wire.group_check import GroupLimits, check_group, truncate

LARGE_GROUP_BYTES = 1 << 20
"""A larger group is decoded and checked in a thread: at 64 MiB that takes up to a second."""


class Incoming(msgspec.Struct, frozen=True):
    """One group of a request: its columns and its frame (None = sent as JSON), or why it does not decode.

    `group_id`, `ticket`: of a group that does not decode, if they are known. `nbytes`: of its columns.
    """

    group: Group | None
    frame: bytes | memoryview | None = None
    rejection: GroupRejected | None = None
    group_id: str | None = None
    ticket: str | None = None
    nbytes: int = 0

    def __post_init__(self) -> None:
        """Count the bytes once: they are asked for at each step."""
        if self.group is not None:
            msgspec.structs.force_setattr(self, "nbytes", self.group.nbytes)


class GroupCheck:
    """Checks the groups of one run."""

    def __init__(self, journal: Journal, book: TicketBook) -> None:
        self._journal = journal
        self._book = book
        self._limits: dict[str, tuple[int, GroupLimits]] = {}

    def identity(self, item: Incoming) -> tuple[str, str]:
        """Return group id and prompt key, as Redis compares groups; "" for a missing one."""
        named, key = item.group or item, ""
        if named.ticket is not None:
            with contextlib.suppress(NotFound):
                key = parse_ticket(named.ticket).key
        return named.group_id or key, key

    def check(self, item: Incoming) -> PendingGroup:
        """Return the group with advantages, frame and checksum. Raises `GroupRejected`."""
        if item.rejection or item.group is None:
            raise item.rejection or GroupRejected("broken_frame", "the group does not decode")
        if self._journal.state.phase == "finished":
            raise GroupRejected("run_finished", f"run {self._journal.name} is finished and takes no groups")
        config = self._journal.config
        frame = item.frame
        group_id, key, group = self._identify(item.group)
        if config.batch.overlong == "truncate":
            cut = truncate(group, config.batch.seq_len)
            if cut is not group:
                group, frame = cut, None
        rejection = check_group(group, self._limits_of(group.adapter, config))
        if rejection:
            raise GroupRejected(rejection.reason, rejection.detail)
        if group.advantages is None:
            try:
                filled = group_advantages(config.advantage, group)
            except Invalid as error:
                raise GroupRejected("non_finite_advantages", error.detail) from None
            group, frame = msgspec.structs.replace(group, advantages=filled), None
        if frame is None:
            frame = _encode(group, compress=item.frame is not None and is_compressed(item.frame))
        largest = config.limits.max_group_bytes
        if len(frame) > largest:
            raise GroupRejected(
                "too_large",
                f"the group has {counted(len(frame), 'byte')}; limits.max_group_bytes is {largest}",
                name="limits.max_group_bytes",
                value=len(frame),
                bound=largest,
            )
        ticket_s = None if group.ticket is None else self._ticket_s(group.ticket)
        return PendingGroup(group, group_id, key, frame, stored_checksum(frame), ticket_s)

    def _ticket_s(self, ticket: str) -> float | None:
        """Return when a ticket was issued, by the wall clock; None if it is no longer out."""
        clock = self._journal.clock
        age_s = self._book.age_s(parse_ticket(ticket), clock.monotonic())
        return None if age_s is None else clock.wall() - age_s

    def _identify(self, group: Group) -> tuple[str, str, Group]:
        """Return group id, prompt key ("" without a ticket) and the group with its prompt index."""
        if group.ticket is None:
            if not group.group_id:
                raise GroupRejected("missing_group_id", "group_id is missing; a group without a ticket needs one")
            return group.group_id, "", group
        try:
            ticket = parse_ticket(group.ticket)
        except NotFound as error:
            raise GroupRejected("unknown_ticket", error.detail) from None
        state = self._journal.state
        issued = ticket.generation <= state.generation and ticket.reissue <= state.reissues.count(ticket.prompt)
        issued = issued and self._book.may_have_issued(ticket)
        if ticket.adapter != group.adapter or not issued:
            raise GroupRejected("unknown_ticket", f"ticket {group.ticket!r} was not issued, or for another adapter")
        if group.prompt_index not in (None, ticket.prompt_index):
            raise GroupRejected(
                "wrong_prompt_index",
                f"prompt_index is {group.prompt_index}; ticket {group.ticket} is for {ticket.prompt_index}",
            )
        lost_from = lost_version_since(state.rewinds.get(ticket.adapter, []), ticket.generation)
        if lost_from is not None and group.policy_version_max > lost_from:
            raise GroupRejected(
                "lost_lineage",
                f"the newest policy version is {group.policy_version_max}; after ticket {group.ticket} was issued a "
                f"rewind went back to version {lost_from}",
            )
        key = ticket.key
        return group.group_id or key, key, msgspec.structs.replace(group, prompt_index=ticket.prompt_index)

    def _limits_of(self, adapter: str, config: RunConfig) -> GroupLimits:
        """Return the limits of groups of an adapter; only a ledger record changes them."""
        state = self._journal.state
        since, limits = self._limits.get(adapter, (-1, None))
        if limits is None or since != state.entries:
            limits = GroupLimits(
                published_version=state.published.get(adapter),
                adapters=frozenset(name for name, spec in config.adapters.items() if not spec.removed),
                group_size=config.group_size,
                min_group_size=config.min_group_size,
                vocab_size=config.vocab_size,
                seq_len=config.batch.seq_len,
                tokens_per_batch=state.token_budget,
            )
            if adapter in limits.adapters or not adapter:  # else the names that producers invent would be kept
                self._limits[adapter] = state.entries, limits
        return limits


def _encode(group: Group, *, compress: bool) -> bytes:
    try:
        return encode_frame(group, compress=compress)
    except TooLarge as error:
        raise GroupRejected("too_large", error.detail, name=error.name, value=error.value, bound=error.bound) from None

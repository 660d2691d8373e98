"""Tickets and counters of runs, as other servers have written them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from replaybuf.service.run.served_run import Run
from replaybuf.store import Store


async def read_side_states(store: Store, runs: Sequence[Run], *, shared: bool) -> list[tuple[Run, Callable[[], None]]]:
    """Read what is to be taken over for each run, in two round trips; return what takes it over.

    On a follower tickets and counters; on a leader the counts of appends, which other servers add to (`shared`).
    """
    followed = [(run, run.journal.terms) for run in runs if not run.journal.leading]
    led = [run for run in runs if shared and run.journal.leading and run.takes_groups_anywhere]
    books = await store.tickets.read([run.name for run, _ in followed])
    counts = await store.counters.read_each([run.name for run in led])
    restored: list[tuple[Run, Callable[[], None]]] = [
        (run, functools.partial(run.restore_side_state, book, term))
        for (run, term), book in zip(followed, books, strict=True)
    ]
    return restored + [
        (run, functools.partial(run.side_state.restore_appends, own))
        for run, own in zip(led, counts, strict=True)
        if own
    ]

"""How adapters share the budget of a batch: in turns, group by group, and the turn goes on in the next batch.

Pure: what is ready and whose turn it is in, who gives how many groups and whose turn is next out. `Turns` is all that
has to be kept between batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from replaybuf.strategy import Budget


class Progress(msgspec.Struct, frozen=True):
    """How far an adapter is: `steps` it completed, `groups` it gave to the step it is in (0 <= groups < batch size)."""

    steps: int = 0
    groups: int = 0


class Turns(msgspec.Struct, frozen=True):
    """Whose turn is next ("" = the first of all, by name) and how far each adapter is."""

    next: str = ""
    progress: dict[str, Progress] = {}


class Share(msgspec.Struct, frozen=True):
    """`groups`: how many each adapter gives, those at the head of its queue; `completed`: adapters that end a step."""

    groups: dict[str, int]
    completed: tuple[str, ...]
    turns: Turns


def share(queues: Mapping[str, Sequence[int]], batch_sizes: Mapping[str, int], budget: Budget, turns: Turns) -> Share:
    """Share a budget between adapters: tokens of their ready groups, oldest first, and groups per step of each.

    Adapters take turns by name, from `turns.next` on, one group each, until none may give another: its queue is empty,
    its step is complete, its next group does not fit, or the batch has `budget.groups`. An adapter gives no more than
    its step lacks: one batch is at most one step of each. Who was passed over because its group did not fit is the
    first of the following batch, so that long groups do not starve. Batch sizes >= 1.
    """
    names = sorted(queues)
    start = next((at for at, name in enumerate(names) if name >= turns.next), 0)
    waiting = names[start:] + names[:start]
    given = dict.fromkeys(names, 0)
    room, passed_over = budget.tokens, ""
    following = turns.next
    while waiting and (budget.groups is None or sum(given.values()) < budget.groups):
        name = waiting.pop(0)
        before = turns.progress.get(name, Progress()).groups
        if given[name] == len(queues[name]) or before + given[name] == batch_sizes[name]:
            continue
        tokens = queues[name][given[name]]
        if room is not None and tokens > room:
            passed_over = passed_over or name
            continue
        room = None if room is None else room - tokens
        given[name] += 1
        following = names[(names.index(name) + 1) % len(names)]
        waiting.append(name)
    progress, completed = dict(turns.progress), []
    for name in names:
        old = progress.get(name, Progress())
        groups = old.groups + given[name]
        if groups == batch_sizes[name]:
            completed.append(name)
            progress[name] = Progress(old.steps + 1, 0)
        else:
            progress[name] = Progress(old.steps, groups)
    return Share(given, tuple(completed), Turns(passed_over or following, progress))

"""What an adapter checks: the release of its framework, settings of the run, and that batches have an equal size."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import NamedTuple

from replaybuf.errors import Conflict, Invalid, counted
from replaybuf.wire.batch import BatchMeta


class Needed(NamedTuple):
    """The rollouts that each batch must have, and why."""

    rollouts: int
    why: str


def warn_if_untested(adapter: str, package: str, first: str, below: str) -> None:
    """Warn if the installed release of `package` is outside `first` <= release < `below`, such as 1.16 and 1.17."""
    installed = version(package)
    if not _numbers(first) <= _numbers(installed) < _numbers(below):
        warnings.warn(
            f"{package} is {installed}; {adapter} is tested with {first} up to but not {below}: run its tests, or "
            "install a tested release",
            stacklevel=3,
        )


def check_run_settings(run: str, needed: Mapping[str, tuple[object, object, str]]) -> None:
    """Raise `Invalid` for the first setting of a run that does not fit: name -> (its value, the needed one, why)."""
    for name, (value, wanted, why) in needed.items():
        if value != wanted:
            raise misfit(f"run {run}: {name}", value, f"{wanted} ({why})")


def check_size(meta: BatchMeta, needed: Needed) -> None:
    """Raise `Conflict` for a batch that is not the step of a trainer whose steps have an equal number of rollouts.

    Such a trainer would wait for ever for the rest of the step, or train other rollouts than the ledger says.
    """
    if meta.batch_rollouts == needed.rollouts:
        return
    raise Conflict(
        f"the batch of step {meta.step} has {counted(meta.batch_rollouts, 'rollout')} in "
        f"{counted(meta.batch_groups, 'group')}; needed: "
        f"{needed.rollouts} ({needed.why}). It was not trained. Make both equal: change the trainer, or the batches: "
        "give its groups back with Client.attach(on_resume='resample'), PATCH batch.groups_per_batch, and start the "
        "trainer again. A token budget, timeout_s, min_group_size and tail also make short batches: unset them",
        name="batch_rollouts",
        value=meta.batch_rollouts,
        bound=needed.rollouts,
    )


def misfit(name: str, value: object, bound: str) -> Invalid:
    """Return the error of a setting that does not fit."""
    return Invalid(f"{name} is {value}; needed: {bound}", name=name, value=str(value), bound=bound)


def _numbers(release: str) -> tuple[int, ...]:
    """Return the numbers at the start of a release: 1.16.0rc1 -> 1, 16."""
    parts = release.split(".")
    known = next((at for at, part in enumerate(parts) if not part.isdecimal()), len(parts))
    return tuple(int(part) for part in parts[:known])

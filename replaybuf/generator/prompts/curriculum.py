"""Several sources of prompts, mixed by weights that hold from one prompt index on, and may be changed while runs go on.

A curriculum file (TOML) names sources and stages::

    [[sources]]
    name = "words"
    prompts = "words.parquet"

    [[sources]]
    name = "sums"
    prompts = "reasoning-gym:chain_sum"

    [[stages]]
    weights = { words = 3, sums = 1 }

    [[stages]]
    from_prompt_index = 20000
    weights = { words = 1, sums = 1 }

Tickets carry an index and nothing else, and several generators must mean the same prompt by it. So weights are a
function of the index, not of the time: the file is read again when it changes, and a change is taken only where it
leaves every stage alone that an index given out here already fell into. Whoever changes weights appends a stage behind
the tickets issued so far, and replaces the file in one move. Each group's metadata records the stage in force.

In a stage of weights w every 1000 indices hold each source exactly round(1000 w / sum(w)) times, in an order made from
(seed, index). A source's own prompts come in its own order, each once per epoch of that source.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import Invalid
from replaybuf.generator.environments.contract import TASKSET
from replaybuf.generator.prompts.prompt import Encoder, Prompt, PromptOrder, Prompts
from replaybuf.generator.prompts.sources import GYM, Endless, Source, open_source

logger = logging.getLogger(__name__)

BLOCK = 1000
"""Indices within which each source has exactly its share; 1 / BLOCK is the smallest one."""
_BLOCKS_KEPT = 16


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Weights by source, from one prompt index up to the next stage. Sources that are not named have none."""

    from_prompt_index: int = 0
    weights: dict[str, float]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A curriculum file. Without stages all sources weigh the same."""

    sources: list[Source]
    stages: list[Stage] = []


class Schedule:
    """Which source an index falls to, and which place in it that is; a pure function of (stages, seed).

    `names` are the sources. Raises `Invalid` where stages do not start at 0 and rise, or weights are none.
    """

    def __init__(self, stages: Sequence[Stage], names: Sequence[str], *, seed: int) -> None:
        self.stages = tuple(stages)
        self._names = tuple(names)
        self._seed = seed % (1 << 64)
        self._starts = [stage.from_prompt_index for stage in stages]
        if not self._starts or self._starts[0] != 0 or self._starts != sorted(set(self._starts)):
            raise Invalid(
                f"from_prompt_index of the stages is {self._starts}; it must start at 0 and rise",
                name="from_prompt_index",
                value=self._starts,
                bound=0,
            )
        self._quotas = [_quotas(stage, self._names) for stage in stages]
        self._block = functools.lru_cache(maxsize=_BLOCKS_KEPT)(self._new_block)
        self._before = [np.zeros(len(names), np.int64)]
        for number in range(1, len(stages)):
            self._before.append(self._before[-1] + self._counts(number - 1, self._starts[number]))

    def choose(self, prompt_index: int) -> tuple[Stage, str, int]:
        """Return stage, source and place in the source of an index."""
        number = bisect.bisect_right(self._starts, prompt_index) - 1
        block, offset = divmod(prompt_index - self._starts[number], BLOCK)
        source = int(self._block(number, block)[offset])
        place = self._before[number] + self._counts(number, prompt_index)
        return self.stages[number], self._names[source], int(place[source])

    def up_to(self, prompt_index: int) -> tuple[Stage, ...]:
        """Return the stages that decide about indices up to this one."""
        return self.stages[: bisect.bisect_right(self._starts, prompt_index)]

    def _counts(self, number: int, prompt_index: int) -> npt.NDArray[np.int64]:
        """Count the indices of each source, from the start of a stage to before `prompt_index`."""
        blocks, offset = divmod(prompt_index - self._starts[number], BLOCK)
        begun = np.bincount(self._block(number, blocks)[:offset], minlength=len(self._names))
        return blocks * self._quotas[number] + begun

    def _new_block(self, number: int, block: int) -> npt.NDArray[np.int64]:
        keys = np.random.Philox(key=np.array([self._seed, self._starts[number] + block * BLOCK], np.uint64))
        sources = np.repeat(np.arange(len(self._names)), self._quotas[number])
        return sources[np.argsort(keys.random_raw(BLOCK), kind="stable")]


class Curriculum:
    """The prompts of several sources by prompt index, as a curriculum file says it now."""

    def __init__(self, file: Path, plan: Plan, sources: Mapping[str, PromptOrder], *, seed: int) -> None:
        self._file = file
        self._plan = plan
        self._sources = sources
        self._seed = seed
        self._schedule = _schedule(plan, seed)
        self._highest = -1
        self._seen = _stamp(file)

    def at(self, prompt_index: int) -> Prompt:
        """Return the prompt of a ticket, with source and stage in what its groups record."""
        self._heed_changes()
        self._highest = max(self._highest, prompt_index)
        stage, name, place = self._schedule.choose(prompt_index)
        prompt = self._sources[name].at(place)
        told = {"from_prompt_index": stage.from_prompt_index, "weights": stage.weights}
        source = prompt.metadata.get("source", name)
        return dataclasses.replace(prompt, recorded={"source": source, "curriculum": told})

    def _heed_changes(self) -> None:
        stamp = _stamp(self._file)
        if stamp == self._seen or stamp is None:  # gone for a moment: it is being replaced
            return
        self._seen = stamp
        try:
            plan = read_plan(self._file)
            if plan.sources != self._plan.sources:
                raise Invalid("sources differ; they are read at start alone", name="sources")
            schedule = _schedule(plan, self._seed)
            if schedule.up_to(self._highest) != self._schedule.up_to(self._highest):
                raise Invalid(
                    f"a stage differs that index {self._highest} or one before it fell into; append one behind it",
                    name="from_prompt_index",
                )
        except Invalid as error:
            logger.error("curriculum stays as it was; %s is not taken: %s", self._file, error.detail)
            return
        self._plan, self._schedule = plan, schedule
        logger.info("curriculum changed: %d stages from %s", len(schedule.stages), self._file)


class Supply:
    """What `--prompts` names: a source, or a curriculum file of several. Reading it raises as `open_source` does."""

    def __init__(self, prompts: str, encoder: Encoder) -> None:
        self._file = Path(prompts) if prompts.endswith(".toml") else None
        name = prompts.partition(":")[2] if prompts.startswith((GYM, TASKSET)) else Path(prompts).stem
        self._plan = read_plan(self._file) if self._file else Plan(sources=[Source(prompts=prompts, name=name)])
        folder = self._file.parent if self._file else Path()
        self._sources = {source.name: open_source(source, encoder, folder) for source in self._plan.sources}
        _check_ids(self._sources)

    @property
    def finite(self) -> bool:
        """Whether `known` is all there is."""
        return not any(isinstance(found, Endless) for found in self._sources.values())

    @property
    def known(self) -> list[Prompt]:
        """All prompts of finite sources, and the first of endless ones."""
        return [prompt for found in self._sources.values() for prompt in _known(found)]

    def ordered(self, *, seed: int, shuffle: bool, check: Callable[[Prompt], None]) -> PromptOrder:
        """Put the prompts in their order. `check` raises `Invalid` for what an endless source must not give out."""
        orders: dict[str, PromptOrder] = {
            name: found.checked_by(check) if isinstance(found, Endless) else Prompts(found, seed=seed, shuffle=shuffle)
            for name, found in self._sources.items()
        }
        if self._file is None:
            return next(iter(orders.values()))
        return Curriculum(self._file, self._plan, orders, seed=seed)


def read_plan(file: Path) -> Plan:
    """Read a curriculum file. Raises `Invalid` naming file and field."""
    try:
        plan = msgspec.toml.decode(file.read_bytes(), type=Plan)
        names = [source.name for source in plan.sources]
        if not names or "" in names or len(set(names)) < len(names):
            raise Invalid(f"names of the sources are {names}; each needs one of its own", name="name", value=names)
        _schedule(plan, 0)
    except OSError as error:
        raise Invalid(f"curriculum {file}: {error.strerror}", name="prompts", value=str(file)) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise Invalid(f"curriculum {file}: {error}", name="prompts", value=str(file)) from error
    except Invalid as error:
        raise Invalid(f"curriculum {file}: {error.detail}", name=error.name, value=error.value) from None
    return plan


def _schedule(plan: Plan, seed: int) -> Schedule:
    names = [source.name for source in plan.sources]
    return Schedule(plan.stages or [Stage(weights=dict.fromkeys(names, 1.0))], names, seed=seed)


def _quotas(stage: Stage, names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Share BLOCK indices out by weight, what rounding leaves to the largest remainders; the first of equal ones."""
    weights = np.array([stage.weights.get(name, 0.0) for name in names])
    unknown = sorted(stage.weights.keys() - set(names))
    if (
        unknown
        or not (np.isfinite(weights) & (weights >= 0)).all()
        or not np.isfinite(weights.sum())
        or not weights.any()
    ):
        raise Invalid(
            f"weights from index {stage.from_prompt_index} are {stage.weights}; needed: numbers >= 0, one above 0, "
            f"for {', '.join(names)}",
            name="weights",
            value=stage.weights,
        )
    exact = weights / weights.sum() * BLOCK
    quotas: npt.NDArray[np.int64] = np.floor(exact).astype(np.int64)
    quotas[np.argsort(quotas - exact, kind="stable")[: BLOCK - int(quotas.sum())]] += 1
    for name, weight, quota in zip(names, weights.tolist(), quotas.tolist(), strict=True):
        if weight > 0 and quota == 0:
            raise Invalid(
                f"weight {weight:g} of {name!r} is under 1/{BLOCK} of all",
                name="weights",
                value=weight,
                bound=1 / BLOCK,
            )
    return quotas


def _check_ids(sources: Mapping[str, list[Prompt] | Endless]) -> None:
    first: dict[str, Prompt] = {}
    for found in sources.values():
        for prompt in found if isinstance(found, list) else ():
            if first.setdefault(prompt.prompt_id, prompt) is not prompt:
                where = first[prompt.prompt_id].where
                raise Invalid(
                    f"{prompt.where}: prompt_id {prompt.prompt_id!r} stands already in {where}", name="prompts"
                )


def _known(found: list[Prompt] | Endless) -> list[Prompt]:
    return found.tried() if isinstance(found, Endless) else found


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino

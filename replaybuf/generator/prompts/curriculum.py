"""Several sources of prompts, mixed by weights that may change while the run goes on.

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

A ticket carries only an index, and all generators must use the same prompt for it. So the weights are a function of
the index, not of the time. The file is read again when it changes. A change is accepted if it keeps every stage that
an index given out here belongs to: append a stage behind the tickets issued so far, and replace the file atomically.
The metadata of each group record the stage.

Each 1000 indices of a stage with weights w hold each source exactly round(1000 w / sum(w)) times, in an order made
from (seed, index). The prompts of a source come in its own order, each once per epoch of that source.
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

from replaybuf.errors import Invalid, counted
from replaybuf.files import CONFIG_BYTES, read_bounded
from replaybuf.generator.prompts.filters import PromptFilter, PromptFilterOptions
from replaybuf.generator.prompts.prompt import Encoder, Prompt, PromptOrder, Prompts, duplicate_id
from replaybuf.generator.prompts.sources import GYM, Endless, Source, open_source
from replaybuf.generator.prompts.tasksets import TASKSET
from replaybuf.wire.decoding import prepared

logger = logging.getLogger(__name__)

BLOCK = 1000
"""Indices within which each source has exactly its share; the smallest share is 1 / BLOCK."""
_CACHED_BLOCKS = 16


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Weights by source, from one prompt index up to the next stage. Other sources have weight 0."""

    from_prompt_index: int = 0
    weights: dict[str, float]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A curriculum file. Without stages all sources have the same weight."""

    sources: list[Source]
    stages: list[Stage] = []


class Schedule:
    """Maps an index to a source and a place in it; a pure function of (stages, seed).

    `names` are the sources. Raises `Invalid` if stages do not start at 0 and rise, or weights are invalid.
    """

    def __init__(self, stages: Sequence[Stage], names: Sequence[str], *, seed: int) -> None:
        self.stages = tuple(stages)
        self._names = tuple(names)
        self._seed = seed % (1 << 64)
        self._starts = [stage.from_prompt_index for stage in stages]
        if not self._starts or self._starts[0] != 0 or self._starts != sorted(set(self._starts)):
            detail = f"from_prompt_index of the stages is {self._starts}; it must start at 0 and rise"
            raise Invalid(detail, name="from_prompt_index", value=self._starts, bound=0)
        self._quotas = [_quotas(stage, self._names) for stage in stages]
        self._block = functools.lru_cache(maxsize=_CACHED_BLOCKS)(self._new_block)
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
        """Return the stages of all indices up to this one."""
        return self.stages[: bisect.bisect_right(self._starts, prompt_index)]

    def _counts(self, number: int, prompt_index: int) -> npt.NDArray[np.int64]:
        """Count the indices of each source from the start of a stage to before `prompt_index`."""
        blocks, offset = divmod(prompt_index - self._starts[number], BLOCK)
        begun = np.bincount(self._block(number, blocks)[:offset], minlength=len(self._names))
        return blocks * self._quotas[number] + begun

    def _new_block(self, number: int, block: int) -> npt.NDArray[np.int64]:
        keys = np.random.Philox(key=np.array([self._seed, self._starts[number] + block * BLOCK], np.uint64))
        sources = np.repeat(np.arange(len(self._names)), self._quotas[number])
        return sources[np.argsort(keys.random_raw(BLOCK), kind="stable")]


class Curriculum:
    """The prompts of several sources by prompt index, as the curriculum file defines them now."""

    def __init__(self, file: Path, plan: Plan, sources: Mapping[str, PromptOrder], *, seed: int) -> None:
        self._file = file
        self._plan = plan
        self._sources = sources
        self._seed = seed
        self._schedule = _schedule(plan, seed)
        self._highest = -1
        self._stamp = _stamp(file)

    def at(self, prompt_index: int) -> Prompt:
        """Return the prompt of a ticket; its groups record source and stage."""
        self._reload()
        self._highest = max(self._highest, prompt_index)
        stage, name, place = self._schedule.choose(prompt_index)
        prompt = self._sources[name].at(place)
        source = prompt.metadata.get("source", name)
        return dataclasses.replace(prompt, recorded={"source": source, "curriculum": msgspec.to_builtins(stage)})

    def _reload(self) -> None:
        stamp = _stamp(self._file)
        if stamp in (self._stamp, None):  # None: the file is being replaced
            return
        self._stamp = stamp
        try:
            plan = read_plan(self._file)
            if plan.sources != self._plan.sources:
                raise Invalid("its sources differ; they are read only at start", name="sources")
            schedule = _schedule(plan, self._seed)
            if schedule.up_to(self._highest) != self._schedule.up_to(self._highest):
                detail = f"it changes a stage of index {self._highest} or before; append a stage behind it"
                raise Invalid(detail, name="from_prompt_index")
        except Invalid as error:
            logger.error("curriculum unchanged; %s is ignored: %s", self._file, error.detail)
            return
        self._plan, self._schedule = plan, schedule
        logger.info("curriculum changed: %s from %s", counted(len(schedule.stages), "stage"), self._file)


class Supply:
    """The prompts of `--prompts`: one source, or a curriculum file of several. Raises as `open_source` does.

    `filters` apply to all sources; `dropped`: the prompts that they dropped, by reason.
    """

    def __init__(self, prompts: str, encoder: Encoder, filters: PromptFilterOptions | None = None) -> None:
        self._file = Path(prompts) if prompts.endswith(".toml") else None
        name = prompts.partition(":")[2] if prompts.startswith((GYM, TASKSET)) else Path(prompts).stem
        self._plan = read_plan(self._file) if self._file else Plan(sources=[Source(prompts=prompts, name=name)])
        folder = self._file.parent if self._file else Path()
        prompt_filter = PromptFilter(filters or PromptFilterOptions())
        self._sources = {
            source.name: open_source(source, encoder, folder, prompt_filter) for source in self._plan.sources
        }
        self.dropped = prompt_filter.dropped
        self._check_ids()
        if prompt_filter.active:
            counts = " ".join(f"{reason}={number}" for reason, number in sorted(self.dropped.items())) or "nothing"
            logger.info("prompts: %d stay; the filters dropped %s", len(self.loaded), counts)

    @property
    def finite(self) -> bool:
        """Whether `loaded` holds all prompts."""
        return not any(isinstance(source, Endless) for source in self._sources.values())

    @property
    def loaded(self) -> list[Prompt]:
        """All prompts of finite sources, and the first of endless ones."""
        sources = self._sources.values()
        return [
            prompt
            for source in sources
            for prompt in (source.first_prompts() if isinstance(source, Endless) else source)
        ]

    def ordered(self, *, seed: int, shuffle: bool, check: Callable[[Prompt], None]) -> PromptOrder:
        """Return the order of the prompts. `check` raises `Invalid` for unusable prompts of endless sources."""
        orders: dict[str, PromptOrder] = {
            name: source.checked_by(check)
            if isinstance(source, Endless)
            else Prompts(source, seed=seed, shuffle=shuffle)
            for name, source in self._sources.items()
        }
        if self._file is None:
            return next(iter(orders.values()))
        return Curriculum(self._file, self._plan, orders, seed=seed)

    def _check_ids(self) -> None:
        first: dict[str, Prompt] = {}
        for prompt in (prompt for source in self._sources.values() if isinstance(source, list) for prompt in source):
            if first.setdefault(prompt.prompt_id, prompt) is not prompt:
                raise duplicate_id(prompt, first[prompt.prompt_id])


def read_plan(file: Path) -> Plan:
    """Read a curriculum file. Raises `Invalid` naming file and field."""
    try:
        plan = msgspec.toml.decode(read_bounded(file, CONFIG_BYTES), type=prepared(Plan))
        names = [source.name for source in plan.sources]
        if not names or "" in names or len(set(names)) < len(names):
            detail = f"names of the sources are {names}; each source needs a name of its own"
            raise Invalid(detail, name="name", value=names)
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
    """Divide BLOCK indices by weight; the largest remainders get the rest, of equal ones the first."""
    weights = np.array([stage.weights.get(name, 0.0) for name in names])
    unknown = stage.weights.keys() - set(names)
    if unknown or not (weights >= 0).all() or not np.isfinite(weights.sum()) or not weights.any():
        detail = (
            f"weights from index {stage.from_prompt_index} are {stage.weights}; they must be numbers >= 0, one above "
            f"0, for {', '.join(names)}"
        )
        raise Invalid(detail, name="weights", value=stage.weights)
    exact = weights / weights.sum() * BLOCK
    quotas: npt.NDArray[np.int64] = np.floor(exact).astype(np.int64)
    quotas[np.argsort(quotas - exact, kind="stable")[: BLOCK - int(quotas.sum())]] += 1
    for name, weight, quota in zip(names, weights.tolist(), quotas.tolist(), strict=True):
        if weight > 0 and quota == 0:
            detail = f"weight {weight:g} of {name!r} is a share below 1/{BLOCK}"
            raise Invalid(detail, name="weights", value=weight, bound=1 / BLOCK)
    return quotas


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino

"""Options of `replay`, and the contradictions between them."""

from __future__ import annotations

import json
import math
from typing import Annotated, Literal

from msgspec import Meta, field

from replaybuf.errors import counted
from replaybuf.strategy import Budget, StrategyOptions, contradiction, source_hash

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Steps = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]

_ONLY_PRIORITIZED = {"priority": "advantage", "exponent": 0.6, "importance": 0}
"""Options that only the order `prioritized` has, with their defaults."""
_NOT_IN_BLOCKS = {"cooldown": 0, "fresh_fraction": 0.0, "prompts_together": False, "mix": {}}
"""Options that would put other groups into the repetition of a batch, with the values that do not."""
_SMALLEST_GROUP_TOKENS = 2
"""A prompt and a completion of one token each."""
ROUNDING = 1e-6
"""Shares that sum to 1 within this bound are complete."""


class ReplayOptions(StrategyOptions, frozen=True):
    """Options of `replay`; null = unbounded or off. Options that contradict each other raise `Invalid`."""

    max_uses: Annotated[
        Count | None,
        Meta(description="Most batches of one group (u). null: no bound."),
    ] = 4
    max_staleness: Annotated[
        Steps | None,
        Meta(description="Most versions that a group may be behind at its use (m). null: no bound."),
    ] = 4
    order: Annotated[
        Literal["least_slack", "uniform", "fifo", "newest", "prioritized", "blocks"],
        Meta(
            description="least_slack: groups first that would otherwise be too stale before their last use. uniform: "
            "at random. fifo: by last use, then age. newest: from the newest back. prioritized: by priority. blocks: "
            "whole batches again in the order of storing."
        ),
    ] = "uniform"
    look_ahead: Annotated[
        int,
        Meta(
            ge=0,
            le=1,
            description="Batches chosen before the step ahead of them is acked. 1: fetched while the trainer trains. "
            "0: later, so one more use per group and one version fresher; the trainer waits for each batch to arrive.",
        ),
    ] = 1
    priority: Annotated[
        Literal["advantage", "reward_std", "feedback"],
        Meta(description="What prioritized draws by (x): mean abs(advantage), reward std, or the trainer's feedback."),
    ] = "advantage"
    exponent: Annotated[
        float, Meta(ge=0, le=4, description="Power of the priority (alpha): p = (x + 1e-6) ** exponent.")
    ] = 0.6
    importance: Annotated[
        Share,
        Meta(description="Power of the sampling weights (beta): (smallest p / p) ** importance; 0 = no weights."),
    ] = 0.0
    fresh_fraction: Annotated[
        Share,
        Meta(description="Least share of a batch's groups that were never used (f)."),
    ] = 0.0
    cooldown: Annotated[Steps, Meta(description="Steps that a group rests after a use (c).")] = 0
    samples_per_insert: Annotated[
        Annotated[float, Meta(gt=0, le=1e9)] | None,
        Meta(description="Uses per stored group (spi). null: not controlled."),
    ] = None
    error_buffer: Annotated[
        Annotated[float, Meta(gt=0, le=1e15)] | None,
        Meta(description="Uses that may be ahead of samples_per_insert (e). null: one batch and one insert."),
    ] = None
    groups_per_prompt: Annotated[
        Count | None,
        Meta(description="Most groups of a prompt in a batch. null: no bound."),
    ] = None
    prompts_together: Annotated[bool, Meta(description="All live groups of a prompt go in one batch.")] = False
    mix: Annotated[
        dict[str, PositiveShare],
        Meta(description="Shares of a batch's groups by source; other sources share the rest."),
    ] = field(default_factory=dict)
    mix_strict: Annotated[
        bool,
        Meta(description="A batch waits until each source has its share; after batch.timeout_s it is short."),
    ] = False

    def __post_init__(self) -> None:
        if self.max_uses is None and self.max_staleness is None:
            why = "max_staleness is null too, so nothing would ever leave the buffer"
            raise self._contradiction("max_uses", "a number where max_staleness is null", why)
        if self.max_uses == 1 and self.cooldown > 0:
            raise self._contradiction("cooldown", "0", "max_uses is 1, so no group is used again")
        for name, default in _ONLY_PRIORITIZED.items():
            if getattr(self, name) != default and self.order != "prioritized":
                why = f"order is {self.order}; only prioritized has priorities"
                raise self._contradiction(name, json.dumps(default), why)
        if self.order == "blocks":
            self._check_blocks()
        if self.prompts_together:
            self._check_prompts_together()
        self._check_rate()
        self._check_mix()

    def _check_blocks(self) -> None:
        if self.max_uses is None:
            why = "order is blocks; without a number of uses the first batch would come again until it is too stale"
            raise self._contradiction("max_uses", "a number where order is blocks", why)
        for name, off in _NOT_IN_BLOCKS.items():
            if getattr(self, name) != off:
                why = "order is blocks; a batch comes again with the same groups"
                raise self._contradiction(name, json.dumps(off), why)

    def _check_prompts_together(self) -> None:
        if self.groups_per_prompt is not None:
            why = "prompts_together puts all groups of a prompt in one batch"
            raise self._contradiction("groups_per_prompt", "null", why)
        for name in ("fresh_fraction", "mix"):
            if getattr(self, name):
                why = "the groups of a prompt come together, whatever their share"
                raise self._contradiction(name, "unset where prompts_together is true", why)

    def _check_rate(self) -> None:
        spi, fresh, error_buffer = self.samples_per_insert, self.fresh_fraction, self.error_buffer
        if spi is None:
            if error_buffer is not None:
                why = "samples_per_insert is null, so there is no rate to keep"
                raise self._contradiction("error_buffer", "null", why)
            return
        if self.max_uses is not None and spi > self.max_uses:
            why = f"max_uses is {self.max_uses}, so a stored group cannot be used that often"
            raise self._contradiction("samples_per_insert", f"at most {self.max_uses}", why)
        if spi * fresh > 1 + ROUNDING:
            why = f"fresh_fraction is {fresh}, so there are at most 1/{fresh} uses per insert"
            raise self._contradiction("samples_per_insert", f"at most {1 / fresh:g}", why)
        if error_buffer is not None and 2 * error_buffer < 1 + spi:
            why = "one use and one insert exceed the width of the band, so each would wait for the other"
            raise self._contradiction("error_buffer", f"at least {(1 + spi) / 2:g}", why)

    def _check_mix(self) -> None:
        if self.mix_strict and not self.mix:
            raise self._contradiction("mix_strict", "false without a mix", "there are no shares to keep")
        total = sum(self.mix.values())
        if total > 1 + ROUNDING:
            raise self._contradiction("mix", "shares that sum to at most 1", f"the shares sum to {total:.6g}")
        if len({source_hash(name) for name in self.mix}) < len(self.mix):
            raise self._contradiction("mix", "names with different hashes", "two names have the same source_hash")

    def check(self, budget: Budget, steps_per_publish: int, max_tokens_live: int | None) -> None:
        """Check the options against the run's batch. Raises `Invalid`.

        A group has w = (m + 1) * steps_per_publish batches, so at most ceil(w / (c + 1)) uses.
        """
        spi = self.samples_per_insert
        batches = self.look_ahead + 1 + ((self.max_uses or 1) - 1) * (self.cooldown + 1)
        if self.max_staleness is not None:
            batches = (self.max_staleness + 1) * steps_per_publish
            uses = math.ceil(batches / (self.cooldown + 1))
            if self.cooldown > 0 and uses < 2:
                why = f"after it a group is always too stale: it has {counted(batches, 'batch')} in all"
                raise self._contradiction("cooldown", f"at most {batches - 1}", why)
            if spi is not None and spi > uses:
                why = f"a group has {counted(batches, 'batch')} before it is too stale"
                raise self._contradiction("samples_per_insert", f"at most {uses}", why)
        need = (batches + 1) * _least_tokens(budget)
        if self.fresh_fraction > 0 and max_tokens_live is not None and max_tokens_live < need:
            why = (
                f"the limits allow {counted(max_tokens_live, 'live token')}; below {need} used groups could leave "
                "no space for fresh ones"
            )
            raise self._contradiction("fresh_fraction", "0", why)
        if spi is not None and self.error_buffer is not None and budget.groups is not None:
            least = (budget.groups + spi) / 2
            if self.error_buffer < least:
                why = f"a batch of {counted(budget.groups, 'group')} exceeds the width of the band"
                raise self._contradiction("error_buffer", f"at least {least:g}", why)

    def _contradiction(self, name: str, needed: str, why: str) -> Exception:
        return contradiction(f"strategy.options.{name}", getattr(self, name), needed, why)


def _least_tokens(budget: Budget) -> int:
    """Count the tokens of the smallest groups that make a full batch."""
    if budget.groups is None:
        return budget.tokens or 0
    return min(budget.groups * _SMALLEST_GROUP_TOKENS, budget.tokens or budget.groups * _SMALLEST_GROUP_TOKENS)

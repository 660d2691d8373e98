"""The objective of a step: policy loss, mismatch correction, regularisers, sampling weights and the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from replaybuf.errors import Invalid
from replaybuf.option_types import invalid_group
from replaybuf.plugins import entry_points as plugins
from replaybuf.wire.decoding import prepared
from replaybuf_trainer.losses.correction import Correction
from replaybuf_trainer.losses.normalisation import BatchTotals, Normalisation, token_factors
from replaybuf_trainer.losses.policy import BUILT_IN, PolicyLoss
from replaybuf_trainer.losses.regularisers import EntropyBonus, ReferencePenalty
from replaybuf_trainer.losses.statistics import Tally
from replaybuf_trainer.losses.tokens import LossTokens, Row, missing_column


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that every loss can be combined with; the other keys of `--loss-options` are those of the loss.

    `normalise_constant`: divisor of each rollout's sum, for the mean `constant`.
    """

    correction: Correction | None = None
    reference: ReferencePenalty | None = None
    entropy: EntropyBonus | None = None
    normalise_constant: Annotated[int, Meta(ge=1)] | None = None


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """The loss of a batch: the sum over its loss tokens of factor * sampling weight * (w * policy + regularisers).

    w is the weight of `correction`; a rejected token has no regularisers either. The sampling weight is that of the
    strategy `replay`: it corrects for groups that are selected more often than others. Raises `Invalid` for parts that
    contradict each other.
    """

    loss: PolicyLoss
    terms: Terms = Terms()
    normalise: Normalisation = "token"

    def __post_init__(self) -> None:
        if self.normalise == "constant" and not self.terms.normalise_constant:
            raise Invalid(
                "the loss is normalised by a constant; give it as normalise_constant in --loss-options, "
                "for example the maximum number of completion tokens",
                name="normalise_constant",
            )
        correction, loss = self.terms.correction, self.loss
        if correction and correction.mode != "reject" and (loss.weights_mismatch or loss.ratio_to == "inference"):
            raise Invalid(
                f"correction.mode is {correction.mode!r}, but this loss already weights tokens by the mismatch; "
                "set correction.mode to 'reject', or ratio_to to 'old' for a loss other than decoupled-ppo",
                name="correction",
                value=correction.mode,
                bound=["reject"],
            )

    @property
    def columns(self) -> frozenset[str]:
        """Return the names of the optional columns that a batch must have."""
        return self.loss.columns | ({"ref_logprobs"} if self.terms.reference else frozenset())

    def check_columns(self, rows: Sequence[Row]) -> None:
        """Raise `Invalid` if some row lacks a column that the loss needs."""
        for name in sorted(self.columns):
            if any(name not in row for row in rows):
                raise missing_column(name)

    def value(self, tokens: LossTokens, totals: BatchTotals, tally: Tally) -> torch.Tensor:
        """Return the share of some tokens in the batch's loss, to be summed; add their figures to `tally`."""
        if not len(tokens.logprobs):
            # A rank with too few rollouts has rows without any; its backward pass must match that of other ranks.
            return tokens.logprobs.sum()
        terms, policy = self.terms, self.loss.term(tokens)
        weights = terms.correction.weights(tokens) if terms.correction else torch.ones_like(tokens.logprobs)
        losses = weights * policy.losses
        beside = [term.losses(tokens) for term in (terms.reference, terms.entropy) if term]
        if beside:
            losses = losses + torch.stack(beside).sum(0).masked_fill(weights == 0, 0.0)
        losses = losses * tokens.sampling_weights[tokens.rollout]
        tally.add(tokens, policy, losses, weights * tokens.sampling_weights[tokens.rollout])
        shares = token_factors(tokens, totals, self.normalise, terms.normalise_constant) * losses
        tally.keep_tokens(tokens, policy, shares)
        return shares.sum()


def load_objective(
    name: str, options: Mapping[str, Any] | None = None, normalise: Normalisation | None = None
) -> Objective:
    """Return the objective of `--loss`, `--loss-options` and `--normalise`.

    Raises `Invalid` for an unknown loss, unknown options, values out of bounds, and parts that contradict each other.
    """
    kind = BUILT_IN.get(name) or _plugin(name)
    fields = dict(options or {})
    shared = {key: fields.pop(key) for key in Terms.__struct_fields__ if key in fields}
    try:
        loss, terms = msgspec.convert(fields, prepared(kind)), msgspec.convert(shared, prepared(Terms))
    except msgspec.ValidationError as error:
        known = [*kind.__struct_fields__, *Terms.__struct_fields__]
        raise invalid_group(f"--loss-options of {name}", options or {}, error, known) from error
    return Objective(loss=loss, terms=terms, normalise=normalise or kind.normalise)


def _plugin(name: str) -> type[PolicyLoss]:
    """Load a loss by entry point. Raises `Invalid` with the known names."""
    if name not in plugins.names(plugins.LOSSES):
        known = sorted([*BUILT_IN, *plugins.names(plugins.LOSSES)])
        raise Invalid(f"loss is {name!r}; installed: {', '.join(known)}", name="loss", value=name, bound=known)
    plugin = plugins.load(plugins.LOSSES, name)
    if not (isinstance(plugin, type) and issubclass(plugin, PolicyLoss)):
        raise Invalid(
            f"loss plug-in {name!r} is {plugin!r}; it must be a class that inherits "
            "replaybuf_trainer.losses.PolicyLoss",
            name="loss",
            value=name,
        )
    return plugin

"""Configuration of a run: the JSON of `PUT /v1/runs/{run}`.

A field is described here and nowhere else: the JSON Schema, the table in docs/http/runs.md, the forms of the
console and the changes of `batch`, `limits` and adapters by `PATCH` come from these structs.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from replaybuf.errors import Invalid, Unreadable
from replaybuf.wire.decoding import prepared
from replaybuf.wire.group import LARGEST_ROLLOUTS
from replaybuf.wire.names import Name

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Names have no `/` and `:`, because these end the name in tickets, group ids and counters."""
MIN_TOKENS_PER_ROLLOUT = 2
"""One prompt token and one completion token."""
LONGEST_ROW = 2**24
"""The tensors of one row of this length take 290 MB."""
LARGEST_INTEGER = 2**53 - 1
"""Largest whole number that every JSON reader keeps exactly."""
LONGEST_S = 366 * 86400.0
MAX_RANKS = 4096
MOST_ADAPTERS = 256
"""Bounds the run state, which explains for each adapter why it waits."""
MOST_GROUPS = 2**14
"""Groups of one batch. The ledger record of so many groups with the longest ids has 130 MB; Redis accepts 512 MiB."""
LARGEST_STORED_BYTES = 2**29
"""Redis accepts no longer string."""
LARGEST_OPTIONS_BYTES = 2**16
"""Options are in every batch record."""
MOST_SAMPLES = 64
"""Rollouts of a step that stay readable: about 1 MiB."""
LARGEST_COST = 1e30
"""Costs of the longest rollouts stay finite."""

Positive = Annotated[int, Meta(ge=1, le=LARGEST_INTEGER)]
NonNegative = Annotated[int, Meta(ge=0, le=LARGEST_INTEGER)]
RowTokens = Annotated[int, Meta(ge=MIN_TOKENS_PER_ROLLOUT, le=LONGEST_ROW)]
RowMultiple = Annotated[int, Meta(ge=1, le=LONGEST_ROW)]
GroupCount = Annotated[int, Meta(ge=1, le=MOST_GROUPS)]
RolloutCount = Annotated[int, Meta(ge=1, le=LARGEST_ROLLOUTS)]
StoredBytes = Annotated[int, Meta(ge=1, le=LARGEST_STORED_BYTES)]
SampleCount = Annotated[int, Meta(ge=0, le=MOST_SAMPLES)]
Coefficient = Annotated[float, Meta(ge=0, le=LARGEST_COST)]
Seconds = Annotated[float, Meta(gt=0, le=LONGEST_S)]
Share = Annotated[float, Meta(ge=0, lt=1)]
"""1 would never be exceeded."""
StalePolicy = Literal["drop", "reissue", "mask"]
EVERY_OTHER_SOURCE = "*"
MOST_REISSUES = 16
"""Each round has a bitmap of prompts in the state."""
ReissueCount = Annotated[
    int, Meta(ge=0, le=MOST_REISSUES, description="Most times that a prompt is issued again by on_stale = reissue.")
]


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of L tokens: `linear`·L + `quadratic`·L², not both 0; only their ratio matters."""

    linear: Coefficient
    quadratic: Coefficient

    def check(self) -> None:
        """Raise `Invalid` for coefficients outside their bounds, and if both are 0."""
        values = (self.linear, self.quadratic)
        if not all(0 <= value <= LARGEST_COST for value in values) or not any(values):
            detail = f"cost is {self.linear}·L + {self.quadratic}·L²; both must be in 0..{LARGEST_COST}, and one > 0"
            raise Invalid(detail, name="cost", value=list(values), bound=LARGEST_COST)


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all parts of the configuration: immutable; unknown fields are errors."""


def _about(text: str) -> Meta:
    return Meta(description=text)


class StrategySpec(Spec, frozen=True):
    """A strategy or filter by the name of its entry point, with its options."""

    name: Annotated[
        Name, _about("Name of an installed strategy or filter; `replaybuf strategies list` lists them.")
    ] = "one-step-off-policy"
    options: Annotated[
        dict[str, Any], _about("Its options, at most 64 KiB; `replaybuf strategies show NAME` explains them.")
    ] = {}


Filters = Annotated[list[StrategySpec], Meta(max_length=64)]


class AdmissionSpec(Spec, frozen=True):
    """An admission plug-in by the name of its entry point, with its options."""

    name: Annotated[Name, _about("Name of an installed admission plug-in.")]
    options: Annotated[dict[str, Any], _about("Its options, at most 64 KiB.")] = {}
    timeout_s: Annotated[
        float, Meta(gt=0, le=600, description="Seconds for one group; a group that takes longer is rejected.")
    ] = 10


Admissions = Annotated[list[AdmissionSpec], Meta(max_length=8)]


class TokensPerRank(Spec, frozen=True):
    """Token budget that follows the layout of the attached trainer; one rank before the first attach."""

    per_rank: Annotated[Positive, _about("Tokens of a batch for each rank of the attached trainer.")]


TokenBudget = Positive | TokensPerRank | None


class BatchSpec(Spec, frozen=True):
    """Bounds of a batch, which never exceeds `tokens_per_batch` and never splits a group."""

    tokens_per_batch: Annotated[
        TokenBudget,
        _about("Most tokens of a batch, or {per_rank = N} for N per rank of the trainer. It is full if no group fits."),
    ] = 65536
    groups_per_batch: Annotated[
        GroupCount | None,
        _about("Groups of a full batch. Default: no bound. At least one of the two bounds is set."),
    ] = None
    seq_len: Annotated[RowTokens, _about("Tokens of one micro-batch; a trainer may attach with another.")] = 4096
    pad_to_multiple_of: Annotated[
        RowMultiple, _about("The service pads rows to a multiple of it; it divides seq_len.")
    ] = 1
    overlong: Annotated[
        Literal["reject", "truncate"],
        _about("A rollout longer than seq_len: reject its group, or truncate its completion."),
    ] = "reject"
    tail: Annotated[
        Literal["train", "drop"],
        _about("Groups that fill no batch when no prompt is left: train makes a short last batch, drop evicts them."),
    ] = "train"
    timeout_s: Annotated[
        Seconds | None,
        _about(
            "After the trainer has waited so many seconds for groups, its batch may be short. Default: never. Not with "
            "tail = drop."
        ),
    ] = None
    min_groups: Annotated[GroupCount, _about("Fewest groups of a short batch after timeout_s.")] = 1

    def token_budget(self, ranks: int) -> int | None:
        """Return the tokens of a batch for so many ranks."""
        budget = self.tokens_per_batch
        return min(budget.per_rank * ranks, LARGEST_INTEGER) if isinstance(budget, TokensPerRank) else budget


class TicketSpec(Spec, frozen=True):
    """Rules for tickets, the permissions to generate groups."""

    ttl_s: Annotated[Seconds, _about("Lifetime of a ticket in seconds; then its prompt is issued again.")] = 600
    max_attempts: Annotated[Positive, _about("Failed attempts after which a prompt is recorded as failed.")] = 3
    prompts: Annotated[Positive | None, _about("Number of prompts. Default: endless.")] = None
    heartbeat_s: Annotated[
        Seconds, _about("A producer that sends heartbeats and is silent for so many seconds loses its tickets.")
    ] = 15
    max_failed_share: Annotated[
        Share | None,
        _about(
            "Largest share of failed prompts among the newest 200 that were stored or failed, from 20 on. Default: any."
        ),
    ] = None
    on_failed_share: Annotated[
        Literal["alarm", "pause", "finish"],
        _about("What happens above max_failed_share: alarm, pause or finish the run. After a resume it counts anew."),
    ] = "alarm"


class Limits(Spec, frozen=True):
    """Bounds of the buffer: beyond them no tickets, and 429 for appends, except for what the next batch lacks."""

    max_tokens_live: Annotated[Positive | None, _about("Most live tokens. Default: no bound.")] = None
    max_bytes_live: Annotated[
        Positive | None, _about("Most bytes of live frames; at least max_group_bytes. Default: no bound.")
    ] = None
    max_bytes_in_memory: Annotated[
        Positive | None,
        _about("Most bytes of frames and late columns in Redis; those beyond it move to spill. Default: no bound."),
    ] = None
    max_group_bytes: Annotated[StoredBytes, _about("Largest frame of one group in bytes, stored and decompressed.")] = (
        67108864
    )


class SpillSpec(Spec, frozen=True):
    """Where frames beyond `limits.max_bytes_in_memory` are stored."""

    url: Annotated[
        str,
        Meta(min_length=1, max_length=1024, description="file:///FOLDER, or the URL of an object store by fsspec."),
    ]


class HistorySpec(Spec, frozen=True):
    """What stays readable of a trained step after a checkpoint has freed its groups."""

    samples_per_step: Annotated[
        SampleCount,
        _about(
            "Rollouts of each trained step that stay readable: the best, the worst, the others by chance; 0 = none. "
            "They take at most 16 MiB of Redis; beyond that the oldest go."
        ),
    ] = 4


class AdapterSpec(Spec, frozen=True):
    """A LoRA adapter of the run."""

    groups_per_batch: Annotated[GroupCount, _about("Groups of the adapter per step.")]
    prompts: Annotated[Positive | None, _about("Number of prompts of the adapter. Default: endless.")] = None
    steps_per_publish: Annotated[
        Positive | None,
        _about("Steps of the adapter between two versions of it. Default: steps_per_publish of the run."),
    ] = None
    paused: Annotated[bool, _about("The adapter has no share of batches and gets no tickets.")] = False
    removed: Annotated[bool, _about("The adapter is removed for good; its live groups are evicted.")] = False


OnStale = Annotated[
    StalePolicy | Annotated[dict[Name, StalePolicy], Meta(max_length=64)],
    _about(
        "A group that is too stale and was never used: drop it, reissue its prompt, or mask its old tokens while "
        'others are young enough. An object has policies by source; "*" is for the rest, drop by default.'
    ),
]


class RunConfig(Spec, frozen=True):
    """Configuration of one run. `check_run_config` checks what the types cannot."""

    batch: Annotated[BatchSpec, _about("Bounds of a batch.")]
    strategy: Annotated[
        StrategySpec, _about("Strategy that selects the groups of a batch: name of an installed one, and its options.")
    ] = StrategySpec()
    filters: Annotated[Filters, _about("Filters in the order in which the service asks them.")] = []
    admissions: Annotated[
        Admissions, _about("Admission plug-ins that check each group before it is stored, in this order.")
    ] = []
    group_size: Annotated[
        RolloutCount | None, _about("Rollouts of a group; groups of another size are rejected. Default: any size.")
    ] = None
    min_group_size: Annotated[
        RolloutCount | None,
        _about("A group that lost rollouts to faults is stored if it has at least so many. Default: all."),
    ] = None
    vocab_size: Annotated[Positive | None, _about("Token ids must be below it. Default: not checked.")] = None
    steps_per_publish: Annotated[Positive, _about("Steps between two publications of weights.")] = 1
    max_steps: Annotated[
        Positive | None, _about("The run is finished after this number of steps. Default: endless.")
    ] = None
    stale_token_mask: Annotated[
        NonNegative | None,
        _about("Tokens that are more than so many versions older than the batch leave its loss mask. Default: none."),
    ] = None
    on_stale: OnStale = "drop"
    max_reissues: ReissueCount = 1
    seed: Annotated[NonNegative, _about("Seed of the selection of groups.")] = 0
    advantage: Annotated[
        Name, _about("Estimator for groups without advantages: grpo, dr-grpo, rloo, rloo-length, process.")
    ] = "grpo"
    tickets: Annotated[TicketSpec, _about("Rules for tickets, the permissions to generate groups.")] = TicketSpec()
    limits: Annotated[Limits, _about("Bounds of the buffer.")] = Limits()
    history: Annotated[
        HistorySpec, _about("What stays readable of a trained step after a checkpoint has freed its groups.")
    ] = HistorySpec()
    adapters: Annotated[
        dict[Name, AdapterSpec], Meta(max_length=MOST_ADAPTERS, description="LoRA adapters of the run by name.")
    ] = {}
    spill: Annotated[
        SpillSpec | None,
        _about("Where frames beyond limits.max_bytes_in_memory are stored. Default: nowhere. It never changes."),
    ] = None

    @property
    def stale_policies(self) -> dict[str, StalePolicy]:
        """Return `on_stale` by source, with that of every other source under `"*"`."""
        if isinstance(self.on_stale, dict):
            return {EVERY_OTHER_SOURCE: "drop", **self.on_stale}
        return {EVERY_OTHER_SOURCE: self.on_stale}

    @property
    def least_rollouts(self) -> int | None:
        """Return the fewest rollouts of a group; None = any number."""
        return self.min_group_size or self.group_size

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Return the adapters in order; a run without adapters has the one adapter `""`."""
        return tuple(sorted(self.adapters)) or ("",)

    @property
    def kept_adapters(self) -> tuple[str, ...]:
        """Return those of `adapter_names` that are not removed."""
        return tuple(name for name in self.adapter_names if self.phase_of(name) != "finished")

    @property
    def active_adapters(self) -> tuple[str, ...]:
        """Return those of `adapter_names` that share batches: neither removed nor paused."""
        return tuple(name for name in self.adapter_names if self.phase_of(name) == "running")

    def phase_of(self, adapter: str) -> Literal["running", "paused", "finished"]:
        """Return whether an adapter shares batches, is paused, or was removed (`finished`)."""
        spec = self.adapters.get(adapter)
        if spec and spec.removed:
            return "finished"
        return "paused" if spec and spec.paused else "running"

    @property
    def supplies(self) -> dict[str, int | None]:
        """Return the number of prompts of each of `adapter_names`; None = endless."""
        return {name: spec.prompts for name, spec in self.adapters.items()} or {"": self.tickets.prompts}

    def steps_per_publish_of(self, adapter: str = "") -> int:
        """Return how many steps of an adapter make one version of it."""
        spec = self.adapters.get(adapter)
        return spec.steps_per_publish if spec and spec.steps_per_publish else self.steps_per_publish

    def groups_per_batch_of(self, adapter: str = "") -> int | None:
        """Return the groups per step of an adapter; `""`: per batch of the run."""
        spec = self.adapters.get(adapter)
        return spec.groups_per_batch if spec else self.batch.groups_per_batch

    def version_of(self, step: int, adapter: str = "") -> int:
        """Return the version of an adapter's policy that its `step` trains: step // steps_per_publish."""
        return step // self.steps_per_publish_of(adapter)


def check_run_name(run: str) -> str:
    """Return `run` if it is a valid name. Raises `Invalid`."""
    if not RUN_NAME.fullmatch(run):
        bound = RUN_NAME.pattern
        raise Invalid(f"run is {run!r}; it must match {bound}", name="run", value=run, bound=bound)
    return run


def recorded(config: RunConfig) -> dict[str, Any]:
    """Render a configuration for the ledger."""
    fields: dict[str, Any] = msgspec.to_builtins(config)
    return fields


def read_config(fields: dict[str, Any], where: str) -> RunConfig:
    """Read what `recorded` rendered; `where` names its place. Raises `Unreadable`."""
    try:
        return msgspec.convert(fields, prepared(RunConfig))
    except msgspec.ValidationError as error:
        raise Unreadable(f"the configuration in {where} does not decode: {error}") from error

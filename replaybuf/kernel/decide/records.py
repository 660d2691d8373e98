"""Decide each ledger record: from the state and a request to the record, or to the contract's error.

Pure: time comes in as `now_s`, groups as a selection. The service writes the record and then applies it; the simulator
only applies it. None means that nothing changes, so there is no record. Records of their own files: CONFIG in
`config`, EVICT of unusable groups in `eviction`, failed prompts in `prompts`, TRIM in `trimming`, COLUMNS in
`late_columns`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import Conflict, Gone, Invalid, RunFinished, WrongStep, counted
from replaybuf.kernel.decide.config import check_live_groups, config_of
from replaybuf.kernel.decide.cursors import NOTHING_KEPT, Kept
from replaybuf.kernel.state.failed_prompts import FAILED_SHARE
from replaybuf.kernel.state.lookups import list_purgeable
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.strategy.plugin_set import resolve_config
from replaybuf.kernel.strategy.selection import BatchSelection, Selector
from replaybuf.kernel.strategy.usability import loss_mask_bound
from replaybuf.wire.config import RunConfig
from replaybuf.wire.contract import AttachRequest
from replaybuf.wire.ledger import (
    EPOCHS_OF_RESTORE,
    AckRecord,
    AdapterStep,
    AttachRecord,
    BatchEntry,
    BatchRecord,
    CheckpointRecord,
    DeadLetterRecord,
    EvictRecord,
    PolicyRecord,
    PurgeRecord,
    RewindRecord,
)

LARGEST_PRIORITY = 1e30
"""Sums of a million priorities, and their powers, stay within 32-bit floats."""
PURGED_AT_ONCE = 8192
"""Dead letters in one record: the fold of a record holds the event loop."""

OnResume = Literal["redeliver", "resample"]


def check_adapter(adapter: str, config: RunConfig) -> None:
    """Raise `Invalid` if a run has no such adapter."""
    if adapter not in config.adapter_names:
        names = sorted(config.adapters)
        has = f"the run has adapters {names}" if names else "the run has no adapters"
        raise Invalid(f"adapter is {adapter!r}; {has}", name="adapter", value=adapter, bound=names)


# ---------------------------------------------------------------------- groups


def decide_overlong(state: RunState, numbers: list[int], now_s: float) -> EvictRecord:
    """Decide that no batch uses groups whose prompts leave no token of the trainer's rows for a completion."""
    return EvictRecord(step=state.next_step, numbers={"overlong": numbers}, at_s=now_s)


def decide_dead_letters(broken: dict[int, str], now_s: float) -> DeadLetterRecord:
    """Decide that stored groups are unusable; `broken` maps a group number to the reason."""
    by_reason: dict[str, list[int]] = {}
    for number, reason in sorted(broken.items()):
        by_reason.setdefault(reason, []).append(number)
    return DeadLetterRecord(numbers=by_reason, at_s=now_s)


def decide_purge(state: RunState, now_s: float) -> PurgeRecord | None:
    """Decide to delete the bytes of the first `PURGED_AT_ONCE` dead letters that no batch needs again."""
    numbers = list_purgeable(state, PURGED_AT_ONCE)
    return PurgeRecord(numbers=numbers, at_s=now_s) if numbers else None


# ---------------------------------------------------------------------- batches


def check_requestable(state: RunState, step: int, look_ahead: int) -> None:
    """Raise `WrongStep`, `RunFinished` or `Gone` for a step whose batch cannot be requested now."""
    if step < 0 or step > state.step + max(1, look_ahead):
        detail = f"step is {step}; the next unacked step is {state.step} and the strategy looks {look_ahead} ahead"
        raise WrongStep(detail, name="step", value=step, bound=state.step + look_ahead)
    if step in state.batches:
        return
    max_steps = config_of(state).max_steps
    if state.phase == "finished" or (max_steps is not None and step >= max_steps):
        detail = f"step is {step}; the run is finished after {counted(state.step, 'step')}"
        if (state.phase_reason or "").startswith(FAILED_SHARE):
            detail = f"{detail}: {state.phase_reason}"
        raise RunFinished(detail, name="step", value=step, bound=state.step)
    if step < state.step:
        detail = f"the batch of step {step} was freed by a checkpoint; the oldest kept step is {state.oldest_step}"
        raise Gone(detail, name="step", value=step, bound=state.oldest_step)


class GroupLabel(NamedTuple):
    """The strings of a group, which the state does not keep."""

    group_id: str
    prompt_id: str = ""
    adapter: str = ""
    payload_key: str = ""


class BatchDraft(NamedTuple):
    """A decided batch that lacks the strings of its groups. It does not change with the state, so a thread may use it.

    `columns`: number, prompt index, policy version, uses so far and tokens of each group; `versions` by adapter;
    `parts`: the part of an adapter with so many groups.
    """

    record: BatchRecord
    columns: list[npt.NDArray[np.int64]]
    weights: npt.NDArray[np.float32] | None
    versions: dict[str, int]
    parts: Callable[[str, int], AdapterStep]

    def complete(self, labels: Sequence[GroupLabel], digest: str) -> BatchRecord:
        """Return the record. `labels`: of the chosen groups, in their order; `digest` of their content."""
        weights = [None] * len(labels) if self.weights is None else self.weights.astype(float).tolist()
        columns = (column.tolist() for column in self.columns)
        groups = [
            BatchEntry(
                number=number,
                group_id=label.group_id,
                prompt_id=label.prompt_id,
                prompt_index=None if prompt_index < 0 else prompt_index,
                adapter=label.adapter,
                policy_version=version,
                staleness=self.versions[label.adapter] - version,
                times_sampled=times_sampled + 1,
                tokens=tokens,
                payload_key=label.payload_key,
                weight=weight,
            )
            for number, prompt_index, version, times_sampled, tokens, label, weight in zip(
                *columns, labels, weights, strict=True
            )
        ]
        named = Counter(label.adapter for label in labels if label.adapter)
        return msgspec.structs.replace(
            self.record,
            batch_id=f"{self.record.generation}-{self.record.step}-{digest[:8]}",
            digest=digest,
            groups=groups,
            adapters={name: self.parts(name, count) for name, count in sorted(named.items())},
        )


def draft_batch(state: RunState, selector: Selector, chosen: BatchSelection, now_s: float) -> BatchDraft:
    """Decide the batch of the next step."""
    config, step, index = config_of(state), state.next_step, state.index
    rows = index.rows_of(chosen.rows)
    names = ("number", "prompt_index", "policy_version", "times_sampled", "tokens")
    columns = [index[name][rows] for name in names]
    versions = {name: state.version_at(step, name) for name in config.adapter_names}
    record = BatchRecord(
        step=step,
        generation=state.generation,
        batch_id="",
        digest="",
        version=0 if config.adapters else config.version_of(step),
        strategy=config.strategy.name,
        options=config.strategy.options,
        seed=selector.inputs.seed(step),
        tokens=int(columns[-1].sum(dtype=np.int64)),
        rollouts=int(index["rollouts"][rows].sum(dtype=np.int64)),
        groups=[],
        turn=chosen.turn,
        short=chosen.short,
        fill=_fill_of(state, chosen, int(columns[-1].sum(dtype=np.int64))),
        stale_token_mask=loss_mask_bound(config, selector.bounds.max_staleness),
        at_s=now_s,
        index_end=state.stored,
    )
    progress = {name: state.progress_at(step, name) for name in config.adapters}

    def part(name: str, groups: int) -> AdapterStep:
        completed = name in chosen.ending or progress[name].groups + groups == config.groups_per_batch_of(name)
        return AdapterStep(progress[name].steps, versions[name], groups, completed)

    return BatchDraft(record, columns, chosen.weights, versions, part)


def _fill_of(state: RunState, chosen: BatchSelection, tokens: int) -> float | None:
    """Return how full a short batch is: the larger of its shares of the bounds in groups and in tokens."""
    if not chosen.short:
        return None
    config, budget = config_of(state), state.token_budget
    sizes = [config.groups_per_batch_of(name) for name in config.active_adapters]
    groups = sum(size for size in sizes if size)
    return max(len(chosen.rows) / groups if groups else 0.0, tokens / budget if budget else 0.0)


# ---------------------------------------------------------------------- trainer


def decide_attach(state: RunState, request: AttachRequest, now_s: float, epoch_base: int = 0) -> AttachRecord:
    """Decide the attach of a trainer. Raises `WrongStep` for a step that cannot be resumed, `Invalid`.

    `epoch_base`: of the restore of the run, a multiple of `EPOCHS_OF_RESTORE` above all epochs in its backup; else 0.
    """
    config = config_of(state)
    batch = config.batch
    step = state.step if request.resume_step is None else request.resume_step
    if not state.oldest_step <= step <= state.step:
        detail = (
            f"resume_step is {step}; steps {state.oldest_step} (oldest kept checkpoint) to {state.step} (next unacked) "
            "can be resumed"
        )
        raise WrongStep(detail, name="resume_step", value=step, bound=[state.oldest_step, state.step])
    seq_len = batch.seq_len if request.seq_len is None else request.seq_len
    multiple = batch.pad_to_multiple_of if request.pad_to_multiple_of is None else request.pad_to_multiple_of
    if seq_len % multiple:
        detail = f"pad_to_multiple_of is {multiple}; it must be a divisor of seq_len = {seq_len}"
        raise Invalid(detail, name="pad_to_multiple_of", value=multiple, bound=f"a divisor of seq_len = {seq_len}")
    if request.cost is not None:
        request.cost.check()
    if config.batch.token_budget(request.dp_world_size) != state.token_budget:
        resolve_config(config, request.dp_world_size)
        check_live_groups(state, config, request.dp_world_size)
    return AttachRecord(
        # Trainers that attached after the backup have the epochs that follow those in it. The last six digits count on:
        # epoch 7,000,012 follows 7,000,011, and an epoch_base of 9,000,000 makes it 9,000,012. An accepted loss raises
        # them, and fences the attaches that Redis lost since the restore.
        epoch=max(state.epoch, epoch_base + state.epoch % EPOCHS_OF_RESTORE) + 1,
        step=step,
        dp_world_size=request.dp_world_size,
        seq_len=seq_len,
        pad_to_multiple_of=multiple,
        cost=request.cost,
        extras=request.extras,
        fixed=request.fixed,
        rewinds=step < state.step or (request.on_resume == "resample" and step < state.next_step),
        at_s=now_s,
    )


def decide_rewind(state: RunState, step: int, on_resume: OnResume, now_s: float) -> RewindRecord:
    """Decide to go back to a step. Redis raises `until` to its newest group when it appends the record."""
    config = config_of(state)
    return RewindRecord(
        step=step,
        generation=state.generation + 1,
        on_resume=on_resume,
        version=0 if config.adapters else config.version_of(step),
        versions={name: state.version_at(step, name) for name in config.adapters},
        until=state.stored,
        at_s=now_s,
    )


def decide_ack(
    state: RunState,
    step: int,
    epoch: int,
    feedback: dict[str, Any] | None,
    priorities: dict[int, float],
    now_s: float,
    waited_s: dict[str, float] | None = None,
    metrics: dict[str, float | None] | None = None,
) -> AckRecord | None:
    """Decide that a step is trained; None if it was acked before.

    `priorities` by group number, `waited_s` by reason, `metrics` by name for people.

    Raises `WrongStep` out of order or for a batch that was never served.
    """
    unserved = step == state.step and step not in state.batches
    if step < 0 or step > state.step or unserved:
        why = "its batch was never served" if unserved else f"the next step to ack is {state.step}"
        raise WrongStep(f"step is {step}; {why}", name="step", value=step, bound=state.step)
    if step < state.step:
        return None
    return AckRecord(
        step=step,
        epoch=epoch,
        feedback=feedback,
        priorities=priorities,
        at_s=now_s,
        waited_s=waited_s or {},
        metrics=metrics or {},
    )


def read_priorities(answer: Any, batch: BatchRecord) -> dict[int, float]:
    """Turn `feedback["priorities"]` (group id -> number >= 0) into priorities by group number. Raises `Invalid`."""
    if answer is None:
        return {}
    numbers = {entry.group_id: entry.number for entry in batch.groups}
    if not isinstance(answer, dict):
        detail = f"feedback.priorities is {type(answer).__name__}; it must be an object of group ids and numbers"
        raise Invalid(detail, name="feedback.priorities", bound="object")
    for group_id, value in answer.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST_PRIORITY
        if group_id not in numbers or not number:
            detail = (
                f"feedback.priorities[{group_id!r}] is {value!r}; batch {batch.step} needs ids of its groups and "
                f"numbers from 0 to {LARGEST_PRIORITY:g}"
            )
            raise Invalid(detail, name=f"feedback.priorities.{group_id}", value=str(value), bound=[0, LARGEST_PRIORITY])
    return {numbers[group_id]: float(value) for group_id, value in answer.items()}


def decide_policy(
    state: RunState, version: int, epoch: int, weights_uri: str | None, adapter: str, now_s: float
) -> PolicyRecord | None:
    """Decide that the engines have loaded a version. Raises `Conflict` for a lower one and for one too far ahead.

    The published version is announced again to give its `weights_uri` after a rewind. Engines start with version 0,
    which has no `weights_uri`.
    """
    check_adapter(adapter, config_of(state))
    published, newest = state.published[adapter], state.version_at(state.step, adapter)
    if not published <= version <= newest:
        why = "versions only grow" if version < published else "ack the steps before it first"
        detail = f"version is {version}; published is {published}, the next unacked step trains {newest}: {why}"
        raise Conflict(detail, name="version", value=version, bound=[published, newest])
    if version == published and (weights_uri is None or state.weights_uri[adapter] is not None or not version):
        return None
    return PolicyRecord(version=version, weights_uri=weights_uri, adapter=adapter, epoch=epoch, at_s=now_s)


def decide_checkpoint(
    state: RunState, step: int, keep: int, now_s: float, kept: Kept = NOTHING_KEPT
) -> CheckpointRecord | None:
    """Decide to keep what the newest `keep` checkpoints and the cursors may need. Raises `WrongStep`."""
    if not state.oldest_step <= step <= state.step:
        detail = f"step is {step}; a checkpoint can be recorded for steps {state.oldest_step} to {state.step}"
        raise WrongStep(detail, name="step", value=step, bound=[state.oldest_step, state.step])
    if sorted({*state.checkpoints, step})[-keep:] == state.checkpoints:
        return None
    return CheckpointRecord(step=step, keep=keep, at_s=now_s, kept_after=kept.after, kept_from=kept.from_step)

"""Trajectories of verl as the rollouts of a group, and back.

A group has columns for what every trainer needs: tokens, mask, logprobs, reward, policy version. verl writes more
fields for each trajectory. Those that follow from the columns are computed again; the others travel in the group's
metadata.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from replaybuf.client import group_builder
from replaybuf.client.unpack import check_unweighted, rollout_keys
from replaybuf.errors import Invalid
from replaybuf.wire.batch import Batch
from replaybuf.wire.decoding import prepared
from replaybuf.wire.group import Group
from replaybuf_transferqueue.values import decode, encode

METADATA = "verl"
LARGEST_OTHERS_BYTES = 180 << 10
"""A frame has 256 KiB for its header, and base 64 adds a third."""
_NEEDED = {
    "prompts": "verl's agent loop writes it",
    "responses": "verl's agent loop writes it",
    "response_mask": "verl's agent loop writes it",
    "rollout_log_probs": "set actor_rollout_ref.rollout.calculate_log_probs=True",
    "rm_scores": "use a reward function, or reward.reward_model.enable_resource_pool=True",
}


class Trajectory(NamedTuple):
    """One trajectory in the queue: its key `UID_SESSION_INDEX`, its fields and its tag."""

    key: str
    fields: dict[str, Any]
    tag: dict[str, Any]


class _Others(msgspec.Struct, array_like=True):
    """What a group keeps beside its columns: fields that all trajectories share, then those of each, encoded."""

    shared: dict[str, bytes]
    own: list[dict[str, bytes]]
    keys: list[str]
    tags: list[dict[str, Any]]


def uid_of(key: str) -> str:
    """Return the uid of the prompt, as verl reads it from the key of a trajectory."""
    return key.split("_", 1)[0]


def group_of(trajectories: Sequence[Trajectory], group_id: str) -> Group:
    """Build the group of a prompt. Raises `GroupRejected`, and `Invalid` that names a field which does not fit."""
    ordered = sorted(trajectories, key=lambda trajectory: [int(part) for part in trajectory.key.split("_")[1:]])
    versions = [_oldest_version(trajectory.tag) for trajectory in ordered]
    builder = group_builder(
        prompt_id=_prompt_name(ordered[0]),
        policy_version=min(versions),
        group_id=group_id,
        metadata={METADATA: _pack([_other_fields(trajectory) for trajectory in ordered], ordered)},
    )
    for trajectory, version in zip(ordered, versions, strict=True):
        builder.add(
            trajectory.fields["responses"].numpy(),
            trajectory.fields["rollout_log_probs"].float().numpy(),
            float(trajectory.fields["rm_scores"].sum()),
            mask=trajectory.fields["response_mask"].numpy(),
            prompt_ids=trajectory.fields["prompts"].numpy(),
            policy_version=version,
        )
    return builder.build()


def trajectories_of(batch: Batch, suffix: str) -> list[Trajectory]:
    """Return the trajectories of a batch, group by group, with `suffix` behind their uids.

    The body must have the extras `lengths` and `metadata`.
    """
    trajectories: list[Trajectory] = []
    rollouts: dict[tuple[int, int], dict[str, torch.Tensor]] = dict(_rollouts_of(batch))
    metadata = batch.meta.group_metadata or []
    for index, (group_id, packed) in enumerate(zip(batch.meta.group_ids, metadata, strict=True)):
        others, uid = _unpack(group_id, packed), f"{group_id}{suffix}"
        for number, (key, tag) in enumerate(zip(others.keys, others.tags, strict=True)):
            encoded = others.shared | others.own[number]
            fields = rollouts[index, number] | {name: decode(value, name) for name, value in encoded.items()}
            _, session = key.split("_", 1)
            trajectories.append(Trajectory(f"{uid}_{session}", fields | {"uid": uid}, tag))
    return trajectories


def _rollouts_of(batch: Batch) -> Iterator[tuple[tuple[int, int], dict[str, torch.Tensor]]]:
    """Yield the fields that follow from the columns, by number of the group and of the rollout."""
    check_unweighted(batch, "verl")
    for row in batch.micro_batches:
        if row.prompt_lengths is None:
            raise Invalid("the body has no prompt_lengths; attach with lengths=True", name="lengths", value=False)
        ids, mask = (torch.tensor(column, dtype=torch.int64) for column in (row.input_ids, row.loss_mask))
        logprobs, bounds = torch.tensor(row.inference_logprobs), row.cu_seqlens.tolist()
        for number, key in enumerate(rollout_keys(row)):
            start, end = bounds[number : number + 2]
            first = start + int(row.prompt_lengths[number])
            columns = (ids[start:first], ids[first:end], mask[first:end], logprobs[first:end])
            yield key, _fields_of(*columns, reward=float(row.rewards[number]))


def _fields_of(
    prompts: torch.Tensor, responses: torch.Tensor, mask: torch.Tensor, logprobs: torch.Tensor, *, reward: float
) -> dict[str, torch.Tensor]:
    """Compute the fields that verl derives from the columns of a rollout, as its agent loop does."""
    rm_scores = torch.zeros(len(responses))
    rm_scores[-1:] = reward
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses)),
        "rollout_log_probs": logprobs * mask,
        "rm_scores": rm_scores,
    }


def _other_fields(trajectory: Trajectory) -> dict[str, bytes]:
    """Encode the fields that do not follow from the columns. Raises `Invalid` for a field that is missing."""
    for name, way_out in _NEEDED.items():
        if not isinstance(trajectory.fields.get(name), torch.Tensor):
            raise Invalid(f"trajectory {trajectory.key} has no field {name!r}; {way_out}", name=name, value=None)
    prompts, responses, mask = (trajectory.fields[name].long() for name in ("prompts", "responses", "response_mask"))
    logprobs, reward = trajectory.fields["rollout_log_probs"].float(), float(trajectory.fields["rm_scores"].sum())
    derived = _fields_of(prompts, responses, mask, logprobs, reward=reward)
    return {
        name: encode(value, name)
        for name, value in trajectory.fields.items()
        if name != "uid" and not (name in derived and torch.equal(value, derived[name]))
    }


def _oldest_version(tag: Mapping[str, Any]) -> int:
    """Return the version that sampled the first token: verl numbers weights by the steps that trained them."""
    oldest = tag.get("min_global_steps")
    return int(tag["global_steps"]) - 1 if oldest is None else int(oldest)


def _prompt_name(trajectory: Trajectory) -> str:
    source, index = trajectory.fields.get("data_source"), trajectory.fields.get("index")
    named = isinstance(source, str) and isinstance(index, int | str | np.integer)
    return f"{source}/{index}" if named else uid_of(trajectory.key)


def _pack(fields: Sequence[dict[str, bytes]], trajectories: Sequence[Trajectory]) -> str:
    shared = {name: value for name, value in fields[0].items() if all(encoded.get(name) == value for encoded in fields)}
    own = [{name: value for name, value in encoded.items() if name not in shared} for encoded in fields]
    others = _Others(
        shared,
        own,
        [trajectory.key for trajectory in trajectories],
        [dict(trajectory.tag) for trajectory in trajectories],
    )
    packed = zlib.compress(msgspec.msgpack.encode(others))
    if len(packed) > LARGEST_OTHERS_BYTES:
        sizes = {name: sum(len(encoded.get(name, b"")) for encoded in fields) for encoded in fields for name in encoded}
        largest = max(sizes, key=lambda name: sizes[name])
        detail = (
            f"prompt {uid_of(trajectories[0].key)} has {len(packed)} bytes in fields without a column in a group; "
            f"the maximum is {LARGEST_OTHERS_BYTES}. The largest is {largest!r}: this sampler does not support it"
        )
        raise Invalid(detail, name=largest, value=len(packed), bound=LARGEST_OTHERS_BYTES)
    return base64.b64encode(packed).decode()


def _unpack(group_id: str, metadata: Mapping[str, Any] | None) -> _Others:
    if metadata is None or METADATA not in metadata:
        detail = f"group {group_id} has no metadata {METADATA!r}; only this sampler may append to the run"
        raise Invalid(detail, name="metadata", value=group_id)
    return msgspec.msgpack.decode(zlib.decompress(base64.b64decode(metadata[METADATA])), type=prepared(_Others))

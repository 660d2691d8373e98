"""A new run from an export: warm start with all groups, or the trained groups alone in their recorded order.

Stored groups keep ids, prompts, adapters, rewards and advantages. A version above the published one of the new run is
not possible: such a group gets the published version and no version spans, and its metadata keep what it had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import msgspec

from replaybuf.client.client import Client
from replaybuf.client.exports.reader import ExportReader
from replaybuf.errors import Invalid
from replaybuf.wire.config import RunConfig, StrategySpec
from replaybuf.wire.group import Group

AT_ONCE = 32
"""Groups of one append."""
FILES_KEPT = 8
RECORDED = "recorded"
"""Strategy that serves groups in the order of storing, as many per step as its option `sizes` says."""

_Rows = tuple[dict[str, Any], list[dict[str, Any]]]


def import_run(
    client: Client, reader: ExportReader, *, replay_order: bool, report: Callable[[int, int], None]
) -> Counter[str]:
    """Create the run if it does not exist, append the groups; return how many were stored, duplicate or skipped.

    A repetition continues: groups that are stored are `duplicate`. `replay_order`: each step gets the groups of the
    recorded step, in the recorded order; not for runs with adapters. Raises `Invalid` for those and for a damaged
    export, and what `append` raises.
    """
    client.put_run(_config(reader, replay_order), if_absent=True)
    published = client.get_run().published_version
    outcomes: Counter[str] = Counter()
    total = sum(map(len, reader.manifest.steps.values())) if replay_order else reader.manifest.rows["groups"]
    batch: list[Group] = []
    for group_id, (row, rollouts) in _in_recorded_order(reader) if replay_order else _in_arrival_order(reader):
        if not rollouts:
            outcomes["without_rollouts"] += 1
            continue
        batch.append(_group(reader, group_id, row, rollouts, published))
        if len(batch) == AT_ONCE:
            outcomes += _append(client, batch)
            batch = []
        report(outcomes.total() + len(batch), total)
    return outcomes + _append(client, batch)


def _append(client: Client, groups: list[Group]) -> Counter[str]:
    results = client.append(groups) if groups else []
    return Counter(f"rejected: {result.reason}" if result.reason else result.status for result in results)


def _config(reader: ExportReader, replay_order: bool) -> RunConfig:
    """Return the configuration of the new run.

    It has no spill folder: an export of somebody else must not choose where this service writes.
    """
    recorded = reader.config(RunConfig)
    limits = msgspec.structs.replace(recorded.limits, max_bytes_in_memory=None)
    config = msgspec.structs.replace(recorded, spill=None, limits=limits)
    if replay_order:
        if config.adapters:
            adapters = sorted(config.adapters)
            raise Invalid(
                f"the export is of a run with adapters {adapters}; replay in the recorded order is for runs without "
                "adapters; import it without --replay-order",
                name="replay_order",
                value=adapters,
                bound=[],
            )
        steps = reader.manifest.steps
        if sorted(steps) != list(range(len(steps))):
            raise Invalid(
                f"the export has steps {min(steps, default=0)} to {max(steps, default=0)}; replay needs all from 0 on",
                name="replay_order",
                value=len(steps),
            )
        sizes = [len(steps[step]) for step in range(len(steps))]
        batch = msgspec.structs.replace(config.batch, tokens_per_batch=None, groups_per_batch=max(sizes, default=1))
        strategy = StrategySpec(name=RECORDED, options={"sizes": sizes})
        config = msgspec.structs.replace(config, strategy=strategy, batch=batch, filters=[], max_steps=len(steps))
    return config


def _in_arrival_order(reader: ExportReader) -> Iterator[tuple[str, _Rows]]:
    return ((rows[0]["group_id"], rows) for rows in reader.groups())


def _in_recorded_order(reader: ExportReader) -> Iterator[tuple[str, _Rows]]:
    """Yield each use of a group; uses after the first have an id of their own. Raises `Invalid` for a missing group."""
    places = reader.places()
    read = lru_cache(FILES_KEPT)(reader.read_groups)
    used: set[str] = set()
    for step, group_ids in sorted(reader.manifest.steps.items()):
        for group_id in group_ids:
            rows = read(places[group_id])[group_id] if group_id in places else ({}, [])
            if not rows[1]:
                raise Invalid(
                    f"step {step} used group {group_id!r}, whose rollouts the export lacks: they were freed before it",
                    name="replay_order",
                    value=group_id,
                )
            yield f"{group_id}#{step}" if group_id in used else group_id, rows
            used.add(group_id)


def _group(
    reader: ExportReader, group_id: str, row: dict[str, Any], rollouts: list[dict[str, Any]], published: int
) -> Group:
    wire = reader.group_json(row, rollouts)
    version = wire.policy_version
    newest = max((span[0] for rollout in wire.rollouts for span in rollout.version_spans or ()), default=version)
    wire.group_id = group_id
    if max(version, newest) > published:
        imported = {"run": reader.manifest.run, "policy_version": version, "policy_version_max": newest}
        wire.metadata["imported"] = imported
        wire.policy_version = min(version, published)
        for rollout in wire.rollouts:
            rollout.version_spans = None
    return reader.group(wire)

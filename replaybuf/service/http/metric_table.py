"""Table of all metrics of the service: name (after `replaybuf_`), kind, labels, help text.

Counters and histograms of groups, tokens and prompts are folded from the ledger, so they survive a restart. Waiting
seconds, truncated groups, prepared batches, unconfirmed writes and requests start at 0 with the process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily


class MetricRow(NamedTuple):
    """One metric."""

    kind: Any
    labels: tuple[str, ...]
    text: str


# fmt: off
_ROWS: dict[str, tuple[Any, str, str]] = {
    # counts of a run
    "groups_stored": (COUNTER, "run", "Groups stored"),
    "groups_used": (COUNTER, "run", "Groups put into batches, each use counted"),
    "groups_used_by_staleness": (COUNTER, "run staleness", "Groups put into batches by staleness"),
    "groups_retired": (COUNTER, "run", "Groups freed after a checkpoint"),
    "groups_dropped": (COUNTER, "run reason", "Groups never used: rejected, evicted, dead-lettered"),
    "groups_dead_lettered": (COUNTER, "run", "Stored groups that turned out unusable"),
    "groups_partial": (COUNTER, "run", "Groups stored with fewer rollouts than group_size"),
    "groups_duplicate": (COUNTER, "run", "Appends answered duplicate"),
    "rollouts_truncated_groups": (COUNTER, "run", "Groups with rollouts cut to seq_len"),
    "tokens_used": (COUNTER, "run", "Tokens put into batches, each use counted"),
    "tokens_masked": (COUNTER, "run", "Sampled tokens too old for the loss of their batches, each use counted"),
    "tickets_issued": (COUNTER, "run", "Tickets issued"),
    "tickets_expired": (COUNTER, "run", "Tickets that expired"),
    "tickets_returned": (COUNTER, "run", "Tickets given back"),
    "prompts_failed": (COUNTER, "run", "Prompts that failed max_attempts times"),
    "waiting_seconds": (COUNTER, "run reason", "Time trainers waited for a batch"),
    "batches_prepared": (COUNTER, "run outcome", "Batches by how much of them was prepared ahead"),
    # state of a run
    "prompts_failed_share": (GAUGE, "run", "Share of the newest prompts that failed, with tickets.max_failed_share"),
    "prompts_failed_alarm": (GAUGE, "run", "1 while prompts_failed_share is above tickets.max_failed_share"),
    "run_state": (GAUGE, "run state", "1 for the state of the run"),
    "groups_live": (GAUGE, "run", "Groups that may be sampled"),
    "groups_in_batches": (GAUGE, "run", "Groups in batches that a resume may need and no batch may sample"),
    "tokens_live": (GAUGE, "run", "Tokens of live groups"),
    "bytes_live": (GAUGE, "run", "Bytes of the frames of live groups"),
    "bytes_in_memory": (GAUGE, "run", "Bytes of frames in Redis, of a run with a spill folder"),
    "bytes_spilled": (GAUGE, "run", "Bytes of frames in the spill folder"),
    "groups_spilled": (GAUGE, "run", "Groups whose frames are in the spill folder"),
    "spill_moves": (COUNTER, "run", "Groups moved to the spill folder by this server"),
    "spill_reads": (COUNTER, "run", "Files read from the spill folder by this server"),
    "spill_failures": (COUNTER, "run", "Calls of the spill folder that failed"),
    "spill_up": (GAUGE, "run", "1 while the spill folder can be used"),
    "prompts": (GAUGE, "run state", "Issued prompts by outcome"),
    "groups_per_second": (GAUGE, "run", "Groups stored per second, over the last minute"),
    "steps_per_second": (GAUGE, "run", "Steps acked per second, over the last 16"),
    "step_seconds": (GAUGE, "run", "Seconds per step without waiting for others, over the last 16"),
    "group_seconds": (GAUGE, "run", "Seconds from ticket to stored group, last 256"),
    "tickets_out": (GAUGE, "run", "Tickets out"),
    "published_version": (GAUGE, "run", "Newest version loaded by the engines"),
    "step": (GAUGE, "run", "Next unacked step"),
    "epoch": (GAUGE, "run", "Epoch of the attached trainer"),
    "trainer_last_seen_seconds": (GAUGE, "run", "Seconds since the attached trainer last called this server"),
    "producers_last_seen_seconds": (GAUGE, "run", "Seconds since a producer last called this server"),
    "producers_known": (GAUGE, "run", "Producers that called this server by name within an hour, at most 1,000"),
    "producers_gone": (GAUGE, "run", "Producers that sent heartbeats and stopped"),
    "generation": (GAUGE, "run", "Number of rewinds"),
    "leading": (GAUGE, "run", "1 if this server leads the run, 0 if it follows"),
    "index_bytes": (GAUGE, "run", "Bytes of the in-memory index"),
    "cursor_lag_groups": (GAUGE, "run cursor", "Groups behind a reader's cursor"),
    "cursor_groups_missed": (COUNTER, "run", "Groups and steps that readers missed because they were freed before"),
    # distributions of a run; a kind is stored, used or dropped
    "group_times_sampled": (HISTOGRAM, "run", "Uses of groups by times_sampled, this use counted"),
    "group_age_at_use_seconds": (HISTOGRAM, "run", "Uses of groups by the time since the group arrived"),
    "rollout_tokens": (HISTOGRAM, "run kind", "Groups by the mean tokens of their rollouts"),
    "longest_rollout_tokens": (HISTOGRAM, "run kind", "Groups by the tokens of their longest rollout"),
    "dropped_age_versions": (HISTOGRAM, "run reason", "Groups dropped before any use by age in policy versions"),
    "dropped_age_seconds": (HISTOGRAM, "run reason", "Groups dropped before any use by the time since they arrived"),
    # adapters of a run
    "adapter_groups_stored": (COUNTER, "run adapter", "Groups of an adapter stored"),
    "adapter_groups_used": (COUNTER, "run adapter", "Groups of an adapter put into batches, each use counted"),
    "adapter_tokens_used": (COUNTER, "run adapter", "Tokens of an adapter put into batches, each use counted"),
    "adapter_groups_used_by_staleness":
        (COUNTER, "run adapter staleness", "Groups of an adapter put into batches by staleness"),
    "adapter_groups_dropped": (COUNTER, "run adapter reason", "Stored groups of an adapter that were never used"),
    "adapter_groups_live": (GAUGE, "run adapter", "Groups of an adapter that may be sampled"),
    "adapter_tokens_live": (GAUGE, "run adapter", "Tokens of an adapter's live groups"),
    "adapter_tickets_out": (GAUGE, "run adapter", "Tickets of an adapter that are out"),
    "adapter_published_version": (GAUGE, "run adapter", "Newest version of an adapter loaded by the engines"),
    "adapter_step": (GAUGE, "run adapter", "Next unacked step of an adapter, counted by its own batches"),
    "adapter_groups_given": (GAUGE, "run adapter", "Groups given to the next own batch of an adapter"),
    "adapter_groups_per_batch": (GAUGE, "run adapter", "Groups of an own batch of an adapter"),
    "adapter_waiting": (GAUGE, "run adapter reason", "1 for the reason why an adapter can give nothing to a batch"),
    "adapter_rollout_tokens": (HISTOGRAM, "run adapter kind", "Groups of an adapter by mean tokens of their rollouts"),
    # calls
    "requests": (COUNTER, "run call status", "Calls answered"),
    "request_seconds": (HISTOGRAM, "run call", "Calls by time to the start of the answer, without requested waits"),
    "requests_refused": (COUNTER, "reason", "Requests and connections refused before any call"),
    "connections": (GAUGE, "", "Open connections"),
    "body_bytes": (GAUGE, "", "Bytes of request bodies in memory, without bodies up to 64 KiB"),
    # the server and its Redis
    "durability_strict": (GAUGE, "", "1 if an acknowledged write is on disk"),
    "writes_unconfirmed": (COUNTER, "", "Writes answered not-durable"),
    "redis_up": (GAUGE, "", "1 while Redis answers"),
    "redis_replicas": (GAUGE, "", "Replicas connected to Redis"),
    "replicas_confirmed": (GAUGE, "", "Replicas that confirmed the last write"),
    "redis_memory_used_bytes": (GAUGE, "", "Memory that Redis uses"),
    "redis_memory_max_bytes": (GAUGE, "", "Memory that Redis may use; 0 = unbounded"),
    "loop_hold_seconds": (HISTOGRAM, "", "Wake-ups of the event loop by how late they came"),
}
# fmt: on
METRICS = {name: MetricRow(kind, tuple(labels.split()), text) for name, (kind, labels, text) in _ROWS.items()}

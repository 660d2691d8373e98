"""Table of all metrics of the service: name (after `replaybuf_`), kind, labels, help text.

Counters and histograms of groups, tokens and prompts are folded from the ledger, so they survive a restart. Those of
`SINCE_START` start at 0 with the process. docs/metrics.md is written from this table. The label `adapter` is absent in
a run without adapters.
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
    "groups_stored": (COUNTER, "run adapter", "Groups stored"),
    "groups_used": (COUNTER, "run adapter", "Uses of groups in batches"),
    "groups_used_by_staleness":
        (COUNTER, "run adapter staleness", "Uses by staleness in policy versions; 65+ is everything above 64"),
    "groups_retired": (COUNTER, "run", "Groups freed after a checkpoint"),
    "groups_dropped":
        (COUNTER, "run adapter reason", "Groups never used: rejected (of any adapter), evicted, dead-lettered"),
    "groups_dead_lettered": (COUNTER, "run", "Dead letters: stored groups that are unusable"),
    "groups_partial": (COUNTER, "run", "Groups stored with fewer rollouts than group_size: they lost some to faults"),
    "groups_duplicate": (COUNTER, "run", "Appends answered duplicate"),
    "rollouts_truncated_groups": (COUNTER, "run", "Groups with rollouts cut to seq_len"),
    "tokens_used": (COUNTER, "run adapter", "Tokens in batches, each use counted"),
    "tokens_stored": (COUNTER, "run", "Tokens of the groups stored while this server led the run"),
    "tokens_masked": (COUNTER, "run", "Sampled tokens in batches that were too old for the loss (stale_token_mask)"),
    "admission_seconds":
        (HISTOGRAM, "run admission", "Checks of an admission plug-in by the time they took, those cut off included"),
    "admission_waiting": (GAUGE, "run", "Requests that wait for the admission check; above 64 the answer is 429"),
    "admission_deferred":
        (COUNTER, "run", "Requests answered 429, because the queue of the admission check was full or too slow"),
    "tickets_issued": (COUNTER, "run", "Tickets issued"),
    "tickets_expired": (COUNTER, "run", "Tickets that expired: a producer died or is too slow"),
    "tickets_returned": (COUNTER, "run", "Tickets returned"),
    "prompts_failed": (COUNTER, "run", "Prompts that failed max_attempts times"),
    "prompts_reissued": (COUNTER, "run", "Prompts issued again because their group was too stale (on_stale)"),
    "waiting_seconds": (
        COUNTER, "run reason",
        "Time that trainers waited for a batch, by reported reason; "
        "prefetching does not count",
    ),
    "batches_prepared": (
        COUNTER, "run outcome",
        "Batches by what was prepared before the request: hit all, partial "
        "some groups, miss nothing",
    ),
    # state of a run
    "prompts_failed_share":
        (GAUGE, "run", "With tickets.max_failed_share: share of the newest 200 ended prompts that failed"),
    "prompts_failed_alarm": (GAUGE, "run", "1 while prompts_failed_share is above tickets.max_failed_share"),
    "run_state": (GAUGE, "run state", "1 for the state of the run: running, paused, finished"),
    "groups_live": (GAUGE, "run adapter", "Groups that may be sampled"),
    "groups_in_batches": (GAUGE, "run", "Used-up groups that a resume may need"),
    "tokens_live": (GAUGE, "run adapter", "Tokens of live groups"),
    "bytes_live": (GAUGE, "run", "Bytes of the frames of live groups"),
    "bytes_in_memory": (GAUGE, "run", "Bytes of frames in Redis, of a run with a spill folder"),
    "bytes_spilled": (GAUGE, "run", "Bytes of frames in the spill folder"),
    "groups_spilled": (GAUGE, "run", "Groups whose frames are in the spill folder"),
    "spill_moves": (COUNTER, "run", "Groups that this server moved to the spill folder"),
    "spill_reads": (COUNTER, "run", "Files that this server read from the spill folder"),
    "spill_failures": (COUNTER, "run", "Calls of the folder that failed"),
    "spill_up": (GAUGE, "run", "1 while the spill folder can be used"),
    "prompts": (GAUGE, "run state", "Issued prompts: trained, dropped, failed, pending"),
    "groups_per_second": (GAUGE, "run", "Groups stored per second over the last minute"),
    "steps_per_second":
        (GAUGE, "run", "Acked steps per second over the last 16; 0 = unknown yet, also in the next two"),
    "step_seconds": (GAUGE, "run", "Seconds per step without waiting, over the last 16"),
    "group_seconds": (GAUGE, "run", "Seconds from ticket to stored group, over the last 256"),
    "tickets_out": (GAUGE, "run adapter", "Tickets out"),
    "published_version": (GAUGE, "run adapter", "Newest published version"),
    "step": (GAUGE, "run", "Next unacked step"),
    "step_timestamp_seconds": (GAUGE, "run", "Unix time of the newest ack; absent before the first"),
    "checkpoint_step": (GAUGE, "run", "Step of the newest checkpoint; 0 = none yet"),
    "batch_reward_mean": (GAUGE, "run", "Mean of the group rewards in the newest batch; absent before the first batch"),
    "batch_reward_std": (GAUGE, "run", "Mean over the groups of the newest batch of the spread of their rewards"),
    "batch_reward_min": (GAUGE, "run", "Least mean reward of a group in the newest batch"),
    "batch_reward_max": (GAUGE, "run", "Greatest mean reward of a group in the newest batch"),
    "batch_fill_ratio": (GAUGE, "run", "Share of the budget of tokens or groups that the newest batch fills"),
    "limit_used_ratio":
        (GAUGE, "run limit", "Share of a limit of the run that is in use; only for limits that are set"),
    "epoch": (GAUGE, "run", "Epoch of the attached trainer; 0 = none yet"),
    "trainer_last_seen_seconds":
        (GAUGE, "run", "Time since the attached trainer last called this server; after a restart, since then"),
    "producers_last_seen_seconds":
        (GAUGE, "run", "Time since a producer last called this server; absent before the first call"),
    "producers_known": (GAUGE, "run", "Producers that called this server by name within the last hour, at most 1,000"),
    "producers_gone": (GAUGE, "run", "Producers that sent heartbeats and stopped"),
    "generation": (GAUGE, "run", "Rewinds so far"),
    "leading": (GAUGE, "run", "1 if this server leads the run, 0 if it follows; the sum over servers should be 1"),
    "index_bytes": (GAUGE, "run", "Bytes of the in-memory index"),
    "cursor_lag_groups": (GAUGE, "run cursor", "Groups behind a cursor"),
    "cursor_groups_missed":
        (COUNTER, "run", "Groups and steps that were freed or trimmed before a cursor reached them"),
    "evaluation_reward_mean": (
        GAUGE, "run set adapter",
        "Mean reward of the newest evaluation of a held-out set; only from the leader, for the newest 64 sets",
    ),
    "evaluation_standard_error":
        (GAUGE, "run set adapter", "Standard error of evaluation_reward_mean; absent for one prompt"),
    "evaluation_version": (GAUGE, "run set adapter", "Oldest policy version that sampled the newest evaluation"),
    # distributions of a run; a kind is stored, used or dropped
    "group_times_sampled": (HISTOGRAM, "run", "Uses by how often the group was used, this use included"),
    "group_age_at_use_seconds": (HISTOGRAM, "run", "Uses by the time from the group's arrival to its batch"),
    "rollout_tokens":
        (HISTOGRAM, "run adapter kind", "Groups by mean tokens per rollout: stored, used (each use) or dropped"),
    "longest_rollout_tokens":
        (HISTOGRAM, "run kind", "Groups by the tokens of their longest rollout; kind as in rollout_tokens"),
    "dropped_age_versions": (HISTOGRAM, "run reason", "Dropped groups by version(step of the drop) - policy version"),
    "dropped_age_seconds": (HISTOGRAM, "run reason", "Dropped groups by the time since they arrived"),
    # own batches of adapters
    "own_batch_waiting": (GAUGE, "run adapter reason", "1 for the reason why an adapter has nothing for a batch now"),
    "own_batches_acked": (GAUGE, "run adapter", "Acked own batches of an adapter"),
    "own_batch_groups": (GAUGE, "run adapter", "Groups of the incomplete own batch of an adapter"),
    "own_batch_groups_full": (GAUGE, "run adapter", "Groups of a full own batch of an adapter"),
    # calls
    "requests": (
        COUNTER, "run call status",
        "Answered calls by method, path and status; run is empty for unknown "
        "runs; 499: the client disconnected",
    ),
    "request_seconds": (HISTOGRAM, "run call", "Time until the answer begins, uploads included, wait_ms excluded"),
    "requests_refused": (COUNTER, "reason", "Requests and connections refused before any call"),
    "connections": (GAUGE, "", "Open connections"),
    "body_bytes": (GAUGE, "", "Bytes of request bodies in memory, without bodies up to 64 KiB"),
    # the server and its Redis
    "build_info": (GAUGE, "version python", "1, with the versions of replaybuf and Python as labels"),
    "durability_strict": (GAUGE, "", "1 if acknowledged writes are on disk"),
    "durability_met":
        (GAUGE, "", "1 if durability and replicas are at least what --durability and --wait-replicas request"),
    "writes_unconfirmed": (COUNTER, "", "Writes answered 503 not-durable"),
    "redis_up": (GAUGE, "", "1 while Redis answers"),
    "redis_replicas": (GAUGE, "", "Replicas connected to Redis"),
    "replicas_confirmed": (GAUGE, "", "Replicas that confirmed the last write that waited"),
    "redis_memory_used_bytes": (GAUGE, "", "Memory Redis uses"),
    "redis_memory_max_bytes": (GAUGE, "", "Memory that Redis may use; 0 = no bound"),
    "loop_hold_seconds": (
        HISTOGRAM, "",
        "Wake-ups of the event loop by how late they came, 25 a second; above "
        "0.05 every call waits: give the service a core of its own, else look for a slow plug-in in the log",
    ),
}
# fmt: on
METRICS = {name: MetricRow(kind, tuple(labels.split()), text) for name, (kind, labels, text) in _ROWS.items()}

SINCE_START = {
    "admission_seconds",
    "admission_deferred",
    "rollouts_truncated_groups",
    "tokens_stored",
    "waiting_seconds",
    "batches_prepared",
    "spill_moves",
    "spill_reads",
    "spill_failures",
    "requests",
    "request_seconds",
    "requests_refused",
    "writes_unconfirmed",
    "loop_hold_seconds",
}
"""Counters and histograms that start at 0 with the process."""

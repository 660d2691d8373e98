"""What every field of a run's configuration means, by struct and field.

`replaybuf config schema` shows these lines; docs/http.md has them with more detail.
"""

from __future__ import annotations

DESCRIPTIONS: dict[str, dict[str, str]] = {
    "RunConfig": {
        "batch": "Bounds of a batch.",
        "strategy": "Strategy that selects the groups of a batch: name of an installed one, and its options.",
        "filters": "Filters in the order in which the service asks them, at most 64.",
        "admissions": "Admission plug-ins that check each group before it is stored, in this order, at most 8.",
        "group_size": "Rollouts of a group; groups of another size are rejected. Default: any size.",
        "min_group_size": "A group that lost rollouts to faults is stored if it has at least so many. Default: all.",
        "stale_token_mask": "Tokens of versions this far below that of the batch leave its loss mask. Default: none.",
        "vocab_size": "Token ids must be below it. Default: not checked.",
        "steps_per_publish": "Steps between two publications of weights.",
        "max_steps": "The run is finished after this number of steps. Default: endless.",
        "seed": "Seed of the selection of groups.",
        "advantage": "Estimator for groups without advantages: grpo, dr-grpo, rloo, rloo-length, process.",
        "tickets": "Rules for tickets, the permissions to generate groups.",
        "limits": "Bounds of the buffer.",
        "adapters": "LoRA adapters of the run by name.",
        "spill": "Where frames beyond limits.max_bytes_in_memory are stored. Default: nowhere. It never changes.",
    },
    "StrategySpec": {
        "name": "Name of an installed strategy or filter; `replaybuf strategies list` lists them.",
        "options": "Its options; `replaybuf strategies show NAME` explains them.",
    },
    "AdmissionSpec": {
        "name": "Name of an installed admission plug-in.",
        "options": "Its options.",
        "timeout_s": "Seconds for one group, at most 600; a group that takes longer is rejected.",
    },
    "BatchSpec": {
        "tokens_per_batch": "Maximum number of tokens of a batch, or {per_rank = N} for N per rank of the trainer.",
        "groups_per_batch": "Groups of a full batch. Default: no bound.",
        "seq_len": "Tokens of one micro-batch.",
        "pad_to_multiple_of": "Rows are padded to a multiple of it; it divides seq_len.",
        "overlong": "A rollout longer than seq_len: reject its group, or truncate its completion.",
        "tail": "Groups that fill no batch when no prompt is left: train makes a short last batch, drop evicts them.",
        "timeout_s": "After the trainer has waited so many seconds for groups, its batch may be short. Default: never.",
        "min_groups": "Minimum number of groups of a short batch after timeout_s.",
    },
    "TokensPerRank": {"per_rank": "Tokens of a batch for each rank of the attached trainer."},
    "TicketSpec": {
        "ttl_s": "Lifetime of a ticket in seconds; then its prompt is issued again.",
        "max_attempts": "Failed attempts after which a prompt is recorded as failed.",
        "prompts": "Number of prompts. Default: endless.",
        "heartbeat_s": "A producer that sends heartbeats and is silent for so many seconds loses its tickets.",
        "max_failed_share": "Share of the newest prompts that may fail before on_failed_share happens. Default: any.",
        "on_failed_share": "What happens above max_failed_share: alarm, pause the run, or finish it.",
    },
    "Limits": {
        "max_tokens_live": "Maximum number of live tokens. Default: no bound.",
        "max_bytes_live": "Maximum bytes of live frames; at least max_group_bytes. Default: no bound.",
        "max_bytes_in_memory": "Maximum bytes of frames in Redis; frames beyond it move to spill. Default: no bound.",
        "max_group_bytes": "Largest frame of one group in bytes, stored and decompressed.",
    },
    "SpillSpec": {"url": "file:///FOLDER, or the URL of an object store by fsspec."},
    "AdapterSpec": {
        "groups_per_batch": "Groups of the adapter per step.",
        "prompts": "Number of prompts of the adapter. Default: endless.",
        "steps_per_publish": "Steps of the adapter between two versions of it. Default: steps_per_publish of the run.",
        "paused": "The adapter has no share of batches and gets no tickets.",
        "removed": "The adapter is removed for good; its live groups are evicted.",
    },
}

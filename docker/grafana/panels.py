"""Panels and dashboards of Grafana as tables; dashboards.py writes them as JSON.

Three graphs or six figures make a row. A figure with two `texts` is red at 0 and green at 1.
"""

from __future__ import annotations

import dataclasses

R = '{run=~"$run"}'


@dataclasses.dataclass(frozen=True)
class Panel:
    """A graph, or a figure (`stat`); `queries` are pairs of expression and legend."""

    title: str
    text: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    stacked: bool = False
    stat: bool = False
    texts: tuple[str, str] | None = None
    shows: str = "auto"


def graph(title: str, text: str, *queries: tuple[str, str], unit: str = "short", stacked: bool = False) -> Panel:
    """Return a graph over time."""
    return Panel(title, text, queries, unit, stacked)


def stat(title: str, text: str, query: str, legend: str, texts: tuple[str, str] | None = None, **more: str) -> Panel:
    """Return a figure of the newest value; `texts` are shown in place of 0 and 1."""
    return Panel(
        title, text, ((query, legend),), more.get("unit", "none"), False, True, texts, more.get("shows", "auto")
    )


def rate(metric: str, by: str = "", more: str = "") -> str:
    """Return the rate per second of a counter, summed over servers, by run and more labels."""
    return f'sum by (run{by}) (rate(replaybuf_{metric}{{run=~"$run"{more}}}[$__rate_interval]))'


def newest(metric: str, by: str = "") -> str:
    """Return a gauge of a run. All servers of a run have the same value."""
    return f"max by (run{by}) (replaybuf_{metric}{R})"


def total(metric: str, by: str = "") -> str:
    """Return a gauge summed over processes."""
    return f"sum by (run{by}) (replaybuf_{metric}{R})"


def mean(histogram: str, by: str = "") -> str:
    """Return the mean of a histogram."""
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


def quantile(share: float, histogram: str, by: str = "") -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', f'{by}, le')})"


SERVICE = stat("Service", "1 if Prometheus reaches /metrics.", 'up{job="replaybuf"}', "{{instance}}", ("down", "up"))
REDIS = stat("Redis", "1 if the service reaches Redis.", "replaybuf_redis_up", "{{instance}}", ("down", "up"))
DURABILITY = stat(
    "Durability",
    "strict: acknowledged writes are on disk. relaxed: a killed Redis loses some; /readyz has the reason.",
    "replaybuf_durability_strict",
    "{{instance}}",
    ("relaxed", "strict"),
)
STATE = stat(
    "State",
    "running, paused or finished.",
    f"{newest('run_state', ', state')} == 1",
    "{{run}}: {{state}}",
    shows="name",
)
STEP = stat("Next unacked step", "Steps that the trainer acked so far.", newest("step"), "{{run}}")
TICKETS_OUT = stat("Tickets out", "Groups that are being generated now.", newest("tickets_out"), "{{run}}")
REWARD = graph(
    "Reward",
    "Mean, least and greatest reward of the groups in the newest batch.",
    (newest("batch_reward_mean"), "{{run}} mean"),
    (newest("batch_reward_min"), "{{run}} least"),
    (newest("batch_reward_max"), "{{run}} greatest"),
    unit="none",
)
TOKENS = graph(
    "Tokens in and out",
    "Tokens per second: stored, and put into batches (each use counted).",
    (rate("tokens_stored_total"), "{{run}} in"),
    (rate("tokens_used_total"), "{{run}} out"),
)
WAITING = graph(
    "Waiting for a batch, by reason",
    "Share of time in which the trainer waited; 1 = all the time.",
    (f"{rate('waiting_seconds_total', ', reason')} > 0", "{{run}} {{reason}}"),
    unit="percentunit",
    stacked=True,
)
DROPPED = graph(
    "Groups dropped, by reason",
    "Groups per second that were never used: rejected, evicted, dead letters.",
    (rate("groups_dropped_total", ", reason"), "{{run}} {{reason}}"),
    unit="cps",
    stacked=True,
)
STALENESS = graph(
    "Staleness at use",
    "Uses of groups per second, by staleness in policy versions.",
    (rate("groups_used_by_staleness_total", ", staleness"), "{{run}} staleness {{staleness}}"),
    unit="cps",
    stacked=True,
)
IN_BUFFER = graph(
    "Groups in the buffer",
    "live: may be sampled. in batches: used up, kept for a resume until a checkpoint frees them.",
    (newest("groups_live"), "{{run}} live"),
    (newest("groups_in_batches"), "{{run}} in batches"),
)
VERSIONS = graph(
    "Step and published version",
    "If the published version stays below step / steps_per_publish, the engines sample with old weights.",
    (newest("step"), "{{run}} step"),
    (newest("published_version"), "{{run}} published"),
)
GROUPS = graph(
    "Groups in and out",
    "Groups per second: stored, used in batches, answered duplicate.",
    (rate("groups_stored_total"), "{{run}} stored"),
    (rate("groups_used_total"), "{{run}} used"),
    (rate("groups_duplicate_total"), "{{run}} duplicate"),
    unit="cps",
)
LAST_CALLS = graph(
    "Last call of trainer and producers",
    "Seconds since the last call. A dead trainer waits for nothing, so waiting times do not show it.",
    (f"min by (run) (replaybuf_trainer_last_seen_seconds{R})", "{{run}} trainer"),
    (f"min by (run) (replaybuf_producers_last_seen_seconds{R})", "{{run}} producers"),
    unit="s",
)
LIMITS = graph(
    "Limits in use",
    "Share of each limit of the run that is set; at 1 producers get 429.",
    (newest("limit_used_ratio", ", limit"), "{{run}} {{limit}}"),
    unit="percentunit",
)
DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "overview": (
        "replaybuf: overview",
        (
            *(SERVICE, REDIS, DURABILITY, STATE, STEP, TICKETS_OUT),
            *(REWARD, TOKENS, VERSIONS, WAITING, DROPPED, STALENESS, IN_BUFFER, GROUPS, LAST_CALLS),
        ),
    ),
    "staleness": (
        "replaybuf: staleness and reuse",
        (
            STALENESS,
            graph(
                "Reuse",
                "Uses of a group so far, this use included: mean over the uses.",
                (mean("group_times_sampled"), "{{run}}"),
                unit="none",
            ),
            graph(
                "Age at use",
                "Seconds from the arrival of a group to a batch that holds it.",
                (quantile(0.5, "group_age_at_use_seconds"), "{{run}} median"),
                (quantile(0.9, "group_age_at_use_seconds"), "{{run}} 90th percentile"),
                unit="s",
            ),
            DROPPED,
            graph(
                "Age when dropped, by reason",
                "Mean age of dropped groups in policy versions at the step of the drop.",
                (mean("dropped_age_versions", ", reason"), "{{run}} {{reason}}"),
                unit="none",
            ),
            graph(
                "Masked tokens",
                "Tokens per second in batches that were too old for the loss (stale_token_mask).",
                (rate("tokens_masked_total"), "{{run}}"),
            ),
            graph(
                "Length bias: mean rollout",
                "Tokens of the mean rollout. Used below stored: the buffer loses long groups.",
                (mean("rollout_tokens", ", kind"), "{{run}} {{kind}}"),
                unit="none",
            ),
            graph(
                "Length bias: longest rollout, 90th percentile",
                "Tokens of the longest rollout of groups stored, used and dropped.",
                (quantile(0.9, "longest_rollout_tokens", ", kind"), "{{run}} {{kind}}"),
                unit="none",
            ),
            graph(
                "Prompt coverage",
                "Issued prompts: trained, dropped untrained, failed, pending.",
                (newest("prompts", ", state"), "{{run}} {{state}}"),
                unit="none",
                stacked=True,
            ),
        ),
    ),
    "producers": (
        "replaybuf: producers",
        (
            stat("Known", "Producers that called by name within an hour.", newest("producers_known"), "{{run}}"),
            stat("Gone", "Producers that sent heartbeats and stopped.", newest("producers_gone"), "{{run}}"),
            stat("Groups per second", "Over the last minute.", newest("groups_per_second"), "{{run}}"),
            stat("Seconds per group", "From ticket to stored group.", newest("group_seconds"), "{{run}}", unit="s"),
            TICKETS_OUT,
            stat("Failed prompts", "They ended without a group.", newest("prompts_failed_total"), "{{run}}"),
            TOKENS,
            GROUPS,
            graph(
                "Tickets",
                "Out now; expired and returned per second. Expired tickets mean that a producer died or is too slow.",
                (newest("tickets_out"), "{{run}} out"),
                (rate("tickets_expired_total"), "{{run}} expired"),
                (rate("tickets_returned_total"), "{{run}} returned"),
            ),
            LAST_CALLS,
            LIMITS,
            graph(
                "Incomplete and cut groups",
                "Groups per second with fewer rollouts than group_size, and with rollouts cut to seq_len.",
                (rate("groups_partial_total"), "{{run}} partial"),
                (rate("rollouts_truncated_groups_total"), "{{run}} cut"),
                unit="cps",
            ),
        ),
    ),
    "trainer": (
        "replaybuf: trainer",
        (
            STATE,
            STEP,
            stat("Steps per second", "Over the last 16 steps; 0 = unknown yet.", newest("steps_per_second"), "{{run}}"),
            stat("Seconds per step", "Without waiting.", newest("step_seconds"), "{{run}}", unit="s"),
            stat("Checkpoint", "Step of the newest checkpoint.", newest("checkpoint_step"), "{{run}}"),
            stat("Rewinds", "Resumes at an earlier step.", newest("generation"), "{{run}}"),
            REWARD,
            graph(
                "Spread of rewards",
                "Standard deviation within the groups of the newest batch. At 0 there is nothing to learn.",
                (newest("batch_reward_std"), "{{run}}"),
                unit="none",
            ),
            WAITING,
            VERSIONS,
            graph(
                "Steps without a checkpoint",
                "Steps that a restart of the trainer repeats.",
                (f"{newest('step')} - {newest('checkpoint_step')}", "{{run}}"),
            ),
            graph(
                "Time since the last ack",
                "Seconds. If it grows, the step stands still.",
                (f"time() - {newest('step_timestamp_seconds')}", "{{run}}"),
                unit="s",
            ),
            graph(
                "Batch fill",
                "Share of the budget that the newest batch fills.",
                (newest("batch_fill_ratio"), "{{run}}"),
                unit="percentunit",
            ),
            graph(
                "Batches by preparation",
                "hit: all was prepared before the request; partial: some groups; miss: nothing.",
                (rate("batches_prepared_total", ", outcome"), "{{run}} {{outcome}}"),
                unit="cps",
                stacked=True,
            ),
            LAST_CALLS,
        ),
    ),
    "generators": (
        "replaybuf: generators",
        (
            stat("Ready", "Generators that found service, run and engines.", total("generator_ready"), "{{run}}"),
            stat(
                "In flight", "Groups from their ticket to their append.", total("generator_groups_inflight"), "{{run}}"
            ),
            stat(
                "Engines up",
                "Engines that get requests; each generator counts its own.",
                total("generator_engine_up"),
                "{{run}}",
            ),
            stat("Reward", "Mean of the newest 128 groups.", newest("generator_reward_mean"), "{{run}}"),
            stat(
                "Length",
                "Mean completion of these groups, in tokens.",
                newest("generator_completion_tokens_mean"),
                "{{run}}",
            ),
            stat(
                "Sampled version", "Newest version in a stored group.", newest("generator_sampled_version"), "{{run}}"
            ),
            graph(
                "Groups in progress",
                "In an engine or a reward, and the present limit of that.",
                (total("generator_groups_generating"), "{{run}} generating"),
                (total("generator_groups_limit"), "{{run}} limit"),
            ),
            graph(
                "Completion tokens",
                "Of stored groups, per second; and an estimate of what aborted groups did not sample.",
                (rate("generator_tokens_total"), "{{run}} stored"),
                (rate("generator_tokens_saved_total"), "{{run}} saved"),
            ),
            graph(
                "Why less is going on than possible",
                "Generators by reason. rate_limited: the buffer has enough.",
                (total("generator_waiting", ", reason"), "{{run}} {{reason}}"),
                stacked=True,
            ),
            graph(
                "Time of a group",
                "From ticket to append.",
                (quantile(0.5, "generator_group_seconds"), "{{run}} median"),
                (quantile(0.9, "generator_group_seconds"), "{{run}} 90th percentile"),
                unit="s",
            ),
            graph(
                "Time of a reward",
                "To score a group.",
                (quantile(0.5, "generator_reward_seconds"), "{{run}} median"),
                (quantile(0.9, "generator_reward_seconds"), "{{run}} 90th percentile"),
                unit="s",
            ),
            graph(
                "Rollouts in engines",
                "Running and waiting there, of every client, by the gauges of the engine.",
                (newest("generator_engine_running", ", engine"), "{{engine}} running"),
                (newest("generator_engine_waiting", ", engine"), "{{engine}} waiting"),
            ),
            graph(
                "Requests to engines",
                "Ended per second: ok, or the reason of the fault.",
                (rate("generator_requests_total", ", engine, outcome"), "{{engine}} {{outcome}}"),
                unit="reqps",
                stacked=True,
            ),
        ),
    ),
    "training": (
        "replaybuf: training",
        (
            stat("Step", "Newest trained step.", newest("trainer_step"), "{{run}}"),
            stat("Version", "Policy version that it trained.", newest("trainer_version"), "{{run}}"),
            stat("Learning rate", "Of the newest step.", newest("trainer_learning_rate"), "{{run}}"),
            stat("MFU", "Model FLOPs utilisation with waits.", newest("trainer_mfu"), "{{run}}", unit="percentunit"),
            stat(
                "Skipped", "Steps with a non-finite loss or gradient.", newest("trainer_steps_skipped_total"), "{{run}}"
            ),
            stat("Staleness", "Largest of the newest step.", newest("trainer_staleness_max"), "{{run}}"),
            graph("Loss", "Mean per loss token.", (newest("trainer_loss"), "{{run}}"), unit="none"),
            graph("Gradient", "Norm before clipping.", (newest("trainer_grad_norm"), "{{run}}"), unit="none"),
            graph(
                "Reward",
                "Mean of the rollouts of the newest step.",
                (newest("trainer_reward_mean"), "{{run}}"),
                unit="none",
            ),
            graph(
                "Distance of the policies",
                "KL from the engine's policy (k3), and difference of the logprobs of trainer and engine.",
                (newest("trainer_kl"), "{{run}} KL"),
                (newest("trainer_mismatch"), "{{run}} mismatch"),
                unit="none",
            ),
            graph("Entropy", "Mean over loss tokens.", (newest("trainer_entropy"), "{{run}}"), unit="none"),
            graph(
                "Clipped tokens",
                "Share of the loss tokens, by staleness.",
                (newest("trainer_clip_fraction_by_staleness", ", staleness"), "{{run}} staleness {{staleness}}"),
                unit="percentunit",
            ),
            graph("Speed", "Tokens per second with waits.", (newest("trainer_tokens_per_second"), "{{run}}")),
            graph(
                "Time by phase",
                "Share of the time of the trainer.",
                (rate("trainer_phase_seconds_total", ", phase"), "{{run}} {{phase}}"),
                unit="percentunit",
                stacked=True,
            ),
            graph(
                "Time of a step",
                "With waits. Exemplars name the step.",
                (quantile(0.5, "trainer_step_seconds"), "{{run}} median"),
                (quantile(0.9, "trainer_step_seconds"), "{{run}} 90th percentile"),
                unit="s",
            ),
        ),
    ),
    "redis": (
        "replaybuf: Redis",
        (
            REDIS,
            DURABILITY,
            stat(
                "As requested",
                "1 if durability and replicas are at least what was requested.",
                "replaybuf_durability_met",
                "{{instance}}",
                ("weaker", "met"),
            ),
            stat("Replicas", "Connected to Redis.", "replaybuf_redis_replicas", "{{instance}}"),
            stat(
                "Confirmed", "Replicas that confirmed the last write.", "replaybuf_replicas_confirmed", "{{instance}}"
            ),
            stat("Unconfirmed", "Writes answered not-durable.", "replaybuf_writes_unconfirmed_total", "{{instance}}"),
            graph(
                "Memory",
                "Redis against its maxmemory; 0 = no bound.",
                ("replaybuf_redis_memory_used_bytes", "used"),
                ("replaybuf_redis_memory_max_bytes", "maxmemory"),
                unit="bytes",
            ),
            graph(
                "Frames of live groups",
                "Bytes. A checkpoint frees the frames of used groups.",
                (newest("bytes_live"), "{{run}}"),
                unit="bytes",
            ),
            LIMITS,
            IN_BUFFER,
            graph("Groups freed", "Groups per second.", (rate("groups_retired_total"), "{{run}}"), unit="cps"),
            graph("Tokens live", "Tokens of live groups, prompts and completions.", (newest("tokens_live"), "{{run}}")),
        ),
    ),
    "service": (
        "replaybuf: service",
        (
            SERVICE,
            stat("Version", "Of replaybuf.", "replaybuf_build_info", "{{version}}", shows="name"),
            stat("Leads", "Servers that lead the run: should be 1.", f"sum by (run) (replaybuf_leading{R})", "{{run}}"),
            stat("Connections", "Open now.", "replaybuf_connections", "{{instance}}"),
            stat("Open files", "Of the process.", 'process_open_fds{job="replaybuf"}', "{{instance}}"),
            stat(
                "Up since",
                "Start of the process.",
                '1000 * process_start_time_seconds{job="replaybuf"}',
                "{{instance}}",
                unit="dateTimeFromNow",
            ),
            graph(
                "Answer time, 99th percentile",
                "Time until the answer begins, without wait_ms.",
                (quantile(0.99, "request_seconds", ", call"), "{{run}} {{call}}"),
                unit="s",
            ),
            graph(
                "Calls by status",
                "Calls per second. 202: waiting; 429: no room; 499: the client disconnected; 503: ask again.",
                (
                    'sum by (call, status) (rate(replaybuf_requests_total{run=~"$run|"}[$__rate_interval]))',
                    "{{status}} {{call}}",
                ),
                unit="reqps",
            ),
            graph(
                "Refused before any call",
                "Requests and connections per second, by reason.",
                ("sum by (reason) (rate(replaybuf_requests_refused_total[$__rate_interval]))", "{{reason}}"),
                unit="reqps",
            ),
            graph(
                "Event loop held, 99th percentile",
                "Above 0.05 s all calls wait: give the service a core of its own, or look for a slow plug-in.",
                (
                    "histogram_quantile(0.99, sum by (instance, le) "
                    "(rate(replaybuf_loop_hold_seconds_bucket[$__rate_interval])))",
                    "{{instance}}",
                ),
                unit="s",
            ),
            graph(
                "Processor",
                "Cores in use.",
                ('rate(process_cpu_seconds_total{job="replaybuf"}[$__rate_interval])', "{{instance}}"),
            ),
            graph(
                "Memory",
                "Of the process, of its index per run, and of request bodies.",
                ('process_resident_memory_bytes{job="replaybuf"}', "{{instance}} process"),
                (newest("index_bytes"), "{{run}} index"),
                ("replaybuf_body_bytes", "{{instance}} bodies"),
                unit="bytes",
            ),
        ),
    ),
}

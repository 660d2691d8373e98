"""Panels of Grafana: their kinds, queries by kind of metric, and those of several dashboards.

A figure with two `texts` is red at 0 and green at 1.
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


def over_adapters(metric: str) -> str:
    """Return a gauge of a run, summed over its adapters."""
    return f"sum by (run) ({newest(metric, ', adapter')})"


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
TICKETS_OUT = stat(
    "Tickets out", "Groups that are being generated now.", newest("tickets_out", ", adapter"), "{{run}} {{adapter}}"
)
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
    (newest("groups_live", ", adapter"), "{{run}} {{adapter}} live"),
    (newest("groups_in_batches"), "{{run}} in batches"),
)
VERSIONS = graph(
    "Step and published version",
    "If the published version stays below step / steps_per_publish, the engines sample with old weights.",
    (newest("step"), "{{run}} step"),
    (newest("published_version", ", adapter"), "{{run}} {{adapter}} published"),
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
HELD_OUT = graph(
    "Held-out reward",
    "Mean reward of the newest evaluation of each held-out set, with one standard error above and below.",
    (newest("evaluation_reward_mean", ", set, adapter"), "{{run}} {{set}} {{adapter}}"),
    *(
        (
            f"{newest('evaluation_reward_mean', ', set, adapter')} {sign} "
            f"{newest('evaluation_standard_error', ', set, adapter')}",
            f"{{{{run}}}} {{{{set}}}} {{{{adapter}}}} {sign} error",
        )
        for sign in "+-"
    ),
    unit="none",
)
EVALUATED = graph(
    "Evaluated version",
    "Oldest policy version that sampled the newest evaluation. Far below the published version: evaluations are late.",
    (newest("evaluation_version", ", set, adapter"), "{{run}} {{set}} {{adapter}}"),
    (newest("published_version", ", adapter"), "{{run}} {{adapter}} published"),
)
LIMITS = graph(
    "Limits in use",
    "Share of each limit of the run that is set; at 1 producers get 429.",
    (newest("limit_used_ratio", ", limit"), "{{run}} {{limit}}"),
    unit="percentunit",
)

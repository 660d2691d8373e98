"""`/metrics`: reads every metric of the table from the state of the runs when it is scraped."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from replaybuf.kernel.histograms import GroupHistograms, Histogram
from replaybuf.kernel.index import IN_BATCHES
from replaybuf.service.host import Service
from replaybuf.service.http.metric_table import METRICS
from replaybuf.service.report.status import coverage
from replaybuf.service.run.next_batch import OUTCOMES
from replaybuf.service.run.run import Run
from replaybuf.service.traffic import REFUSALS
from replaybuf.wire.contract import REASONS

TIMES_SAMPLED_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Upper edges of the buckets of `times_sampled`."""
_PROMPT_STATES = ("trained", "dropped", "failed", "pending")
_RUN_STATES = ("running", "paused", "finished")

_RUN_VALUES: dict[str, Callable[[Run], float]] = {
    "groups_stored": lambda run: run.state.stored,
    "groups_used": lambda run: run.state.totals.groups_used,
    "groups_retired": lambda run: run.state.totals.retired,
    "groups_dead_lettered": lambda run: run.state.totals.dead_lettered.total(),
    "groups_duplicate": lambda run: run.side_state.duplicates,
    "rollouts_truncated_groups": lambda run: run.admission.truncated,
    "tokens_used": lambda run: run.state.totals.tokens_used,
    "tickets_issued": lambda run: run.book.counts["issued"],
    "tickets_expired": lambda run: run.book.counts["expired"],
    "tickets_returned": lambda run: run.book.counts["returned"],
    "prompts_failed": lambda run: len(run.state.failed_prompts),
    "groups_live": lambda run: run.state.pool.live_totals().groups,
    "groups_in_batches": lambda run: run.state.count(IN_BATCHES),
    "tokens_live": lambda run: run.state.pool.live_totals().tokens,
    "bytes_live": lambda run: run.state.pool.live_totals().frame_bytes,
    "groups_per_second": lambda run: run.measured.groups_per_s,
    "steps_per_second": lambda run: run.measured.steps_per_s,
    "step_seconds": lambda run: run.measured.step_s,
    "group_seconds": lambda run: run.measured.group_s,
    "tickets_out": lambda run: run.book.out,
    "published_version": lambda run: run.state.published[""],
    "step": lambda run: run.state.step,
    "epoch": lambda run: run.state.epoch,
    "generation": lambda run: run.state.generation,
    "leading": lambda run: float(run.journal.leading),
    "cursor_groups_missed": lambda run: run.cursors.missed,
    "index_bytes": lambda run: run.state.index.nbytes,
}
"""Metrics with the label `run` alone."""


class _Scrape:
    """Metrics that are read at once, by name."""

    def __init__(self) -> None:
        self.families: dict[str, Any] = {}

    def _family(self, name: str) -> Any:
        if name not in self.families:
            self.families[name] = _empty(name)
        return self.families[name]

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add the value of a counter or a gauge."""
        self._family(name).add_metric(labels, value)

    def add_histogram(self, name: str, histogram: Histogram, unit: int, *labels: str) -> None:
        """Add a histogram; `unit` = how many units of its edges make one unit of the metric."""
        edges = [*(str(edge / unit) for edge in histogram.edges), "+Inf"]
        buckets = list(zip(edges, accumulate(histogram.counts), strict=True))
        self._family(name).add_metric(labels, buckets, histogram.sum / unit)

    def render(self, texts: dict[str, list[bytes]]) -> None:
        """Add the lines of each metric to its texts, without the two lines of its header."""
        for name, family in self.families.items():
            texts[name].append(generate_latest(_Collected([family])).split(b"\n", 2)[2])


def _empty(name: str) -> Any:
    row = METRICS[name]
    return row.kind(f"replaybuf_{name}", row.text, labels=row.labels)


def _read_run(scrape: _Scrape, name: str, run: Run) -> None:
    state = run.state
    for metric, read in _RUN_VALUES.items():
        scrape.add(metric, read(run), name)
    for reason, count in sorted((run.side_state.rejected + state.totals.evicted + state.totals.dead_lettered).items()):
        scrape.add("groups_dropped", count, name, reason)
    for reason in REASONS:
        scrape.add("waiting_seconds", run.batches.waited_s.get(reason, 0.0), name, reason)
    for age, count in sorted(state.totals.used_staleness.items()):
        scrape.add("groups_used_by_staleness", count, name, str(age))
    for outcome in OUTCOMES:
        scrape.add("batches_prepared", run.batches.next_batch.outcomes[outcome], name, outcome)
    _read_presence(scrape, name, run)
    for cursor in run.cursors.describe():
        scrape.add("cursor_lag_groups", cursor.lag, name, cursor.name)
    for value in _RUN_STATES:
        scrape.add("run_state", float(state.state == value), name, value)
    outcomes = coverage(state, run.book)
    for prompt_state in _PROMPT_STATES:
        scrape.add("prompts", getattr(outcomes, prompt_state), name, prompt_state)
    _read_histograms(scrape, name, state.totals.histograms)
    for adapter in sorted(run.journal.config.adapters):
        _read_adapter(scrape, name, run, adapter)


def _read_presence(scrape: _Scrape, name: str, run: Run) -> None:
    presence = run.journal.presence
    if run.state.epoch:
        scrape.add("trainer_last_seen_seconds", presence.trainer_s, name)
    if (producers_s := presence.producers_s) is not None:
        scrape.add("producers_last_seen_seconds", producers_s, name)
    scrape.add("producers_known", presence.producers_known, name)
    scrape.add("producers_gone", len(presence.producers.list_gone()), name)


def _read_histograms(scrape: _Scrape, name: str, histograms: GroupHistograms) -> None:
    times_sampled = Histogram(TIMES_SAMPLED_EDGES)
    for times, uses in histograms.reuse.items():
        times_sampled.add(np.array([times]), uses)
    scrape.add_histogram("group_times_sampled", times_sampled, 1, name)
    scrape.add_histogram("group_age_at_use_seconds", histograms.age_at_use, 1000, name)
    for kind, lengths in histograms.lengths.items():
        scrape.add_histogram("rollout_tokens", lengths.mean, 1, name, kind)
        scrape.add_histogram("longest_rollout_tokens", lengths.longest, 1, name, kind)
    for reason, ages in sorted(histograms.drop_ages.items()):
        scrape.add_histogram("dropped_age_versions", ages.versions, 1, name, reason)
        scrape.add_histogram("dropped_age_seconds", ages.ms, 1000, name, reason)


def _read_adapter(scrape: _Scrape, name: str, run: Run, adapter: str) -> None:
    state, labels = run.state, (name, adapter)
    summary, counts = run.state_cache.summary().adapters[adapter], state.pool.counts_of(adapter)
    progress = state.progress_at(state.next_step, adapter)
    scrape.add("adapter_groups_stored", counts.stored, *labels)
    scrape.add("adapter_groups_used", counts.groups_used, *labels)
    scrape.add("adapter_tokens_used", counts.tokens_used, *labels)
    scrape.add("adapter_groups_live", summary.groups["live"], *labels)
    scrape.add("adapter_tokens_live", summary.tokens_live, *labels)
    scrape.add("adapter_tickets_out", run.book.out_of(adapter), *labels)
    scrape.add("adapter_published_version", state.published[adapter], *labels)
    scrape.add("adapter_step", state.own_step(state.step, adapter), *labels)
    scrape.add("adapter_groups_given", progress.groups, *labels)
    scrape.add("adapter_groups_per_batch", run.journal.config.adapters[adapter].groups_per_batch, *labels)
    for age, count in sorted(counts.used_staleness.items()):
        scrape.add("adapter_groups_used_by_staleness", count, *labels, str(age))
    for reason, count in sorted((Counter(counts.evicted) + Counter(counts.dead_lettered)).items()):
        scrape.add("adapter_groups_dropped", count, *labels, reason)
    if waiting := run.state_cache.waits().adapters[adapter]:
        scrape.add("adapter_waiting", 1, *labels, waiting.reason)
    for kind, lengths in counts.histograms.lengths.items():
        scrape.add_histogram("adapter_rollout_tokens", lengths.mean, 1, *labels, kind)


def _read_server(scrape: _Scrape, service: Service) -> None:
    for reason in REFUSALS:
        scrape.add("requests_refused", service.traffic.refused[reason], reason)
    scrape.add("connections", service.traffic.connections)
    scrape.add("body_bytes", service.traffic.body_bytes)
    report, connection = service.report, service.store.connection
    scrape.add("durability_strict", report is not None and report.durability == "strict")
    scrape.add("writes_unconfirmed", connection.unconfirmed)
    scrape.add("redis_up", service.outage is None)
    scrape.add("redis_replicas", report.replicas if report else 0)
    scrape.add("replicas_confirmed", connection.replicas_confirmed)
    scrape.add("redis_memory_used_bytes", report.used_memory_bytes if report else 0)
    scrape.add("redis_memory_max_bytes", report.max_memory_bytes if report else 0)
    scrape.add_histogram("loop_hold_seconds", service.loop_watch.holds, 1_000_000)


class _Collected(Collector):
    """Metrics that have been read."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self._metrics


def _pieces(service: Service) -> Iterator[Callable[[_Scrape], None]]:
    """Yield what reads the metrics of each run, of its calls, and of the server: about a millisecond each."""
    answered: defaultdict[str, list[tuple[str, str, int]]] = defaultdict(list)
    took: defaultdict[str, list[tuple[str, Histogram]]] = defaultdict(list)
    for (run, call, status), count in sorted(service.traffic.answered.items()):
        answered[run].append((call, str(status), count))
    for (run, call), histogram in sorted(service.traffic.took.items()):
        took[run].append((call, histogram))
    for name, one in sorted(service.runs.items()):
        yield functools.partial(_read_run, name=name, run=one)
    for name in sorted(answered.keys() | took.keys()):
        yield functools.partial(_read_traffic, name=name, answered=answered[name], took=took[name])
    yield functools.partial(_read_server, service=service)


def _read_traffic(
    scrape: _Scrape, name: str, answered: list[tuple[str, str, int]], took: list[tuple[str, Histogram]]
) -> None:
    for call, status, count in answered:
        scrape.add("requests", count, name, call, status)
    for call, histogram in took:
        scrape.add_histogram("request_seconds", histogram, 1_000_000, name, call)


async def exposition(service: Service) -> bytes:
    """Render all metrics as Prometheus text, piece by piece.

    Other calls go on while a thread renders a piece, which takes ten times as long as reading it.
    """
    texts: dict[str, list[bytes]] = {name: [] for name in METRICS}
    for read in _pieces(service):
        scrape = _Scrape()
        read(scrape)
        await asyncio.to_thread(scrape.render, texts)
    return await asyncio.to_thread(_join, texts)


def _join(texts: Mapping[str, Sequence[bytes]]) -> bytes:
    return b"".join(
        part for name, lines in texts.items() for part in (generate_latest(_Collected([_empty(name)])), *lines)
    )

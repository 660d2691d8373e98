"""`/metrics`: every metric of the service, read from the state of its runs when it is scraped.

Counters and histograms come from the fold of the ledger, so they go on where they were after a restart; only the
waiting seconds, truncated groups, prepared batches, unconfirmed writes and requests start at 0 with the process.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from replaybuf.kernel.histograms import GroupHistograms, Histogram
from replaybuf.kernel.index import IN_BATCHES
from replaybuf.kernel.report import coverage
from replaybuf.service.host import Service
from replaybuf.service.run.next_batch import OUTCOMES
from replaybuf.service.run.run import Run
from replaybuf.wire.contract import REASONS

REUSE = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Upper edges of the buckets of `times_sampled`."""
_STANDINGS = ("trained", "dropped", "failed", "pending")
"""What becomes of a prompt: their sum is `issued`."""

_Metrics = dict[str, tuple[str, Callable[[Run], float]]]

_RUN_COUNTERS: _Metrics = {
    "groups_stored": ("Groups stored", lambda run: run.state.stored),
    "groups_used": ("Groups put into batches, each use counted", lambda run: run.state.groups_used),
    "groups_retired": ("Groups freed after a checkpoint", lambda run: run.state.retired),
    "groups_dead_lettered": ("Stored groups that turned out unusable", lambda run: run.state.dead_lettered.total()),
    "groups_duplicate": ("Appends answered duplicate", lambda run: run.side_state.duplicates),
    "rollouts_truncated_groups": ("Groups with rollouts cut to seq_len", lambda run: run.admission.truncated),
    "tokens_used": ("Tokens put into batches, each use counted", lambda run: run.state.tokens_used),
    "tickets_issued": ("Tickets issued", lambda run: run.book.counts["issued"]),
    "tickets_expired": ("Tickets that expired", lambda run: run.book.counts["expired"]),
    "tickets_returned": ("Tickets given back", lambda run: run.book.counts["returned"]),
    "prompts_failed": ("Prompts that failed max_attempts times", lambda run: len(run.state.failed_prompts)),
}
_RUN_GAUGES: _Metrics = {
    "groups_live": ("Groups that may be sampled", lambda run: run.state.live_totals().groups),
    "groups_in_batches": ("Used-up groups that a resume may need", lambda run: run.state.count(IN_BATCHES)),
    "tokens_live": ("Tokens of live groups", lambda run: run.state.live_totals().tokens),
    "bytes_live": ("Bytes of the frames of live groups", lambda run: run.state.live_bytes()),
    "groups_per_second": ("Groups stored per second, over the last minute", lambda run: run.measured.groups_per_s),
    "steps_per_second": ("Steps acked per second, over the last 16", lambda run: run.measured.steps_per_s),
    "step_seconds": ("Seconds per step without waiting for others, over the last 16", lambda run: run.measured.step_s),
    "group_seconds": ("Seconds from ticket to stored group, last 256", lambda run: run.measured.group_s),
    "tickets_out": ("Tickets out", lambda run: run.book.out),
    "published_version": ("Newest version loaded by the engines", lambda run: run.state.published[""]),
    "step": ("Next unacked step", lambda run: run.state.step),
    "epoch": ("Epoch of the attached trainer", lambda run: run.state.epoch),
    "generation": ("Rewinds so far", lambda run: run.state.generation),
    "leading": ("1 where this server leads the run, 0 where it follows", lambda run: float(run.journal.leading)),
    "index_bytes": ("Bytes of the in-memory index", lambda run: run.state.index.nbytes),
}


_ADAPTER_COUNTERS = {
    "groups_stored": "Groups of an adapter stored",
    "groups_used": "Groups of an adapter put into batches, each use counted",
    "tokens_used": "Tokens of an adapter put into batches, each use counted",
}
_ADAPTER_GAUGES = {
    "groups_live": "Groups of an adapter that may be sampled",
    "tokens_live": "Tokens of an adapter's live groups",
    "tickets_out": "Tickets of an adapter that are out",
    "published_version": "Newest version of an adapter loaded by the engines",
    "step": "Next unacked step of an adapter, counted by its own batches",
    "groups_given": "Groups given to the own batch of an adapter that is not complete yet",
    "groups_per_batch": "Groups of an own batch of an adapter",
}

_Told = Iterable[tuple[list[str], Histogram, int]]
"""Values of further labels, the histogram, how many of its units make one of the metric."""


def _reuse(tallies: GroupHistograms) -> Histogram:
    histogram = Histogram(REUSE)
    for times, uses in tallies.reuse.items():
        histogram.add(np.array([times]), uses)
    return histogram


_HISTOGRAMS: dict[str, tuple[str, list[str], Callable[[GroupHistograms], _Told]]] = {
    "group_times_sampled": (
        "Uses of groups by how often the group had been used, this use counted",
        [],
        lambda tallies: [([], _reuse(tallies), 1)],
    ),
    "group_age_at_use_seconds": (
        "Uses of groups by the time since the group arrived",
        [],
        lambda tallies: [([], tallies.age_at_use, 1000)],
    ),
    "rollout_tokens": (
        "Groups by the mean tokens of their rollouts: stored, used (each use counted), dropped",
        ["kind"],
        lambda tallies: [([kind], lengths.mean, 1) for kind, lengths in tallies.lengths.items()],
    ),
    "longest_rollout_tokens": (
        "Groups by the tokens of their longest rollout: stored, used (each use counted), dropped",
        ["kind"],
        lambda tallies: [([kind], lengths.longest, 1) for kind, lengths in tallies.lengths.items()],
    ),
    "dropped_age_versions": (
        "Groups evicted unused or dead-lettered by age in policy versions",
        ["reason"],
        lambda tallies: [([reason], ages.versions, 1) for reason, ages in sorted(tallies.drop_ages.items())],
    ),
    "dropped_age_seconds": (
        "Groups evicted unused or dead-lettered by the time since they arrived",
        ["reason"],
        lambda tallies: [([reason], ages.ms, 1000) for reason, ages in sorted(tallies.drop_ages.items())],
    ),
}


def _add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram, unit: int) -> None:
    edges = [*(str(edge / unit) for edge in histogram.edges), "+Inf"]
    family.add_metric(labels, list(zip(edges, accumulate(histogram.counts), strict=True)), histogram.sum / unit)


class _RunCollector:
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        runs = sorted(self._service.runs.items())
        for name, (text, read) in _RUN_COUNTERS.items():
            counter = CounterMetricFamily(f"replaybuf_{name}", text, labels=["run"])
            for run_name, run in runs:
                counter.add_metric([run_name], read(run))
            yield counter
        for name, (text, read) in _RUN_GAUGES.items():
            gauge = GaugeMetricFamily(f"replaybuf_{name}", text, labels=["run"])
            for run_name, run in runs:
                gauge.add_metric([run_name], read(run))
            yield gauge
        yield from self._labelled(runs)
        yield from self._adapters(runs)
        yield from self._histograms(runs)
        yield from self._traffic()
        yield from self._server()

    def _labelled(self, runs: Iterable[tuple[str, Run]]) -> Iterator[Metric]:
        dropped = CounterMetricFamily(
            "replaybuf_groups_dropped", "Groups never used: rejected, evicted, dead-lettered", labels=["run", "reason"]
        )
        waited = CounterMetricFamily(
            "replaybuf_waiting_seconds", "Time trainers waited for a batch", labels=["run", "reason"]
        )
        staleness = CounterMetricFamily(
            "replaybuf_groups_used_by_staleness", "Groups put into batches by staleness", labels=["run", "staleness"]
        )
        prepared = CounterMetricFamily(
            "replaybuf_batches_prepared", "Batches by how much of them was prepared ahead", labels=["run", "outcome"]
        )
        state = GaugeMetricFamily("replaybuf_run_state", "1 for the state the run is in", labels=["run", "state"])
        for name, run in runs:
            drops = run.side_state.rejected + run.state.evicted + run.state.dead_lettered
            for reason in sorted(drops):
                dropped.add_metric([name, reason], drops[reason])
            for reason in REASONS:
                waited.add_metric([name, reason], run.batches.waited_s.get(reason, 0.0))
            for age, number in sorted(run.state.used_staleness.items()):
                staleness.add_metric([name, str(age)], number)
            for outcome in OUTCOMES:
                prepared.add_metric([name, outcome], run.batches.next_batch.outcomes[outcome])
            for value in ("running", "paused", "finished"):
                state.add_metric([name, value], float(run.state.state == value))
        yield from (dropped, waited, staleness, prepared, state)

    def _adapters(self, runs: Iterable[tuple[str, Run]]) -> Iterator[Metric]:
        counters = {
            name: CounterMetricFamily(f"replaybuf_adapter_{name}", text, labels=["run", "adapter"])
            for name, text in _ADAPTER_COUNTERS.items()
        }
        gauges = {
            name: GaugeMetricFamily(f"replaybuf_adapter_{name}", text, labels=["run", "adapter"])
            for name, text in _ADAPTER_GAUGES.items()
        }
        dropped = CounterMetricFamily(
            "replaybuf_adapter_groups_dropped",
            "Stored groups of an adapter that were never used",
            labels=["run", "adapter", "reason"],
        )
        staleness = CounterMetricFamily(
            "replaybuf_adapter_groups_used_by_staleness",
            "Groups of an adapter put into batches by staleness",
            labels=["run", "adapter", "staleness"],
        )
        lengths = HistogramMetricFamily(
            "replaybuf_adapter_rollout_tokens",
            "Groups of an adapter by the mean tokens of their rollouts: stored, used (each use counted), dropped",
            labels=["run", "adapter", "kind"],
        )
        waiting = GaugeMetricFamily(
            "replaybuf_adapter_waiting",
            "1 for the reason for which an adapter could give nothing to a batch now",
            labels=["run", "adapter", "reason"],
        )
        for run_name, run in runs:
            waits = run.state_cache.waits().adapters
            for adapter in sorted(run.journal.config.adapters):
                holds, counts = run.state_cache.summary().adapters[adapter], run.state.counts_of(adapter)
                progress = run.state.progress_at(run.state.next_step, adapter)
                labels = [run_name, adapter]
                counters["groups_stored"].add_metric(labels, counts.stored)
                counters["groups_used"].add_metric(labels, counts.used)
                counters["tokens_used"].add_metric(labels, counts.tokens_used)
                gauges["groups_live"].add_metric(labels, holds.groups["live"])
                gauges["tokens_live"].add_metric(labels, holds.tokens_live)
                gauges["tickets_out"].add_metric(labels, run.book.out_of(adapter))
                gauges["published_version"].add_metric(labels, run.state.published[adapter])
                gauges["step"].add_metric(labels, run.state.own_step(run.state.step, adapter))
                gauges["groups_given"].add_metric(labels, progress.groups)
                gauges["groups_per_batch"].add_metric(labels, progress.groups_per_batch)
                for age, number in sorted(counts.used_staleness.items()):
                    staleness.add_metric([*labels, str(age)], number)
                for kind, tallied in counts.tallies.lengths.items():
                    _add_histogram(lengths, [*labels, kind], tallied.mean, 1)
                if told := waits[adapter]:
                    waiting.add_metric([*labels, told.reason], 1)
                for reason, number in sorted((Counter(counts.evicted) + Counter(counts.dead_lettered)).items()):
                    dropped.add_metric([*labels, reason], number)
        yield from (*counters.values(), *gauges.values(), dropped, staleness, lengths, waiting)

    def _histograms(self, runs: Iterable[tuple[str, Run]]) -> Iterator[Metric]:
        prompts = GaugeMetricFamily(
            "replaybuf_prompts", "Prompts issued, by what became of them", labels=["run", "state"]
        )
        families = {
            name: HistogramMetricFamily(f"replaybuf_{name}", text, labels=["run", *label])
            for name, (text, label, _) in _HISTOGRAMS.items()
        }
        for run_name, run in runs:
            told = coverage(run.state, run.book)
            for standing in _STANDINGS:
                prompts.add_metric([run_name, standing], getattr(told, standing))
            for name, (_, _, read) in _HISTOGRAMS.items():
                for labels, histogram, unit in read(run.state.histograms):
                    _add_histogram(families[name], [run_name, *labels], histogram, unit)
        yield prompts
        yield from families.values()

    def _traffic(self) -> Iterator[Metric]:
        traffic = self._service.traffic
        answered = CounterMetricFamily("replaybuf_requests", "Calls answered", labels=["run", "call", "status"])
        for (run, call, status), number in sorted(traffic.answered.items()):
            answered.add_metric([run, call, str(status)], number)
        took = HistogramMetricFamily(
            "replaybuf_request_seconds",
            "Calls by the time until the answer began, without what the caller asked to wait",
            labels=["run", "call"],
        )
        for (run, call), histogram in sorted(traffic.took.items()):
            _add_histogram(took, [run, call], histogram, 1_000_000)
        yield from (answered, took)

    def _server(self) -> Iterator[Metric]:
        report = self._service.report
        strict = report is not None and report.durability == "strict"
        yield GaugeMetricFamily("replaybuf_durability_strict", "1 where an acknowledged write is on disk", strict)
        store = self._service.store
        unconfirmed = CounterMetricFamily("replaybuf_writes_unconfirmed", "Writes answered not-durable")
        unconfirmed.add_metric([], store.connection.unconfirmed)
        yield unconfirmed
        replicas = report.replicas if report else 0
        yield GaugeMetricFamily("replaybuf_redis_replicas", "Replicas connected to Redis", replicas)
        confirmed = store.connection.replicas_confirmed
        yield GaugeMetricFamily("replaybuf_replicas_confirmed", "Replicas that confirmed the last write", confirmed)
        yield GaugeMetricFamily("replaybuf_redis_up", "1 while Redis answers", self._service.outage is None)
        used = report.used_memory_bytes if report else 0
        limit = report.max_memory_bytes if report else 0
        yield GaugeMetricFamily("replaybuf_redis_memory_used_bytes", "Memory Redis uses", used)
        yield GaugeMetricFamily("replaybuf_redis_memory_max_bytes", "Memory Redis may use; 0 = no bound", limit)


class _Collected(Collector):
    """Metrics as they were read."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


async def exposition(service: Service) -> bytes:
    """Render all metrics as Prometheus text: read in one go, written in a thread, which takes ten times as long."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(list(_RunCollector(service).collect())))
    return await asyncio.to_thread(generate_latest, registry)

"""`/metrics`: every metric of the service, read from the state of its runs when it is scraped.

Counters come from the fold of the ledger, so they go on where they were after a restart; only the waiting seconds,
truncated groups, prepared batches and unconfirmed writes start at 0 with the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replaybuf.index import IN_BATCHES, LIVE
from replaybuf.service.ahead import OUTCOMES
from replaybuf.service.run import Run
from replaybuf.service.service import Service
from replaybuf.strategy import REASONS

_Metrics = dict[str, tuple[str, Callable[[Run], float]]]

_RUN_COUNTERS: _Metrics = {
    "groups_stored": ("Groups stored", lambda run: run.state.stored),
    "groups_used": ("Groups put into batches, each use counted", lambda run: run.state.groups_used),
    "groups_retired": ("Groups freed after a checkpoint", lambda run: run.state.retired),
    "groups_dead_lettered": ("Stored groups that turned out unusable", lambda run: run.state.dead_lettered.total()),
    "groups_duplicate": ("Appends answered duplicate", lambda run: run.door.duplicates),
    "rollouts_truncated_groups": ("Groups with rollouts cut to seq_len", lambda run: run.door.truncated),
    "tokens_used": ("Tokens put into batches, each use counted", lambda run: run.state.tokens_used),
    "tickets_issued": ("Tickets issued", lambda run: run.book.counts["issued"]),
    "tickets_expired": ("Tickets that expired", lambda run: run.book.counts["expired"]),
    "tickets_returned": ("Tickets given back", lambda run: run.book.counts["returned"]),
    "prompts_failed": ("Prompts that failed max_attempts times", lambda run: len(run.state.failed_prompts)),
}
_RUN_GAUGES: _Metrics = {
    "groups_live": ("Groups that may be sampled", lambda run: run.state.count(LIVE)),
    "groups_in_batches": ("Used-up groups that a resume may need", lambda run: run.state.count(IN_BATCHES)),
    "tokens_live": ("Tokens of live groups", lambda run: run.state.live_tokens()),
    "tickets_out": ("Tickets out", lambda run: run.book.out),
    "published_version": ("Newest version loaded by the engines", lambda run: run.state.published[""]),
    "step": ("Next unacked step", lambda run: run.state.step),
    "epoch": ("Epoch of the attached trainer", lambda run: run.state.epoch),
    "generation": ("Rewinds so far", lambda run: run.state.generation),
    "leading": ("1 where this server leads the run, 0 where it follows", lambda run: float(run.journal.leading)),
    "index_bytes": ("Bytes of the in-memory index", lambda run: run.state.index.nbytes),
}


class _RunCollector(Collector):
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
            drops = run.door.rejected + run.state.evicted + run.state.dead_lettered
            for reason in sorted(drops):
                dropped.add_metric([name, reason], drops[reason])
            for reason in REASONS:
                waited.add_metric([name, reason], run.batches.waited_s.get(reason, 0.0))
            for age, number in sorted(run.state.used_staleness.items()):
                staleness.add_metric([name, str(age)], number)
            for outcome in OUTCOMES:
                prepared.add_metric([name, outcome], run.batches.ahead.outcomes[outcome])
            for value in ("running", "paused", "finished"):
                state.add_metric([name, value], float(run.state.state == value))
        yield from (dropped, waited, staleness, prepared, state)

    def _server(self) -> Iterator[Metric]:
        report = self._service.report
        strict = report is not None and report.durability == "strict"
        yield GaugeMetricFamily("replaybuf_durability_strict", "1 where an acknowledged write is on disk", strict)
        store = self._service.store
        unconfirmed = CounterMetricFamily("replaybuf_writes_unconfirmed", "Writes answered not-durable")
        unconfirmed.add_metric([], store.unconfirmed)
        yield unconfirmed
        replicas = report.replicas if report else 0
        yield GaugeMetricFamily("replaybuf_redis_replicas", "Replicas connected to Redis", replicas)
        confirmed = store.replicas_confirmed
        yield GaugeMetricFamily("replaybuf_replicas_confirmed", "Replicas that confirmed the last write", confirmed)
        yield GaugeMetricFamily("replaybuf_redis_up", "1 while Redis answers", self._service.trouble is None)
        used = report.used_memory_bytes if report else 0
        limit = report.max_memory_bytes if report else 0
        yield GaugeMetricFamily("replaybuf_redis_memory_used_bytes", "Memory Redis uses", used)
        yield GaugeMetricFamily("replaybuf_redis_memory_max_bytes", "Memory Redis may use; 0 = no bound", limit)


def exposition(service: Service) -> bytes:
    """Render all metrics as Prometheus text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RunCollector(service))
    return generate_latest(registry)

"""`/metrics` of a generator: all read from its numbers when it is scraped; counters start at 0 with the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from replaybuf.generator.daemon import Daemon
from replaybuf.generator.fleet import ServerStatus
from replaybuf.generator.progress import Durations, EvaluationLine, Progress

_COUNTERS: dict[str, tuple[str, Callable[[Progress], float]]] = {
    "groups_stored": ("Groups stored", lambda progress: progress.groups),
    "groups_duplicate": ("Groups that somebody had stored before", lambda progress: progress.duplicates),
    "rollouts": ("Rollouts of stored groups", lambda progress: progress.rollouts),
    "tokens": ("Completion tokens of stored groups", lambda progress: progress.generated_tokens),
}
_GAUGES: dict[str, tuple[str, Callable[[Daemon], float | None]]] = {
    "groups_inflight": ("Groups from their ticket to the buffer", lambda daemon: daemon.inflight),
    "groups_generating": ("Those of them in an engine or a reward", lambda daemon: daemon.generating),
    "groups_limit": ("As many may be generating now", lambda daemon: daemon.limit),
    "published_version": ("Version the run has published", lambda daemon: daemon.published),
    "sampled_version": ("Newest version in a stored group", lambda daemon: daemon.progress.sampled_version),
}
_DURATIONS: dict[str, tuple[str, Callable[[Progress], Durations]]] = {
    "reward_seconds": ("Groups by the time scoring took", lambda progress: progress.reward_s),
    "group_seconds": ("Stored groups by the time from ticket to buffer", lambda progress: progress.group_s),
}
_EVALUATIONS: dict[str, tuple[str, Callable[[EvaluationLine], float]]] = {
    "evaluation_reward_mean": ("Mean reward of the last evaluation", lambda line: line.reward_mean),
    "evaluation_version": ("Oldest version that sampled it", lambda line: line.version),
    "evaluation_prompts_failed": ("Prompts of it without a reward", lambda line: line.failed),
}
_ENGINE_GAUGES: dict[str, tuple[str, Callable[[ServerStatus], float | None]]] = {
    "engine_up": ("1 while the engine gets requests", lambda engine: float(engine.fault is None)),
    "engine_requests": ("Requests of this generator in flight there", lambda engine: engine.requests),
    "engine_running": ("Rollouts running there, of every client", lambda engine: engine.running),
    "engine_waiting": ("Rollouts waiting there, of every client", lambda engine: engine.waiting),
}


def exposition(run: str, daemon: Daemon | None) -> bytes:
    """Render all metrics as Prometheus text; before there is a generator only that it is not ready."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_DaemonCollector(run, daemon))
    return generate_latest(registry)


class _DaemonCollector(Collector):
    def __init__(self, run: str, daemon: Daemon | None) -> None:
        self._run = run
        self._daemon = daemon

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily(_name("ready"), "1 once service, run and engines were found", labels=["run"])
        ready.add_metric([self._run], float(self._daemon is not None))
        yield ready
        if self._daemon is not None:
            yield from self._counted(self._daemon.progress)
            yield from self._standing(self._daemon)
            yield from self._engines(self._daemon.engines)
            yield from self._stage_engines(self._daemon.stages)

    def _counted(self, progress: Progress) -> Iterator[Metric]:
        for name, (text, count) in _COUNTERS.items():
            counter = CounterMetricFamily(_name(name), text, labels=["run"])
            counter.add_metric([self._run], count(progress))
            yield counter
        failed = CounterMetricFamily(_name("groups_failed"), "Tickets given back", labels=["run", "reason"])
        for reason, number in sorted(progress.given_back.items()):
            failed.add_metric([self._run, reason], number)
        yield failed
        failures = CounterMetricFamily(_name("evaluations_failed"), "Evaluations without a result", labels=["run"])
        failures.add_metric([self._run], progress.evaluations_failed)
        yield failures
        yield from self._evaluated(progress)
        for name, (text, read) in _DURATIONS.items():
            durations = read(progress)
            edges = [*(str(edge) for edge in Durations.EDGES_S), "+Inf"]
            buckets = list(zip(edges, accumulate(durations.counts), strict=True))
            histogram = HistogramMetricFamily(_name(name), text, labels=["run"])
            histogram.add_metric([self._run], buckets, durations.sum_s)
            yield histogram

    def _evaluated(self, progress: Progress) -> Iterator[Metric]:
        for name, (text, tell) in _EVALUATIONS.items():
            gauge = GaugeMetricFamily(_name(name), text, labels=["run", "name"])
            for held_out, line in sorted(progress.evaluations.items()):
                gauge.add_metric([self._run, held_out], tell(line))
            yield gauge

    def _standing(self, daemon: Daemon) -> Iterator[Metric]:
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(_name(name), text, labels=["run"])
            if (value := read(daemon)) is not None:
                gauge.add_metric([self._run], value)
            yield gauge
        waiting = GaugeMetricFamily(
            _name("waiting"), "1 for what less is going on for than could", labels=["run", "reason"]
        )
        if daemon.waiting is not None:
            waiting.add_metric([self._run, daemon.waiting], 1.0)
        yield waiting

    def _engines(self, engines: tuple[ServerStatus, ...]) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            _name("requests"), "Requests to engines that ended, by outcome", labels=["run", "engine", "outcome"]
        )
        for engine in engines:
            for outcome, number in sorted(engine.outcomes.items()):
                requests.add_metric([self._run, engine.url, outcome], number)
        yield requests
        for name, (text, read) in _ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(_name(name), text, labels=["run", "engine"])
            for engine in engines:
                if (value := read(engine)) is not None:
                    gauge.add_metric([self._run, engine.url], value)
            yield gauge

    def _stage_engines(self, stages: dict[str, tuple[ServerStatus, ...]]) -> Iterator[Metric]:
        labels = ["run", "stage", "engine"]
        requests = CounterMetricFamily(
            _name("stage_requests"), "Requests to engines of stages that ended", labels=[*labels, "outcome"]
        )
        up = GaugeMetricFamily(_name("stage_engine_up"), "1 while the engine of a stage gets requests", labels=labels)
        for stage, engines in stages.items():
            for engine in engines:
                up.add_metric([self._run, stage, engine.url], float(engine.fault is None))
                for outcome, number in sorted(engine.outcomes.items()):
                    requests.add_metric([self._run, stage, engine.url, outcome], number)
        yield requests
        yield up


def _name(name: str) -> str:
    return f"replaybuf_generator_{name}"

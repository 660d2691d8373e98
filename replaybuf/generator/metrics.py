"""`GET /metrics` and `GET /healthz` of a generator, served by its own event loop; an answer means that it is alive.

All values are read from the daemon at each scrape. Counters start at 0 with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import accumulate

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from replaybuf.generator.daemon import Daemon
from replaybuf.generator.progress import Durations
from replaybuf.listening import listen, url_of

_Samples = Iterable[tuple[tuple[str, ...], float | None]]
"""Label values after `run`, and the value; None = no sample."""


def exposition(run: str, daemon: Daemon | None) -> bytes:
    """Render all metrics as Prometheus text; `daemon` None: the generator is not ready."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_DaemonCollector(run, daemon))
    return generate_latest(registry)


class _DaemonCollector(Collector):
    def __init__(self, run: str, daemon: Daemon | None) -> None:
        self._run = run
        self._daemon = daemon

    def collect(self) -> Iterator[Metric]:
        ready = float(self._daemon is not None)
        yield self._gauge("ready", "1 once service, run and engines are ready", (), [((), ready)])
        if self._daemon is not None:
            yield from self._progress(self._daemon)
            yield from self._engines(self._daemon)

    def _progress(self, daemon: Daemon) -> Iterator[Metric]:
        progress, waiting, recent = daemon.progress, daemon.waiting, daemon.progress.recent.means()
        for name, text, count in (
            ("groups_stored", "Groups stored", progress.groups),
            ("groups_duplicate", "Groups that were already stored", progress.duplicates),
            ("groups_partial", "Stored groups that lost rollouts to faults", progress.groups_partial),
            ("rollouts", "Rollouts of stored groups", progress.rollouts),
            ("tokens", "Completion tokens of stored groups", progress.generated_tokens),
            (
                "groups_aborted",
                "Groups ended before their last token, as no batch could use them",
                progress.groups_aborted,
            ),
            ("tokens_saved", "Estimated tokens that aborted groups did not sample", progress.tokens_saved),
            ("evaluations_failed", "Evaluations without a result", progress.evaluations_failed),
        ):
            yield self._counter(name, text, (), [((), count)])
        dropped = [((reason,), number) for reason, number in sorted(progress.prompts_dropped.items())]
        yield self._gauge("prompts_dropped", "Prompts that filters dropped at load", ("reason",), dropped)
        returned = [((reason,), number) for reason, number in sorted(progress.given_back.items())]
        yield self._counter("groups_failed", "Tickets returned", ("reason",), returned)
        lost = [((reason,), number) for reason, number in sorted(progress.rollouts_lost.items())]
        yield self._counter("rollouts_lost", "Rollouts that stored groups lost to faults", ("reason",), lost)
        yield self._histogram("reward_seconds", "Groups by the time to score them", progress.reward_s)
        yield self._histogram("group_seconds", "Stored groups by the time from ticket to append", progress.group_s)
        for name, text, value in (
            ("groups_inflight", "Groups from their ticket to their append", daemon.inflight),
            ("groups_generating", "Groups in an engine or a reward", daemon.generating),
            ("groups_limit", "Current limit of groups_generating", daemon.limit),
            ("published_version", "Published version of the run", daemon.published),
            ("sampled_version", "Newest version in a stored group", progress.sampled_version),
            ("reward_mean", "Mean reward of the newest 128 stored groups", None if recent is None else recent.reward),
            (
                "completion_tokens_mean",
                "Mean length of their completions",
                None if recent is None else recent.completion_tokens,
            ),
        ):
            yield self._gauge(name, text, (), [((), value)])
        kl = [((model,), mean) for model, mean in recent.kl.items()] if recent else []
        yield self._gauge("kl_mean", "KL of the engine's policy to another model, per token of them", ("model",), kl)
        reasons = [] if waiting is None else [((waiting,), 1.0)]
        yield self._gauge("waiting", "1 for the reason why the generator does less than it could", ("reason",), reasons)
        last = sorted(progress.evaluations.items())
        for name, text, field in (
            ("evaluation_reward_mean", "Mean reward of the last evaluation", "reward_mean"),
            ("evaluation_version", "Oldest version that sampled the last evaluation", "version"),
            ("evaluation_prompts_failed", "Prompts without a reward in the last evaluation", "failed"),
        ):
            yield self._gauge(name, text, ("name",), [((key,), getattr(result, field)) for key, result in last])

    def _engines(self, daemon: Daemon) -> Iterator[Metric]:
        engines = daemon.engines
        outcomes = [((e.url, outcome), number) for e in engines for outcome, number in sorted(e.outcomes.items())]
        yield self._counter("requests", "Ended requests to engines, by outcome", ("engine", "outcome"), outcomes)
        for name, text, values in (
            ("engine_up", "1 while the engine gets requests", [float(e.fault is None) for e in engines]),
            ("engine_requests", "Requests of this generator in flight there", [e.requests for e in engines]),
            ("engine_running", "Rollouts running there, of every client", [e.running for e in engines]),
            ("engine_waiting", "Rollouts waiting there, of every client", [e.waiting for e in engines]),
        ):
            samples = [((engine.url,), value) for engine, value in zip(engines, values, strict=True)]
            yield self._gauge(name, text, ("engine",), samples)
        staged = [(stage, engine) for stage, engines in daemon.stages.items() for engine in engines]
        up = [((stage, e.url), float(e.fault is None)) for stage, e in staged]
        outcomes_of_stages = [
            ((stage, e.url, outcome), number) for stage, e in staged for outcome, number in sorted(e.outcomes.items())
        ]
        labels = ("stage", "engine")
        text = "Ended requests to engines of stages, by outcome"
        yield self._counter("stage_requests", text, (*labels, "outcome"), outcomes_of_stages)
        yield self._gauge("stage_engine_up", "1 while the engine of a stage gets requests", labels, up)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
        return self._filled(GaugeMetricFamily(_full(name), text, labels=("run", *labels)), samples)

    def _counter(self, name: str, text: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
        return self._filled(CounterMetricFamily(_full(name), text, labels=("run", *labels)), samples)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, samples: _Samples) -> Metric:
        for labels, value in samples:
            if value is not None:
                family.add_metric([self._run, *labels], value)
        return family

    def _histogram(self, name: str, text: str, durations: Durations) -> Metric:
        edges = [*(str(edge) for edge in Durations.EDGES_S), "+Inf"]
        histogram = HistogramMetricFamily(_full(name), text, labels=("run",))
        buckets = list(zip(edges, accumulate(durations.counts), strict=True))
        histogram.add_metric([self._run], buckets, durations.sum_s)
        return histogram


def _full(name: str) -> str:
    return f"replaybuf_generator_{name}"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the generator handles the signals


@contextlib.asynccontextmanager
async def serve_metrics(host: str, port: int, render: Callable[[], bytes]) -> AsyncIterator[str]:
    """Serve both calls and yield the address; port 0 takes a free port. Raises `ServiceUnavailable` if it is taken."""

    async def metrics(_: Request) -> Response:
        return Response(render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    listening = listen(host, port, "--metrics-address")
    server = _Server(
        uvicorn.Config(
            Starlette(routes=[Route("/metrics", metrics), Route("/healthz", healthz)]),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
            server_header=False,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield url_of(*listening.getsockname()[:2])
    finally:
        server.should_exit = True
        await serving
        listening.close()

"""Metrics of a trainer as Prometheus text: `GET /metrics` (`--metrics-address`), and pushes (`--push-metrics`).

Each is done by a thread of its own.

Gauges are those of the newest step; counters start at 0 with the process. All metrics have the label `run`. In the
format of OpenMetrics, which Prometheus requests, buckets of `step_seconds` name a step as exemplar.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replaybuf.errors import Invalid
from replaybuf.metric_push import Identity, Pusher
from replaybuf_trainer.report.sinks.sink import Figures, Waiting

logger = logging.getLogger(__name__)

PREFIX = "replaybuf_trainer_"
STEP_EDGES_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
GAUGES = {
    "step": ("step", "Newest trained step"),
    "version": ("version", "Policy version that it trained"),
    "reward_mean": ("reward_mean", "Mean reward of its rollouts"),
    "loss": ("loss", "Mean loss per loss token"),
    "grad_norm": ("grad_norm", "Norm of the gradient before clipping"),
    "learning_rate": ("learning_rate", "Learning rate"),
    "staleness_mean": ("staleness_mean", "Mean staleness of its rollouts, in policy versions"),
    "staleness_max": ("staleness_max", "Largest staleness of its rollouts"),
    "tokens_per_s": ("tokens_per_second", "Tokens per second of the whole step, with waits"),
    "samples_per_s": ("samples_per_second", "Rollouts per second of the whole step, with waits"),
    "mfu": ("mfu", "Model FLOPs utilisation of the whole step, with waits, 0 to 1"),
    "train_mfu": ("train_mfu", "The same of forward, backward and optimizer alone"),
    "peak_memory_bytes": ("peak_memory_bytes", "Peak memory of the GPU in the step, or of the process since its start"),
    "padding_share": ("padding_share", "Padding of the batch as a share of its tokens with padding, 0 to 1"),
}
"""Figure to name and text of its gauge."""
COUNTERS = {
    "tokens": ("tokens", "Trained tokens, with prompts"),
    "rollouts": ("samples", "Trained rollouts"),
    "loss_tokens": ("loss_tokens", "Tokens with a loss"),
    "skipped": (
        "steps_skipped",
        "Steps without a change of the weights: no loss tokens, or a loss or gradient that is not finite",
    ),
}
BY_STALENESS = {
    "ratio_mean": "Mean probability ratio",
    "clip_fraction": "Share of clipped tokens",
    "kl": "KL from the engine's policy, per token (k3)",
    "ref_kl": "KL from the reference, per token (k3)",
    "entropy": "Mean entropy",
    "mismatch": "Mean difference of the logprobs of trainer and engine",
    "weight_mean": "Mean weight of the policy loss",
    "effective_share": "Effective sample size by tokens",
}
"""Statistics of loss tokens: a gauge of all of them, one by staleness, 0 to 8+, and one by epoch over the batch."""
BY_EPOCH = BY_STALENESS | {"loss": "Mean loss per loss token", "grad_norm": "Norm of the gradient before clipping"}


class Prometheus:
    """Metrics of a trainer. `waiting` and `lost` (steps by sink) are read at each scrape and push."""

    name = "Prometheus"

    def __init__(self, run: str, waiting: Waiting, lost: Callable[[], Mapping[str, int]]) -> None:
        self._run = run
        self._outlets = contextlib.ExitStack()
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self._gauges = {
            key: Gauge(PREFIX + name, text, ("run",), registry=registry) for key, (name, text) in GAUGES.items()
        }
        self._counters = {
            key: Counter(PREFIX + name, text, ("run",), registry=registry) for key, (name, text) in COUNTERS.items()
        }
        self._means = {
            name: Gauge(PREFIX + name, f"{text} of all loss tokens", ("run",), registry=registry)
            for name, text in BY_STALENESS.items()
        }
        labels = ("run", "staleness")
        self._by_staleness = {
            name: Gauge(f"{PREFIX}{name}_by_staleness", f"{text}, by staleness", labels, registry=registry)
            for name, text in BY_STALENESS.items()
        }
        self._by_epoch = {
            name: Gauge(f"{PREFIX}{name}_by_epoch", f"{text}, by epoch", ("run", "epoch"), registry=registry)
            for name, text in BY_EPOCH.items()
        }
        self._tokens_by_staleness = Counter(
            f"{PREFIX}loss_tokens_by_staleness", "Tokens with a loss, by staleness", labels, registry=registry
        )
        self._phases = Counter(f"{PREFIX}phase_seconds", "Time by phase", ("run", "phase"), registry=registry)
        self._waits = Counter(
            f"{PREFIX}waiting_seconds", "Time without a batch, by reason", ("run", "reason"), registry=registry
        )
        self._steps = Histogram(
            f"{PREFIX}step_seconds", "Steps by their time", ("run",), buckets=STEP_EDGES_S, registry=registry
        )
        registry.register(_Now(run, waiting, lost))

    def listen(self, host: str, port: int) -> int:
        """Serve `GET /metrics` until `close`; return the port, which 0 takes from the free ones.

        Raises `Invalid` if the address cannot be listened on.
        """
        server, thread = _listen(host, port, self._registry)
        self._outlets.callback(thread.join)
        self._outlets.callback(server.server_close)
        self._outlets.callback(server.shutdown)
        taken = int(server.server_port)
        logger.info("metrics on http://%s:%d/metrics", host, taken)
        return taken

    def push(self, url: str, every_s: float) -> None:
        """Push the metrics every `every_s` seconds and at `close`. Raises as `Pusher`."""
        identity = Identity("replaybuf-trainer", f"{socket.gethostname()}:{self._run}")
        pusher = Pusher(url, identity, lambda: generate_latest(self._registry), every_s)
        self._outlets.callback(pusher.close)

    def write(self, item: Figures) -> None:
        """Set and count the figures of one step."""
        run = self._run
        for key, gauge in (self._gauges | self._means).items():
            if item.get(key) is not None:
                gauge.labels(run).set(item[key])
        for key, counter in self._counters.items():
            counter.labels(run).inc(item.get(key, 0))
        for phase, seconds in item.get("phase_s", {}).items():
            self._phases.labels(run, phase).inc(seconds)
        for reason, seconds in item.get("wait_reasons", {}).items():
            self._waits.labels(run, reason).inc(seconds)
        for staleness, means in item.get("by_staleness", {}).items():
            self._tokens_by_staleness.labels(run, staleness).inc(means["loss_tokens"])
        self._set_by("staleness", self._by_staleness, item)
        self._set_by("epoch", self._by_epoch, item)
        self._steps.labels(run).observe(item["step_s"], {"step": str(item["step"])})

    def _set_by(self, label: str, gauges: Mapping[str, Gauge], item: Figures) -> None:
        """Set the gauges of each value of a label; values that the newest batch lacks go away."""
        for name, gauge in gauges.items():
            gauge.clear()
            for value, means in item.get(f"by_{label}", {}).items():
                gauge.labels(self._run, value).set(means[name])

    def close(self) -> None:
        """Push once more, and stop listening."""
        self._outlets.close()


class _Now(Collector):
    """What is read at the moment of the scrape."""

    def __init__(self, run: str, waiting: Waiting, lost: Callable[[], Mapping[str, int]]) -> None:
        self._run = run
        self._waiting = waiting
        self._lost = lost

    def collect(self) -> Iterator[Metric]:
        now = self._waiting()
        waits = GaugeMetricFamily(
            f"{PREFIX}waiting", "1 for the reason why there is no batch now", None, ("run", "reason")
        )
        if now is not None:
            waits.add_metric([self._run, now.reason], 1)
        yield waits
        lost = CounterMetricFamily(f"{PREFIX}figures_lost", "Steps that a sink lost", None, ("run", "sink"))
        for sink, steps in self._lost().items():
            lost.add_metric([self._run, sink], steps)
        yield lost


def _listen(host: str, port: int, registry: CollectorRegistry) -> tuple[Any, threading.Thread]:
    try:
        return start_http_server(port, host, registry)
    except OSError as error:
        raise Invalid(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another --metrics-address (port 0 takes a free one)",
            name="metrics_address",
            value=port,
            bound="a free port",
        ) from error

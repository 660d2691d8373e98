"""Target of pushes: an OpenTelemetry collector, by OTLP/HTTP. Needs the extra `otel`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import logging
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import SplitResult, urlunsplit

from opentelemetry.exporter.otlp.proto.http import metric_exporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from replaybuf.errors import ReplaybufError

TIMEOUT_S = 10.0
MOST_POINTS = 5000
"""Points per request: collectors refuse requests of some megabytes."""
_PATH = "/v1/metrics"
_UNKNOWN_START = 0
"""Most counters are older than this process."""

# It logs each failure; the pusher logs the first one.
logging.getLogger(metric_exporter.__name__).setLevel(logging.CRITICAL)


class Collector:
    """A collector at `address`, whose path is `/v1/metrics` by default.

    The `OTEL_...` variables say headers and certificates.
    """

    def __init__(self, address: SplitResult, job: str, instance: str) -> None:
        url = urlunsplit(address._replace(path=address.path.rstrip("/") or _PATH))
        version = importlib.metadata.version("replaybuf")
        named = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or job, "service.version": version}
        self._resource = Resource.create(named | {"service.instance.id": instance})
        self._scope = InstrumentationScope("replaybuf", version)
        self._exporter = metric_exporter.OTLPMetricExporter(endpoint=url, timeout=TIMEOUT_S)

    def send(self, text: bytes) -> None:
        """Export all metrics of a text. Raises `ReplaybufError`."""
        families = text_string_to_metric_families(text.decode())
        for metrics in _requests(_metrics(families, time.time_ns())):
            scoped = ScopeMetrics(scope=self._scope, metrics=metrics, schema_url="")
            data = MetricsData([ResourceMetrics(resource=self._resource, scope_metrics=[scoped], schema_url="")])
            if self._exporter.export(data) is not MetricExportResult.SUCCESS:
                raise ReplaybufError(f"the collector did not take {len(metrics)} metrics within {TIMEOUT_S:g} s")


def _requests(metrics: Iterable[Metric]) -> Iterator[list[Metric]]:
    """Pack metrics into requests of at most `MOST_POINTS`; one with more points goes into several."""
    request: list[Metric] = []
    left = MOST_POINTS
    for metric in metrics:
        data: Any = metric.data
        points = data.data_points
        while points:
            part, points = points[:left], points[left:]
            request.append(dataclasses.replace(metric, data=dataclasses.replace(data, data_points=part)))
            left -= len(part)
            if not left:
                yield request
                request, left = [], MOST_POINTS
    if request:
        yield request


def _metrics(families: Iterable[Family], now_ns: int) -> Iterator[Metric]:
    for family in families:
        data: Gauge | Sum | Histogram
        if family.type == "histogram":
            data = Histogram(_histograms(family, now_ns), AggregationTemporality.CUMULATIVE)
        else:
            points = [NumberDataPoint(sample.labels, _UNKNOWN_START, now_ns, sample.value) for sample in family.samples]
            counted = family.type == "counter"
            data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True) if counted else Gauge(points)
        yield Metric(name=family.name, description=family.documentation, unit=family.unit, data=data)


def _histograms(family: Family, now_ns: int) -> list[HistogramDataPoint]:
    """Make one point per set of labels; the buckets of a text are cumulative, those of a point are not."""
    parts: dict[frozenset[tuple[str, str]], dict[str, float]] = {}
    for sample in family.samples:
        labels = dict(sample.labels)
        part = sample.name.removeprefix(family.name) + labels.pop("le", "")
        parts.setdefault(frozenset(labels.items()), {})[part] = sample.value
    points = []
    for pairs, values in parts.items():
        buckets = sorted((float(name[7:]), int(value)) for name, value in values.items() if name.startswith("_bucket"))
        points.append(
            HistogramDataPoint(
                attributes=dict(pairs),
                start_time_unix_nano=_UNKNOWN_START,
                time_unix_nano=now_ns,
                count=int(values["_count"]),
                sum=values["_sum"],
                bucket_counts=[after - before for before, after in itertools.pairwise([0, *(n for _, n in buckets)])],
                explicit_bounds=[edge for edge, _ in buckets[:-1]],
                min=None,  # type: ignore[arg-type] # unknown, and optional in the protocol
                max=None,  # type: ignore[arg-type]
            )
        )
    return points

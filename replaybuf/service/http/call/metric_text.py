"""Prometheus text of the metrics of the table, written line by line.

`prometheus_client` takes 9 us per line, and 1,000 runs have 270,000 lines; it writes the headers of the metrics here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from replaybuf.kernel.figures.histograms import Histogram
from replaybuf.service.http.call.metric_table import METRICS

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class MetricText:
    """Lines of samples by metric: those of one metric must stand together, and runs are read one after another."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {name: [] for name in METRICS}

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add the value of a counter or a gauge."""
        self._lines[name].append(f"{_sample(name)}{_braced(_pairs(name, labels))} {_number(value)}\n")

    def add_histogram(self, name: str, histogram: Histogram, unit: int, *labels: str) -> None:
        """Add a histogram; `unit` = how many units of its edges make one unit of the metric.

        One with labels is shown from its first value on: empty ones were two thirds of the text of many idle runs.
        """
        if labels and not histogram.count:
            return
        pairs, sample = _pairs(name, labels), f"replaybuf_{name}"
        bucket = f"{sample}_bucket{{{pairs}{',' * bool(pairs)}"
        places = zip(_edges(histogram.edges, unit), accumulate(histogram.counts), strict=True)
        lines = self._lines[name]
        lines.extend([f'{bucket}le="{edge}"}} {count}.0\n' for edge, count in places])
        lines.append(f"{sample}_count{_braced(pairs)} {histogram.count}.0\n")
        lines.append(f"{sample}_sum{_braced(pairs)} {_number(histogram.sum / unit)}\n")

    def render(self) -> bytes:
        """Return the text. It takes 0.1 s for 1,000 runs, so call it in a thread."""
        return b"".join(
            part for name, lines in self._lines.items() for part in (_header(name), "".join(lines).encode())
        )


@functools.cache
def _sample(name: str) -> str:
    return f"replaybuf_{name}_total" if METRICS[name].kind is CounterMetricFamily else f"replaybuf_{name}"


def _number(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def _braced(pairs: str) -> str:
    return f"{{{pairs}}}" if pairs else ""


def _pairs(name: str, labels: Iterable[str]) -> str:
    """Return the labels with their values, in the order of the alphabet as `prometheus_client` writes them.

    In a run without adapters the label `adapter` has no value and is left out: to Prometheus that is the same.
    """
    named = zip(METRICS[name].labels, labels, strict=True)
    shown = [f'{label}="{value.translate(_ESCAPES)}"' for label, value in named if value or label != "adapter"]
    return ",".join(sorted(shown))


@functools.cache
def _edges(edges: tuple[int, ...], unit: int) -> list[str]:
    return [*(str(edge / unit) for edge in edges), "+Inf"]


@functools.cache
def _header(name: str) -> bytes:
    """Return the two lines before the samples of a metric."""
    row = METRICS[name]
    family: Metric = row.kind(f"replaybuf_{name}", row.text, labels=row.labels)

    class Described(Collector):
        def collect(self) -> Iterable[Metric]:
            return [family]

    return generate_latest(Described())

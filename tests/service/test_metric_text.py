"""Metrics as Prometheus text: the same samples as `prometheus_client` writes."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from replaybuf.kernel.figures.histograms import Histogram
from replaybuf.service.http.call.metric_table import METRICS
from replaybuf.service.http.call.metric_text import MetricText

numbers = st.integers(0, 2**63) | st.floats(allow_nan=False)


def parsed(text: MetricText, name: str) -> list[tuple[str, dict[str, str], float]]:
    """Read the samples of one metric as Prometheus does."""
    families = {family.name: family for family in text_string_to_metric_families(text.render().decode())}
    assert len(families) == len(METRICS)
    return [(sample.name, sample.labels, sample.value) for sample in families[f"replaybuf_{name}"].samples]


@given(numbers, st.text())
def test_values_and_labels_come_back_as_they_were(value: float, label: str) -> None:
    """Any text may be a label: quotes, backslashes and line ends too."""
    text = MetricText()
    text.add("groups_dropped", value, "r", "", label)
    text.add("connections", value)
    assert parsed(text, "groups_dropped") == [
        ("replaybuf_groups_dropped_total", {"run": "r", "reason": label}, float(value))
    ]
    assert parsed(text, "connections") == [("replaybuf_connections", {}, float(value))]


def test_a_histogram_has_the_samples_that_prometheus_client_writes() -> None:
    histogram = Histogram((1, 5000, 20_000), [3, 0, 2, 1], 40_001)
    for name, labels in {"request_seconds": ("r", "GET x"), "loop_hold_seconds": ()}.items():
        text = MetricText()
        text.add_histogram(name, histogram, 1000, *labels)
        family = HistogramMetricFamily(f"replaybuf_{name}", "", labels=METRICS[name].labels)
        edges = ["0.001", "5.0", "20.0", "+Inf"]
        family.add_metric(labels, list(zip(edges, accumulate(histogram.counts), strict=True)), 40.001)
        wanted = [(sample.name, sample.labels, sample.value) for sample in family.samples]
        assert parsed(text, name) == wanted


def test_a_histogram_of_a_run_is_shown_from_its_first_value_on() -> None:
    """Those of the server are always there: an alert subtracts a bucket from a count."""
    text = MetricText()
    text.add_histogram("request_seconds", Histogram((1, 2)), 1, "r", "GET x")
    text.add_histogram("loop_hold_seconds", Histogram((1, 2)), 1)
    assert parsed(text, "request_seconds") == []
    assert [sample[1].get("le") for sample in parsed(text, "loop_hold_seconds")] == ["1.0", "2.0", "+Inf", None, None]

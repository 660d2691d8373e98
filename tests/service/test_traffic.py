"""Metrics of the calls: their statuses, and how long the service took."""

from __future__ import annotations

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from replaybuf.service.traffic import TOOK_US, Stopwatch, Traffic
from tests.conftest import RunClient, group

GET_RUN, GET_BATCH = "GET /v1/runs/{run}", "GET /v1/runs/{run}/batches/{step}"


def samples(client: RunClient, metric: str, **labels: str) -> list[Sample]:
    """Scrape; return the samples with these labels. Other metrics are not parsed: those of all runs take seconds."""
    lines = client.http.get("/metrics").text.splitlines(keepends=True)
    families = text_string_to_metric_families("".join(line for line in lines if line.startswith(("#", metric))))
    series = [sample for family in families for sample in family.samples if sample.name == metric]
    return [sample for sample in series if labels.items() <= sample.labels.items()]


def answered(run: RunClient, call: str) -> dict[str, float]:
    """Tell how often this call of the run was answered with each status."""
    series = samples(run, "replaybuf_requests_total", run=run.run, call=call)
    return {sample.labels["status"]: sample.value for sample in series}


def test_calls_are_counted_by_how_they_were_answered(run: RunClient) -> None:
    """Success, waiting and every refusal; by the words of docs/http/errors.md."""
    run.put(batch={"groups_per_batch": 1})
    run.put(batch={"groups_per_batch": 2})
    epoch = run.attach()
    run.batch(0, epoch)
    run.append(group("g0"))
    run.batch(0, epoch)
    run.batch(0, epoch + 1)
    run.batch(7, epoch)
    run.get("groups/unknown/one")
    assert answered(run, "PUT /v1/runs/{run}") == {"201": 1, "409": 1}
    assert answered(run, GET_BATCH) == {"200": 1, "202": 1, "409": 2}
    assert answered(run, "GET /v1/runs/{run}/groups/{group_id}") == {"404": 1}


def test_a_run_that_does_not_exist_makes_no_label(run: RunClient) -> None:
    """Whoever calls could make up any number of names."""
    missing = RunClient(str(run.http.base_url), "made-up")
    assert missing.get("ledger").status_code == 404
    missing.http.close()
    assert not samples(run, "replaybuf_requests_total", run="made-up")
    assert samples(run, "replaybuf_requests_total", run="", call="GET /v1/runs/{run}/ledger", status="404")


def test_the_time_a_caller_asked_to_wait_is_not_the_services(run: RunClient) -> None:
    """A long poll that ends without a batch is as quick an answer as any."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    begun = time.perf_counter()
    assert run.batch(0, epoch, wait_ms=1000).status_code == 202
    elapsed = time.perf_counter() - begun
    (took,) = samples(run, "replaybuf_request_seconds_sum", run=run.run, call=GET_BATCH)
    assert 0 < took.value <= elapsed - 0.9


def test_buckets_add_up_to_the_calls(run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 1})
    for _ in range(5):
        run.state()
    buckets = samples(run, "replaybuf_request_seconds_bucket", run=run.run, call=GET_RUN)
    assert [float(bucket.labels["le"]) for bucket in buckets] == [*(edge / 1e6 for edge in TOOK_US), float("inf")]
    counts = [bucket.value for bucket in buckets]
    assert counts == sorted(counts) and counts[-1] == 5


def test_excluded_seconds_are_not_measured() -> None:
    now_s = 10.0
    watch = Stopwatch(lambda: now_s)
    now_s = 15.5
    watch.exclude(3.0)
    assert watch.seconds == 2.5


@pytest.mark.parametrize(("seconds", "bucket"), [(-0.1, 0), (0.0, 0), (0.001, 0), (0.00101, 1), (10.0, 12), (11.0, 13)])
def test_a_call_falls_into_the_bucket_that_ends_at_or_above_it(seconds: float, bucket: int) -> None:
    """As Prometheus has it; a clock that was put back counts as no time."""
    traffic = Traffic()
    traffic.count("r", GET_RUN, 200, seconds)
    assert [i for i, count in enumerate(traffic.took["r", GET_RUN].counts) if count] == [bucket]

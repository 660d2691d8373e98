"""Prometheus metrics of a generator, and its health check."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from replaybuf.errors import ServiceUnavailable
from replaybuf.generator.environments import Score
from replaybuf.generator.metrics import exposition, serve_metrics
from tests.generator.doubles import Broken, EngineDouble, ServiceDouble, fail
from tests.generator.worlds import gated, reference, started, world


def samples(text: bytes) -> dict[str, float]:
    """Return values by name and labels, without the label run."""
    readings = {}
    for family in text_string_to_metric_families(text.decode()):
        for name, labels, value, *_ in family.samples:
            assert labels.pop("run") == "r"
            values = ",".join(f"{label}={said}" for label, said in sorted(labels.items()) if label != "engine")
            readings[name.removeprefix("replaybuf_generator_") + (f"{{{values}}}" if values else "")] = value
    return readings


async def test_groups_and_requests_are_counted_by_outcome_and_reason(tmp_path: Path) -> None:
    def picky(prompt: object, text: str) -> Score:
        if text.startswith("d"):
            raise ValueError("cannot judge")
        return Score(1.0)

    engine, service = EngineDouble(version=3), ServiceDouble(prompts=4)
    service.published = 3
    engine.script.append(fail(500))
    async with world(tmp_path, engine, service, environment=Broken(picky)) as w:
        await w.run()
        values = samples(exposition("r", w.daemon))
    assert values["ready"] == 1
    assert (values["groups_stored_total"], values["rollouts_total"], values["tokens_total"]) == (1, 4, 12)
    assert values["groups_failed_total{reason=reward_raised}"] == 3
    assert values["requests_total{outcome=ok}"] == 4
    assert values["requests_total{outcome=engine_error}"] == 1
    assert (values["sampled_version"], values["published_version"]) == (3, 3)
    assert (values["reward_seconds_count"], values["group_seconds_count"]) == (4, 1)
    assert values["group_seconds_sum"] > 0
    assert (values["engine_up"], values["groups_inflight"], values["groups_generating"]) == (1, 0, 0)
    assert values["groups_limit"] == 64
    assert values["waiting{reason=finished}"] == 1
    assert "engine_running" not in values


async def test_groups_and_requests_in_flight_are_gauges(tmp_path: Path) -> None:
    service = ServiceDouble(prompts=2)
    async with gated(tmp_path, service, 1, max_inflight_groups=1) as (w, gate):
        values = samples(exposition("r", w.daemon))
        assert (values["groups_inflight"], values["groups_generating"], values["engine_requests"]) == (1, 1, 1)
        assert "sampled_version" not in values
        gate.open.set()
        await w.end()


async def test_the_engines_of_stages_have_the_label_stage(tmp_path: Path) -> None:
    """In the metrics and in every line of the metrics file."""
    file = tmp_path / "generate.jsonl"
    async with (
        EngineDouble().up() as judge,
        reference(judge) as stage,
        world(tmp_path, EngineDouble(), ServiceDouble(prompts=2), stages=[stage], metrics_file=file) as w,
    ):
        judge.script.append(fail(400))
        await w.run()
        values = samples(exposition("r", w.daemon))
        assert values["stage_engine_up{stage=ref_logprobs}"] == 1
        assert values["stage_requests_total{outcome=ok,stage=ref_logprobs}"] == 1
        assert values["stage_requests_total{outcome=engine_refused,stage=ref_logprobs}"] == 1
        (line,) = json.loads(file.read_text().splitlines()[-1])["stages"]["ref_logprobs"]
        assert (line["url"], line["state"], line["fault"]) == (judge.url, "up", None)


async def test_the_reason_for_waiting_is_a_label(tmp_path: Path) -> None:
    service = ServiceDouble()
    service.open = 0
    async with started(tmp_path, EngineDouble(), service) as w:
        await service.until(lambda: len(service.asked) >= 2)
        assert samples(exposition("r", w.daemon))["waiting{reason=rate_limited}"] == 1


async def test_metrics_and_liveness_are_served_on_a_free_port() -> None:
    async with (
        serve_metrics("127.0.0.1", 0, lambda: exposition("r", None)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        alive, values = await http.get("/healthz"), await http.get("/metrics")
        assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
        assert values.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert samples(values.content) == {"ready": 0}
        with pytest.raises(ServiceUnavailable, match="choose another --metrics-address"):
            async with serve_metrics("127.0.0.1", int(url.rpartition(":")[2]), bytes):
                pass

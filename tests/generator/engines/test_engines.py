"""Requests to a vLLM-style server, columns from its answers, and faults from unusable answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from starlette.responses import Response

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit, Invalid
from replaybuf.generator.engines import Sample, Sampling, VllmEngine
from tests.generator.doubles import EngineDouble, Gate, Script, fail, reply

PROMPT = np.array([2, 0, 1], np.int32)
SAMPLING = Sampling(n=2, max_tokens=5, temperature=0.7, stop_token_ids=(28,))


def with_engine(
    double: EngineDouble, use: Callable[[VllmEngine], Awaitable[Any]], *, timeout_s: float = 10.0, **options: Any
) -> Any:
    """Run `use` with an engine that speaks to the double."""

    async def main() -> Any:
        async with double.up():
            engine = VllmEngine(double.url, timeout_s=timeout_s, **options)
            try:
                return await use(engine)
            finally:
                await engine.aclose()

    return asyncio.run(main())


def sample(double: EngineDouble, *scripts: Script, **options: Any) -> Sample:
    """Sample once from a double that follows these scripts."""
    double.script.extend(scripts)
    made: Sample = with_engine(double, lambda engine: engine.generate(PROMPT, SAMPLING), **options)
    return made


def test_completions_come_back_as_columns() -> None:
    made = sample(EngineDouble())
    assert made.completion_ids.tolist() == [1, 0, 2] * 2
    assert made.completion_lengths.tolist() == [3, 3]
    assert made.inference_logprobs.tolist() == [-0.5, -1.0, -1.5] * 2
    assert made.inference_logprobs.dtype == np.float32
    assert made.finish_reasons == ("stop", "stop")
    assert [ids.tolist() for ids in made.completions] == [[1, 0, 2], [1, 0, 2]]


def test_the_request_asks_for_token_ids_and_the_sampled_tokens_logprobs() -> None:
    double = EngineDouble()
    sample(double)
    assert double.requests == [
        {
            "prompt": [2, 0, 1],
            "n": 2,
            "max_tokens": 5,
            "temperature": 0.7,
            "stop_token_ids": [28],
            "logprobs": 0,
            "return_token_ids": True,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
    ]


def test_the_metadata_record_the_engine_and_the_sampling_parameters() -> None:
    double = EngineDouble()
    made = sample(double, logprobs_mode="processed_logprobs")
    assert made.metadata["engine"] == {
        "url": double.url,
        "api": "/v1/completions",
        "model": "tiny",
        "logprobs_mode": "processed_logprobs",
    }
    assert made.metadata["sampling"] == {
        "n": 2,
        "max_tokens": 5,
        "temperature": 0.7,
        "stop_token_ids": (28,),
    }


def test_version_spans_of_the_server_are_kept() -> None:
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": 5, "start": 2, "end": 3}]
    made = sample(EngineDouble(), reply(weight_versions=spans))
    assert made.version_spans.tolist() == [[0, 4, 0, 2], [0, 5, 2, 3], [1, 4, 0, 2], [1, 5, 2, 3]]
    assert made.policy_version == 4


def test_a_server_with_spans_is_not_asked_for_its_version_again() -> None:
    double = EngineDouble()

    async def twice(engine: VllmEngine) -> None:
        await engine.generate(PROMPT, SAMPLING)
        await engine.generate(PROMPT, SAMPLING)

    with_engine(double, twice)
    assert double.calls == ["weight_info", "completions", "completions"]


def test_without_spans_the_version_is_read_before_and_after() -> None:
    double = EngineDouble(version="7", labels=False)
    made = sample(double)
    assert double.calls == ["weight_info", "completions", "weight_info"]
    assert made.version_spans.tolist() == [[0, 7, 0, 3], [1, 7, 0, 3]]
    assert "weight_versions" not in made.metadata


@pytest.mark.parametrize(("before", "after"), [(7, 8), (8, 7)])
def test_without_spans_a_changed_version_is_stamped_older(before: int, after: int) -> None:
    double = EngineDouble(version=before, labels=False)

    async def update(request: dict[str, Any]) -> None:
        double.version = after

    made = sample(double, update)
    assert made.policy_version == 7
    assert made.version_spans[:, 1].tolist() == [7, 7]
    assert made.metadata["weight_versions"] == {"before": before, "after": after}


def test_the_label_default_means_version_zero() -> None:
    assert sample(EngineDouble(version="default", labels=False)).policy_version == 0


def test_a_label_that_is_not_a_number_is_unfit() -> None:
    with pytest.raises(EngineUnfit, match=r"labels its weights 'v2'.*must be the policy version"):
        sample(EngineDouble(version="v2"))


def test_a_server_that_reports_no_version_is_unfit() -> None:
    double = EngineDouble(labels=False)
    double.weight_info = False
    with pytest.raises(EngineUnfit, match="VLLM_SERVER_DEV_MODE=1"):
        sample(double)


def test_a_server_that_stops_reporting_spans_costs_one_try() -> None:
    double = EngineDouble()

    async def restart(engine: VllmEngine) -> Sample:
        await engine.generate(PROMPT, SAMPLING)
        double.labels, double.version = False, 3
        with pytest.raises(EngineAway, match="no longer reports version spans"):
            await engine.generate(PROMPT, SAMPLING)
        return await engine.generate(PROMPT, SAMPLING)

    assert with_engine(double, restart).policy_version == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, "a choice without token_ids"),
        ({"token_ids": []}, "a choice without token_ids"),
        ({"logprobs": None}, "0 logprobs for 3 tokens"),
        ({"logprobs": {"token_logprobs": [-0.5]}}, "1 logprob for 3 tokens"),
        ({"logprobs": {"token_logprobs": [-0.5, None, -0.5]}}, "Expected `float`, got `null`"),
        ({"prompt_token_ids": [0, 1]}, "completions of another prompt"),
        ({"token_ids": [1, 0, 2**31]}, "Expected `int` <"),
        ({"token_ids": [1, 0, -2]}, "Expected `int` >="),
    ],
)
def test_an_incomplete_answer_is_a_fault_of_this_request(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineFault) as caught:
        sample(EngineDouble(), reply(**changes))
    assert type(caught.value) is EngineFault
    assert caught.value.reason == "engine_bad_answer"
    assert message in caught.value.detail and "http://127.0.0.1" in caught.value.detail


def test_fewer_choices_than_requested_are_a_fault() -> None:
    async def one_choice(request: dict[str, Any]) -> dict[str, Any]:
        return EngineDouble().answer(request | {"n": 1})

    with pytest.raises(EngineFault, match="1 choice; 2 were requested"):
        sample(EngineDouble(), one_choice)


@pytest.mark.parametrize(
    ("body", "message"), [("oops", "it starts with 'oops'"), (b'{"model": "\xff", "choices": []}', "'utf-8' codec")]
)
def test_an_answer_that_is_not_json_is_a_fault(body: str | bytes, message: str) -> None:
    with pytest.raises(EngineFault, match=message):
        sample(EngineDouble(), fail(200, body))


def test_completions_aborted_before_their_first_token_are_empty() -> None:
    """They have no spans, because nothing was sampled; the server still counts as one that reports spans."""
    double = EngineDouble()

    async def twice(engine: VllmEngine) -> Sample:
        await engine.generate(PROMPT, SAMPLING)
        double.script.append(reply(token_ids=[], logprobs=None, weight_versions=None, finish_reason="abort"))
        return await engine.generate(PROMPT, SAMPLING)

    made: Sample = with_engine(double, twice)
    assert made.aborted and made.completion_lengths.tolist() == [0, 0] and made.version_spans.shape == (0, 4)


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (500, EngineAway, "engine_error"),
        (503, EngineAway, "engine_error"),
        (429, EngineAway, "engine_error"),
        (400, EngineFault, "engine_refused"),
        (404, EngineUnfit, "engine_unfit"),
        (401, EngineUnfit, "engine_unfit"),
    ],
)
def test_an_error_status_names_server_status_and_text(status: int, kind: type[EngineFault], reason: str) -> None:
    double = EngineDouble()
    with pytest.raises(EngineFault) as caught:
        sample(double, fail(status, "it broke"))
    assert type(caught.value) is kind and caught.value.reason == reason
    assert caught.value.detail == f"engine {double.url}/v1/completions answered {status}: 'it broke'"


def test_a_server_that_hangs_is_a_timeout() -> None:
    async def hang(request: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    with pytest.raises(EngineAway, match=r"gave no answer within 0\.2 s") as caught:
        sample(EngineDouble(), hang, timeout_s=0.2)
    assert caught.value.reason == "engine_timeout"


async def test_a_failed_connection_is_away() -> None:
    engine = VllmEngine("http://127.0.0.1:9", timeout_s=5)
    with pytest.raises(EngineAway, match=r"engine http://127\.0\.0\.1:9/weight_info") as caught:
        await engine.generate(PROMPT, SAMPLING)
    assert caught.value.reason == "engine_away"
    assert not await engine.healthy()
    await engine.aclose()


def test_parallel_requests_use_separate_connections_which_are_reused() -> None:
    double, gate = EngineDouble(), Gate()

    async def together(engine: VllmEngine) -> None:
        double.always = gate
        sampling = [asyncio.create_task(engine.generate(PROMPT, SAMPLING)) for _ in range(5)]
        await gate.requests(5)
        gate.open.set()
        await asyncio.gather(*sampling)
        for _ in range(3):
            await engine.generate(PROMPT, SAMPLING)

    with_engine(double, together)
    assert len(double.connections) == 5


def test_prepare_reads_the_model_and_its_context() -> None:
    double = EngineDouble(model="qwen")

    async def prepare(engine: VllmEngine) -> tuple[str | None, int | None]:
        await engine.prepare()
        await engine.generate(PROMPT, SAMPLING)
        return engine.model, engine.max_model_len

    assert with_engine(double, prepare) == ("qwen", 64)
    assert double.requests[0]["model"] == "qwen"


def test_a_server_of_another_model_is_unfit() -> None:
    with pytest.raises(EngineUnfit, match=r"serves \['tiny'\]; the requested model is 'large'"):
        with_engine(EngineDouble(), lambda engine: engine.prepare(), model="large")


def test_health_follows_the_server() -> None:
    double = EngineDouble()

    async def look(engine: VllmEngine) -> tuple[bool, bool]:
        before = await engine.healthy()
        double.healthy = False
        return before, await engine.healthy()

    assert with_engine(double, look) == (True, False)


async def test_the_proxy_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reached() -> bool:
        engine = VllmEngine("http://engine.example:8000", timeout_s=5)
        try:
            return await engine.healthy()
        finally:
            await engine.aclose()

    async with EngineDouble().up() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        through = await reached()
        monkeypatch.setenv("no_proxy", "engine.example")
        await reached()
        outcome = through, proxy.calls
    assert outcome == (True, ["health"])


@pytest.mark.parametrize("address", ["localhost:8000", "http://:8000", "http://engine:port", "http://[::1"])
def test_an_address_without_scheme_host_or_port_is_rejected(address: str) -> None:
    with pytest.raises(Invalid, match=re.escape(f"engine is '{address}'")):
        VllmEngine(address, timeout_s=1)


def test_a_reset_connection_is_not_used_again() -> None:
    double = EngineDouble()

    async def reset(request: dict[str, Any]) -> Response:
        raise ConnectionResetError

    async def twice(engine: VllmEngine) -> None:
        double.script.append(reset)
        with pytest.raises(EngineAway):
            await engine.generate(PROMPT, SAMPLING)
        await engine.generate(PROMPT, SAMPLING)

    with_engine(double, twice)

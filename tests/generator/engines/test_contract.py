"""The engine contract over doubles of every API, and tests of each API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit, Invalid
from replaybuf.generator.engines import Sample, Sampling, Server, open_engine, request_seed
from tests.generator.doubles import EngineDouble
from tests.generator.engines.contract import (
    SAMPLING,
    EngineContract,
    Fault,
    FaultContract,
    FaultySubject,
    Subject,
    lists_of,
    opened,
    prompt_of,
)
from tests.generator.engines.doubles import (
    Made,
    Sglang,
    SglangWithoutSpans,
    ShapedEngine,
    VllmCompletions,
    VllmTokens031,
    VllmTokens032,
)


class _OverADouble(EngineContract, FaultContract):
    double: type[ShapedEngine]

    def serve(self) -> contextlib.AbstractAsyncContextManager[Subject]:
        """Serve a new double."""
        return self.double().up()

    def serve_faulty(self) -> contextlib.AbstractAsyncContextManager[FaultySubject]:
        """Serve a new double."""
        return self.double().up()


class TestVllmCompletions(_OverADouble):
    """vLLM 0.31 with /v1/completions."""

    double = VllmCompletions


class TestVllmTokens031(_OverADouble):
    """vLLM 0.31 with /inference/v1/generate."""

    double = VllmTokens031


class TestVllmTokens032(_OverADouble):
    """vLLM 0.32 with /inference/v1/generate."""

    double = VllmTokens032


class TestSglang(_OverADouble):
    """SGLang with version spans."""

    double = Sglang


class TestSglangWithoutSpans(_OverADouble):
    """SGLang without version spans."""

    double = SglangWithoutSpans


def with_double(
    double: ShapedEngine, use: Callable[[Server], Awaitable[Any]], *, prepare: bool = True, **options: Any
) -> Any:
    """Run `use` with a client of the double."""

    async def main() -> Any:
        async with double.up(), opened(double, **options) as engine:
            if prepare:
                await engine.prepare()
            return await use(engine)

    return asyncio.run(main())


def sample(double: ShapedEngine, sampling: Sampling = SAMPLING) -> Sample:
    """Sample once."""
    made: Sample = with_double(double, lambda engine: engine.generate(prompt_of(double), sampling))
    return made


INDEXED = (VllmCompletions, VllmTokens031, VllmTokens032)


@pytest.mark.parametrize("double", INDEXED)
def test_choices_are_sorted_by_index(double: type[ShapedEngine]) -> None:
    seeded = Sampling(n=4, max_tokens=12, seed=5)
    backwards = double()
    backwards.fail_next(Fault.BACKWARDS)
    assert lists_of(sample(backwards, seeded)) == lists_of(sample(double(), seeded))


@pytest.mark.parametrize("double", INDEXED)
def test_choices_of_the_same_index_are_a_fault(double: type[ShapedEngine]) -> None:
    faulty = double()
    faulty.fail_next(Fault.SAME_INDEX)
    with pytest.raises(EngineFault, match=r"choices of index \[0, 0, 0, 0\]"):
        sample(faulty)


@pytest.mark.parametrize("double", [VllmTokens031, VllmCompletions, Sglang])
def test_only_the_temperature_changes_the_distribution(double: type[ShapedEngine]) -> None:
    """The server takes missing parameters from the model's generation_config.json."""
    made = double()
    sample(made)
    parameters = made.asked(made.bodies[0]).parameters
    untouched = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert untouched.items() <= parameters.items()


def test_prepare_finds_vllms_token_call_and_a_404_drops_it() -> None:
    class Both(VllmTokens032):
        """Serves the older call, and the newer one while `offered`."""

        older = VllmCompletions()
        offered = True

        def routes(self) -> list[Route]:
            return [Route("/v1/completions", self.older.generate, methods=["POST"]), *super().routes()]

        async def generate(self, request: Request) -> Response:
            return await super().generate(request) if self.offered else Response("Not Found", 404)

    double = Both()

    async def use(engine: Server) -> list[str]:
        async def api() -> str:
            reported: str = (await engine.generate(prompt_of(double), SAMPLING)).metadata["engine"]["api"]
            return reported

        apis = [await api()]
        await engine.prepare()
        apis.append(await api())
        double.offered = False
        with pytest.raises(EngineAway, match="no longer offers /inference/v1/generate"):
            await api()
        return [*apis, await api()]

    assert with_double(double, use, prepare=False) == ["/v1/completions", "/inference/v1/generate", "/v1/completions"]


@pytest.mark.parametrize("double", [VllmTokens032, Sglang])
def test_spans_across_an_update_are_kept(double: type[ShapedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    def spans(self: ShapedEngine, made: Made) -> list[dict[str, Any]]:
        return [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": len(made.ids)}]

    monkeypatch.setattr(double, "spans", spans)
    made = sample(double(), Sampling(n=2, max_tokens=3))
    assert made.version_spans.tolist() == [[0, 7, 0, 1], [0, 8, 1, 3], [1, 7, 0, 1], [1, 8, 1, 3]]
    assert made.policy_version == 7


@pytest.mark.parametrize("bounds", [[(0, 1)], [(1, 3)], [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 4)]])
def test_spans_that_do_not_cover_the_completion_are_a_fault(
    bounds: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = [{"version": "7", "start": start, "end": end} for start, end in bounds]
    monkeypatch.setattr(VllmTokens032, "spans", lambda self, made: reported)
    with pytest.raises(EngineFault, match=r"weight_versions .* for 3 tokens"):
        sample(VllmTokens032(), Sampling(n=1, max_tokens=3))


def test_logprobs_of_other_tokens_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    shaped = VllmTokens031.item
    monkeypatch.setattr(VllmTokens031, "item", lambda self, token, logprob: shaped(self, token + 1, logprob))
    with pytest.raises(EngineFault, match="logprobs of other tokens than token_ids"):
        sample(VllmTokens031())


def test_without_spans_the_older_of_sglangs_versions_is_stamped(monkeypatch: pytest.MonkeyPatch) -> None:
    double = SglangWithoutSpans()
    double.version = "3"
    shaped = SglangWithoutSpans.meta

    def updated(self: SglangWithoutSpans, completion: Made) -> dict[str, Any]:
        self.version = "4"
        return shaped(self, completion)

    monkeypatch.setattr(SglangWithoutSpans, "meta", updated)
    made = sample(double)
    assert set(made.version_spans[:, 1].tolist()) == {3}
    assert made.metadata["weight_versions"] == {"before": 3, "after": 4}


async def test_sglang_gets_the_name_of_a_requested_adapter() -> None:
    class WithAdapter(Sglang):
        async def _models(self, request: Request) -> Response:
            cards = [{"id": "policy"}, {"id": "de", "parent": "policy", "max_model_len": None}]
            return JSONResponse({"data": cards})

    double = WithAdapter()
    async with double.up():
        for model in ("policy", "de"):
            engine = open_engine(double.address, timeout_s=10, model=model)
            await engine.prepare()
            await engine.generate(prompt_of(double), SAMPLING)
            await engine.aclose()
    assert [body.get("lora_path") for body in double.bodies] == [None, "de"]


def test_the_version_of_a_vllm_adapter_is_asked_by_name_and_its_context_is_that_of_its_model() -> None:
    """vLLM ignores the name; the small engine has a version per adapter. vLLM gives an adapter no context."""
    queries: list[str] = []

    class WithAdapter(VllmCompletions):
        async def _models(self, request: Request) -> Response:
            cards = [{"id": "policy", "max_model_len": 256}, {"id": "de&1", "parent": "policy", "max_model_len": None}]
            return JSONResponse({"data": cards})

        async def _weight_info(self, request: Request) -> Response:
            queries.append(request.url.query)
            return await super()._weight_info(request)

    async def main(double: ShapedEngine) -> None:
        async with double.up():
            for model in ("policy", "de&1"):
                engine = open_engine(double.address, timeout_s=10, model=model)
                await engine.prepare()
                assert (await engine.loaded_version(), engine.max_model_len) == (0, 256)
                await engine.aclose()

    asyncio.run(main(WithAdapter()))
    assert queries == ["", "model=de%261"]


def test_the_default_logprobs_mode_depends_on_the_kind_of_server() -> None:
    def mode(address: str, **options: Any) -> str:
        return open_engine(address, timeout_s=1, **options).logprobs_mode

    assert mode("http://h:1") == "raw_logprobs"
    assert mode("sglang+http://h:1") == "processed_logprobs"
    assert mode("sglang+http://h:1", logprobs_mode="raw_logprobs") == "raw_logprobs"


def test_an_address_with_a_password_is_rejected_without_showing_it() -> None:
    with pytest.raises(Invalid, match="use engine_api_key") as caught:
        open_engine("http://me:s3cret@host:8000", timeout_s=1)
    assert "s3cret" not in repr(caught.value.problem())


def test_request_seeds_are_the_same_everywhere_and_differ_by_prompt_and_attempt() -> None:
    assert request_seed(0, 0, 1) == 98208444399230
    seeds = {request_seed(run, index, attempt) for run in (0, 1) for index in range(50) for attempt in (1, 2, 3)}
    assert len(seeds) == 300
    assert all(0 <= seed < 1 << 53 for seed in seeds)


def test_a_server_without_any_version_is_unfit() -> None:
    with pytest.raises(EngineUnfit, match="GET /model_info"):
        with_double(_NoVersion(), lambda engine: engine.generate(np.array([1], np.int32), SAMPLING))


class _NoVersion(SglangWithoutSpans):
    info = "/nothing"

    def meta(self, completion: Made) -> dict[str, Any]:
        return super().meta(completion) | {"weight_version": None}


async def test_the_engine_double_behaves_as_a_server_without_the_token_call() -> None:
    """`EngineDouble` has the shapes of /v1/completions with version spans, like the tiny engine."""
    async with EngineDouble().up() as double:
        engine = open_engine(double.url, timeout_s=10)
        await engine.prepare()
        made = await engine.generate(np.array([2, 0, 1], np.int32), SAMPLING)
        assert made.metadata["engine"]["api"] == "/v1/completions"
        await engine.aclose()

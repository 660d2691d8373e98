"""Contract suite of every engine behind its client: a double, the tiny engine, a real server.

Subclass `EngineContract` with a `serve`; doubles, in which things can be made to go wrong, also `FaultContract`. For a
server that speaks vLLM's API at an address, `ServedOverVllmApi` is the subject.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import enum
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import httpx
import numpy as np
import pytest

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit
from replaybuf.generator.engines import Sample, Sampling, Server, open_engine
from replaybuf.wire.group import Int32s
from tests.generator.doubles import TIMEOUT_S

SAMPLING = Sampling(n=4, max_tokens=12)

ABORT_ATTEMPTS = 20
"""On a busy machine a small engine may be done before the abort arrives."""
ABORT_LOOKS = 1000


class Subject(Protocol):
    """An engine under test."""

    address: str
    vocab_size: int
    prompt: Sequence[int]

    async def set_version(self, version: int) -> None:
        """Set the label of the weights."""

    async def abort_running(self) -> None:
        """Abort the requests in flight once there are some, and go on."""


class Fault(enum.Enum):
    """Faults of the next request for completions."""

    ERROR = "answered 500"
    HANG = "no answer"
    FEWER_CHOICES = "one choice less"
    SAME_INDEX = "all choices have index 0"
    BACKWARDS = "the last choice first"
    NO_LOGPROBS = "ids without logprobs"
    FEWER_LOGPROBS = "a logprob less than ids"
    ABSENT_LOGPROB = "a logprob that is not there"
    OTHER_PROMPT = "completions of another prompt"


class FaultySubject(Subject, Protocol):
    """A double with faults."""

    def fail_next(self, fault: Fault) -> None:
        """Make the next request for completions fail with a fault."""

    def require_key(self, key: str) -> None:
        """Answer 401 to requests without the key."""


@dataclasses.dataclass
class ServedOverVllmApi:
    """A server that speaks vLLM's API, with VLLM_SERVER_DEV_MODE=1; its context fits 160 tokens after `prompt`."""

    address: str
    vocab_size: int
    prompt: Sequence[int]

    async def set_version(self, version: int) -> None:
        """Set the label of the weights."""
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            body = {"new_version": str(version)}
            (await client.post(f"{self.address}/update_weight_version", json=body)).raise_for_status()

    async def abort_running(self) -> None:
        """Freeze the engine again and again until it has generated tokens, abort what it holds then, and resume.

        A look at a running engine comes too late on a busy machine: frozen, it generates nothing between look and
        abort. Between two freezes all may be generated.
        """
        async with httpx.AsyncClient(base_url=self.address, timeout=TIMEOUT_S) as client:
            before = await self._generated(client)
            for _ in range(ABORT_LOOKS):
                (await client.post("/pause?mode=keep&clear_cache=false")).raise_for_status()
                if await self._generated(client) > before:
                    break
                (await client.post("/resume")).raise_for_status()
            (await client.post("/pause?mode=abort")).raise_for_status()
            (await client.post("/resume")).raise_for_status()

    async def _generated(self, client: httpx.AsyncClient) -> float:
        text = (await client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


class EngineContract(abc.ABC):
    """Tests of every engine."""

    long = Sampling(n=24, max_tokens=160)
    """Long enough to abort a part of it."""

    @abc.abstractmethod
    def serve(self) -> contextlib.AbstractAsyncContextManager[Subject]:
        """Serve the engine."""

    def test_n_completions_come_each_within_its_maximum_length(self) -> None:
        async def main(subject: Subject, engine: Server) -> None:
            for sampling in (SAMPLING, Sampling(n=1, max_tokens=1)):
                made = await engine.generate(prompt_of(subject), sampling)
                assert made.completion_lengths.shape == (sampling.n,)
                assert 1 <= made.completion_lengths.min() <= made.completion_lengths.max() <= sampling.max_tokens
                assert made.completion_ids.shape == (made.completion_lengths.sum(),)
                assert made.completion_ids.min() >= 0 and made.completion_ids.max() < subject.vocab_size

        self.run(main)

    def test_every_token_has_a_finite_logprob_not_above_zero(self) -> None:
        async def main(subject: Subject, engine: Server) -> None:
            made = await engine.generate(prompt_of(subject), SAMPLING)
            assert made.inference_logprobs.shape == made.completion_ids.shape
            assert np.isfinite(made.inference_logprobs).all() and made.inference_logprobs.max() <= 1e-3

        self.run(main)

    def test_version_spans_cover_every_completion_without_a_gap(self) -> None:
        async def main(subject: Subject, engine: Server) -> None:
            assert_covered(await engine.generate(prompt_of(subject), SAMPLING))

        self.run(main)

    def test_completions_have_the_loaded_version(self) -> None:
        async def main(subject: Subject, engine: Server) -> None:
            for version in (3, 4):
                await subject.set_version(version)
                made = await engine.generate(prompt_of(subject), SAMPLING)
                assert set(made.version_spans[:, 1].tolist()) == {version}
                assert_covered(made)

        self.run(main)

    def test_a_completion_ends_with_a_stop_token_or_at_its_maximum_length(self) -> None:
        async def main(subject: Subject, engine: Server) -> None:
            stops = tuple(range(0, subject.vocab_size, 2))
            sampling = Sampling(n=64, max_tokens=2, stop_token_ids=stops)
            made = await engine.generate(prompt_of(subject), sampling)
            assert set(made.finish_reasons) == {"stop", "length"}
            for ids, reason in zip(made.completions, made.finish_reasons, strict=True):
                assert not set(ids[:-1]) & set(stops)
                assert (ids[-1] in stops) == (reason == "stop")
                assert reason == "stop" or len(ids) == sampling.max_tokens

        self.run(main)

    def test_at_temperature_zero_all_completions_are_equal(self) -> None:
        async def main(subject: Subject, engine: Server) -> None:
            made = await engine.generate(prompt_of(subject), dataclasses.replace(SAMPLING, temperature=0.0))
            assert len({tuple(ids) for ids in made.completions}) == 1

        self.run(main)

    def test_the_same_seed_gives_the_same_completions_which_differ_from_each_other(self) -> None:
        async def main(subject: Subject, engine: Server) -> None:
            first, again, other = [
                lists_of(await engine.generate(prompt_of(subject), dataclasses.replace(SAMPLING, seed=seed)))
                for seed in (1 << 52, 1 << 52, 7)
            ]
            assert first == again != other
            assert len({tuple(ids) for ids in first}) > 1

        self.run(main)

    def test_the_metadata_record_the_engine_and_the_sampling_parameters(self) -> None:
        async def main(subject: Subject, engine: Server) -> None:
            made = await engine.generate(prompt_of(subject), dataclasses.replace(SAMPLING, seed=5))
            reported = made.metadata["engine"]
            assert reported["url"] == engine.url and reported["model"] == engine.model
            assert reported["logprobs_mode"] == engine.logprobs_mode and reported["api"].startswith("/")
            assert made.metadata["sampling"]["seed"] == 5

        self.run(main)

    def test_prepare_reads_the_model_and_its_longest_context(self) -> None:
        async def main(subject: Subject, engine: Server) -> None:
            assert await engine.healthy()
            assert engine.model and engine.max_model_len

        self.run(main)

    def test_parallel_requests_get_completions_of_their_own_prompts(self) -> None:
        async def main(subject: Subject, engine: Server) -> None:
            prompts = [prompt_of(subject)[: 1 + length] for length in range(len(subject.prompt))]
            greedy = Sampling(n=2, max_tokens=4, temperature=0.0)
            alone = [lists_of(await engine.generate(prompt, greedy)) for prompt in prompts]
            together = await asyncio.gather(*(engine.generate(prompt, greedy) for prompt in prompts))
            assert [lists_of(made) for made in together] == alone

        self.run(main)

    def test_a_prompt_too_long_for_the_model_is_a_fault_of_this_request(self) -> None:
        async def main(subject: Subject, engine: Server) -> None:
            too_long = np.zeros(1 + (engine.max_model_len or 0), np.int32)
            with pytest.raises(EngineFault) as caught:
                await engine.generate(too_long, SAMPLING)
            assert type(caught.value) is EngineFault and caught.value.reason == "engine_refused"

        self.run(main)

    def test_an_aborted_completion_keeps_its_tokens_and_the_engine_goes_on(self) -> None:
        async def main(subject: Subject, engine: Server) -> None:
            for _ in range(ABORT_ATTEMPTS):
                asking = asyncio.create_task(engine.generate(prompt_of(subject), self.long))
                await subject.abort_running()
                made = await asking
                if made.aborted:
                    break
            assert made.aborted and len(made.finish_reasons) == self.long.n
            assert len(made.completion_ids) == made.completion_lengths.sum() < self.long.n * self.long.max_tokens
            assert_covered(made)
            await engine.generate(prompt_of(subject), SAMPLING)

        self.run(main)

    def run(self, main: Callable[[Subject, Server], Awaitable[None]]) -> None:
        """Run a test on a prepared client of the engine served."""

        async def bounded() -> None:
            async with asyncio.timeout(6 * TIMEOUT_S), self.serve() as subject, opened(subject) as engine:
                await engine.prepare()
                await main(subject, engine)

        asyncio.run(bounded())


class FaultContract(abc.ABC):
    """Tests of every fault between client and engine."""

    @abc.abstractmethod
    def serve_faulty(self) -> contextlib.AbstractAsyncContextManager[FaultySubject]:
        """Serve the engine."""

    @pytest.mark.parametrize(
        ("fault", "kind", "reason"),
        [
            (Fault.ERROR, EngineAway, "engine_error"),
            (Fault.HANG, EngineAway, "engine_timeout"),
            (Fault.FEWER_CHOICES, EngineFault, "engine_bad_answer"),
            (Fault.NO_LOGPROBS, EngineFault, "engine_bad_answer"),
            (Fault.FEWER_LOGPROBS, EngineFault, "engine_bad_answer"),
            (Fault.ABSENT_LOGPROB, EngineFault, "engine_bad_answer"),
            (Fault.OTHER_PROMPT, EngineFault, "engine_bad_answer"),
        ],
    )
    async def test_a_failed_request_has_its_reason_and_the_next_one_is_answered(
        self, fault: Fault, kind: type[EngineFault], reason: str
    ) -> None:
        timeout_s = 0.3 if fault is Fault.HANG else TIMEOUT_S
        async with (
            self.serve_faulty() as subject,
            opened(subject, timeout_s=timeout_s) as engine,
            opened(subject) as patient,
        ):
            await engine.prepare()
            await patient.prepare()
            subject.fail_next(fault)
            with pytest.raises(EngineFault) as caught:
                await engine.generate(prompt_of(subject), SAMPLING)
            assert type(caught.value) is kind and caught.value.reason == reason, caught.value
            assert engine.url in caught.value.detail
            await patient.generate(prompt_of(subject), SAMPLING)

    def test_the_key_goes_to_the_server_and_never_to_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        async def main() -> None:
            async with self.serve_faulty() as subject:
                subject.require_key("s3cret")
                async with opened(subject) as engine:
                    with pytest.raises(EngineUnfit, match="401"):
                        await engine.prepare()
                async with opened(subject, api_key="s3cret") as engine:
                    await engine.prepare()
                    made = await engine.generate(prompt_of(subject), SAMPLING)
                    assert "s3cret" not in repr(made.metadata)

        with caplog.at_level(logging.DEBUG):
            asyncio.run(main())
        assert caplog.text and "s3cret" not in caplog.text


@contextlib.asynccontextmanager
async def opened(
    subject: Subject, *, timeout_s: float = TIMEOUT_S, api_key: str | None = None
) -> AsyncIterator[Server]:
    """Open a client of the subject, without `prepare`."""
    engine = open_engine(subject.address, timeout_s=timeout_s, api_key=api_key)
    try:
        yield engine
    finally:
        await engine.aclose()


def prompt_of(subject: Subject) -> Int32s:
    """Return the subject's prompt, int32 [P]."""
    return np.array(subject.prompt, np.int32)


def lists_of(made: Sample) -> list[list[int]]:
    """Return the token ids of each completion, to compare."""
    return [ids.tolist() for ids in made.completions]


def assert_covered(made: Sample) -> None:
    """Check that the spans of every completion run from 0 to its length without a gap."""
    for rollout, length in enumerate(made.completion_lengths.tolist()):
        end = 0
        for _, version, start, stop in made.version_spans[made.version_spans[:, 0] == rollout].tolist():
            assert version >= 0 and start == end < stop
            end = stop
        assert end == length

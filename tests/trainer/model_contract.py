"""What a server must do with its model folder: logprobs of given tokens (`--ref-engine`), and the folder's tokenizer.

The tiny engine and a real vLLM pass it.
"""

from __future__ import annotations

import abc
import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from replaybuf.errors import EngineFault, Invalid
from replaybuf.generator.engines import Sampling, VllmEngine
from replaybuf.generator.preflight import check_tokenizer
from replaybuf.generator.stage.logprobs import EngineStage, LogprobOptions, open_stages
from replaybuf.generator.stage.stages import Rollout
from replaybuf.wire.group import Float32s, Int32s
from replaybuf.wire.text.model_tokenizer import Tokenizer
from replaybuf_trainer.models.logprobs import PackedLogprobs
from tests.generator.doubles import make_prompt
from tests.waiting import patience

BOUND = 1e-3
"""In nats, between float32 here and float32 there; the weights of another version differ by more."""
TIMEOUT_S = 120.0


class ModelContract(abc.ABC):
    """Logprobs of given tokens are those of the model that is served; its tokenizer is that of the folder."""

    url: str
    folder: Path
    """The model that is served: a causal language model of transformers."""
    other: Path
    """One with the same shape and other weights."""
    vocab_size = 98

    def test_logprobs_equal_those_of_torch_and_differ_for_other_weights(self) -> None:
        """For lengths from one token to the whole context, prompts that are shared, and again from a warm cache."""

        async def main(stage: EngineStage) -> None:
            random = np.random.default_rng(0)
            shared = self.ids(random, 120)
            longest = stage.max_tokens or 0
            lengths = ((1, 1), (5, 40), (100, longest - 100))
            rollouts = [rollout_of(self.ids(random, sum(both)), both[0]) for both in lengths]
            rollouts += [rollout_of(np.concatenate([shared, self.ids(random, 30)]), 120) for _ in range(4)]
            expected = PackedLogprobs(self.folder).logprobs(rollouts)
            for _ in range(2):
                by_rollout = (await stage.compute(rollouts)).values
                assert [len(values) for values in by_rollout] == [len(rollout.completion_ids) for rollout in rollouts]
                assert largest_difference(by_rollout, expected) < BOUND
            assert largest_difference(by_rollout, PackedLogprobs(self.other).logprobs(rollouts)) > 10 * BOUND

        self.run(main)

    def test_logprobs_of_sampled_tokens_equal_those_at_sampling(self) -> None:
        """So reference and inference logprobs can be compared, with any other request parameters."""

        async def main(stage: EngineStage) -> None:
            prompt = self.ids(np.random.default_rng(1), 40)
            engine = VllmEngine(self.url, timeout_s=TIMEOUT_S)
            generation = await engine.generate(prompt, Sampling(n=4, max_tokens=30))
            await engine.aclose()
            rollouts = [
                rollout_of(np.concatenate([prompt, np.array(ids, np.int32)]), 40) for ids in generation.completions
            ]
            logprobs = (await stage.compute(rollouts)).values
            sampled = np.split(generation.inference_logprobs, np.cumsum(generation.completion_lengths)[:-1])
            assert largest_difference(logprobs, sampled) < BOUND

        self.run(main)

    def test_a_rollout_that_is_too_long_is_rejected_and_the_next_is_computed(self) -> None:
        """vLLM generates a token behind it, whether anybody wants it or not, and needs room for it."""

        async def main(stage: EngineStage) -> None:
            longest = stage.max_tokens or 0
            with pytest.raises(EngineFault) as caught:
                await stage.compute([rollout_of(self.ids(np.random.default_rng(2), longest + 1), 100)])
            assert type(caught.value) is EngineFault and caught.value.reason == "engine_refused"
            (values,) = (await stage.compute([rollout_of(self.ids(np.random.default_rng(2), longest), 100)])).values
            assert len(values) == longest - 100

        self.run(main)

    def test_the_error_for_a_different_tokenizer_names_its_folder(self, tmp_path: Path) -> None:
        """One of the same size, in which two letters changed places."""
        own, swapped = Tokenizer(self.folder), tmp_path / "swapped"
        shutil.copytree(self.folder, swapped, ignore=shutil.ignore_patterns("*.safetensors"))
        described = json.loads((swapped / "tokenizer.json").read_text())
        letters = described["model"]["vocab"]
        letters["a"], letters["b"] = letters["b"], letters["a"]
        (swapped / "tokenizer.json").write_text(json.dumps(described))
        prompts = [make_prompt("cdcd"), make_prompt("dab")]

        async def main() -> None:
            server = VllmEngine(self.url, timeout_s=TIMEOUT_S)
            await server.prepare()
            await check_tokenizer([server], own, prompts)
            with pytest.raises(
                Invalid, match=rf"{swapped} is not the tokenizer of model 'policy' at {self.url}: .* at token 5"
            ):
                await check_tokenizer([server], Tokenizer(swapped), prompts)
            await server.aclose()

        asyncio.run(main())

    def ids(self, random: np.random.Generator, tokens: int) -> Int32s:
        """Draw ordinary token ids, int32 [tokens]."""
        return random.integers(3, self.vocab_size, tokens, np.int32)

    def run(self, main: Callable[[EngineStage], Awaitable[None]]) -> None:
        """Run a test on a stage that asks the server."""

        async def opened() -> None:
            async with AsyncExitStack() as stack, asyncio.timeout(TIMEOUT_S * patience()):
                options = LogprobOptions(ref_engine=self.url)
                (stage,) = await open_stages(options, stack, policy=(), timeout_s=TIMEOUT_S, start_timeout_s=TIMEOUT_S)
                assert isinstance(stage, EngineStage)
                await main(stage)

        asyncio.run(opened())


def rollout_of(ids: Int32s, prompt_tokens: int) -> Rollout:
    """Split token ids; all of the completion is sampled."""
    return Rollout(ids[:prompt_tokens], ids[prompt_tokens:], np.ones(len(ids) - prompt_tokens, np.bool_))


def largest_difference(computed: Sequence[Float32s], expected: Sequence[Float32s]) -> float:
    """Return the largest difference of any token, in nats."""
    return max(float(np.abs(left - other).max()) for left, other in zip(computed, expected, strict=True))

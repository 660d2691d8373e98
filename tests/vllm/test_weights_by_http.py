"""A vLLM that shares no folder with the trainer: its helper downloads the weights and stands in for it in the calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from replaybuf.generator.engines import Sample, Sampling, VllmEngine
from tests.trainer.publishers.test_http import CopiedWeights, publishing
from tests.trainer.served import confirmed
from tests.trainer.weight_download.helper_process import helper_process
from tests.trainer.whole_run import BOUND, FAR, largest_error, oracle_of

PROMPT = np.array([70, 88, 79, 79, 68, 33], np.int32)
TIMEOUT_S = 120.0


def sample(url: str) -> Sample:
    """Sample one completion."""

    async def main() -> Sample:
        engine = VllmEngine(url, timeout_s=TIMEOUT_S)
        try:
            await engine.prepare()
            return await engine.generate(PROMPT, Sampling(n=1, max_tokens=30))
        finally:
            await engine.aclose()

    return asyncio.run(main())


def test_vllm_samples_with_weights_that_its_helper_downloaded(vllm: str, versions: list[Path], tmp_path: Path) -> None:
    """The publisher pauses, reloads and labels through the helper; the copy is not where the trainer wrote."""
    logprobs = oracle_of(versions)
    with (
        helper_process(tmp_path / "local", vllm, token="secret") as helper,
        publishing(tmp_path / "weights", helper.url, token="secret") as publisher,
    ):
        for version in (3, 1):
            publisher.prepare(version, CopiedWeights(versions[version]))
            publisher.commit(version, confirmed)
            made = sample(vllm)
            rollout = {"prompt_ids": PROMPT.tolist(), "completion_ids": made.completions[0].tolist()}
            assert largest_error(made.inference_logprobs.tolist(), logprobs(rollout, version)) < BOUND
            assert largest_error(made.inference_logprobs.tolist(), logprobs(rollout, version + 1)) > FAR * BOUND
            assert made.version_spans[:, 1].tolist() == [version]

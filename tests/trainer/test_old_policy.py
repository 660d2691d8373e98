"""A run whose weights change under the stage of old-policy logprobs, on the tiny engine."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import RunClient
from tests.trainer.served import served
from tests.trainer.whole_run import VERSIONS, check_old_logprobs, generated, oracle_of, write_version


def test_stored_old_logprobs_match_only_the_recorded_version(run: RunClient, tmp_path: Path) -> None:
    """Of rollouts that are cut off and continued by new weights, in micro-batches that cut groups in two.

    By two engines that are loaded one after the other, the one that samples first.
    """
    versions = [write_version(tmp_path, version) for version in range(VERSIONS)]
    with served(versions[0]) as sampler, served(versions[0]) as other:
        urls = (sampler.url, other.url)
        options = {"old-engine": ",".join(urls), "logprob-options": '{"old": {"micro_batch": 3}}'}
        groups = generated(
            tmp_path,
            run,
            sampler.url,
            versions,
            "abort-and-resume",
            urls,
            sampling=lambda: sampler.worker.rows_running,
            **options,
        )
    assert any(len(rollout["version_spans"]) > 1 for group in groups for rollout in group["rollouts"])
    check_old_logprobs(groups, oracle_of(versions))
    engines = {tuple(group["metadata"]["old_logprobs"]["engines"]) for group in groups}
    assert engines == {urls}

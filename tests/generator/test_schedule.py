"""Evaluation of held-out prompts beside generating, once in a number of versions."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from replaybuf.errors import Invalid, ServiceUnavailable
from replaybuf.generator.environments import Score
from replaybuf.generator.environments.scoring import Scorer
from replaybuf.generator.evaluation import HeldOut, Schedule
from replaybuf.generator.metrics import exposition
from replaybuf.generator.preflight import warn_of_overlap
from tests.generator.doubles import (
    TIMEOUT_S,
    Broken,
    EngineDouble,
    ServiceDouble,
    Spelling,
    make_prompt,
    make_tokenizer,
)
from tests.generator.worlds import World, started
from tests.waiting import until

HELD_OUT = ("xyz", "zz", "yx")


@contextlib.asynccontextmanager
async def evaluating(
    folder: Path,
    engine: EngineDouble,
    service: ServiceDouble,
    *,
    every: int = 10,
    texts: Sequence[str] = HELD_OUT,
    judge: Any = None,
) -> AsyncIterator[World]:
    """Generate with the tickets that `service.open` allows, and evaluate."""
    held_out = HeldOut(
        name="words",
        prompts=[make_prompt(text) for text in texts],
        scorer=Scorer(judge or Spelling(), timeout_s=TIMEOUT_S),
        tokenizer=make_tokenizer(folder),
        max_tokens=8,
    )
    schedule = Schedule(held_out, every, producer="me")
    async with started(folder, engine, service, followers=[schedule], report_every_s=0.01) as w:
        yield w


async def publish(engine: EngineDouble, service: ServiceDouble, version: int) -> None:
    """Load a version, publish it and let one group be generated with it."""
    engine.version = version
    await service.change(published=version, open=1)


async def test_it_evaluates_at_the_start_and_once_per_turn_of_versions(tmp_path: Path) -> None:
    engine, service = EngineDouble(), ServiceDouble()
    service.open = 1
    async with evaluating(tmp_path, engine, service) as w:
        await service.until(lambda: len(service.evaluations) == 1)
        for version in (4, 9, 11, 17, 20):
            await publish(engine, service, version)
            await service.until(lambda: version in {group.policy_version for group in service.groups})  # noqa: B023
            await service.until(lambda: len(service.evaluations) == 1 + version // 10)  # noqa: B023
        assert [evaluation["version"] for evaluation in service.evaluations] == [0, 11, 20]
        first = service.evaluations[0]
        assert (first["name"], first["reward_mean"], first["rollouts"], first["samples"]) == ("words", 1.0, 3, 1)
        assert (first["temperature"], first["producer"], first["adapter"]) == (0.0, "me", "")
        reported = {
            family.name: family.samples[0].value
            for family in text_string_to_metric_families(exposition("r", w.daemon).decode())
            if family.name.startswith("replaybuf_generator_evaluation_")
        }
        assert reported["replaybuf_generator_evaluation_reward_mean"] == 1.0
        assert reported["replaybuf_generator_evaluation_version"] == 20
    trained = {group.prompt_id for group in service.groups}
    assert trained.isdisjoint(HELD_OUT) and len(service.groups) == 6
    assert {(request["n"], request["temperature"]) for request in engine.requests} == {(4, 1.0), (1, 0.0)}


async def test_a_turn_with_a_recorded_result_is_not_evaluated_again(tmp_path: Path) -> None:
    engine, service = EngineDouble(version=12), ServiceDouble()
    service.open, service.published = 1, 12
    recorded = {"name": "words", "version": 10, "versions": [10], "reward_mean": 1.0, "rollouts": 3}
    service.evaluations = [recorded | {"at_s": 0.0, "generation": 0}]
    async with evaluating(tmp_path, engine, service):
        await service.until(lambda: len(service.groups) == 1)
        await publish(engine, service, 20)
        await service.until(lambda: len(service.evaluations) == 2)
        assert service.evaluations[-1]["version"] == 20


async def test_a_failed_evaluation_is_counted_and_the_generator_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(prompt: object, text: str) -> Score:
        raise ValueError("no judge")

    engine, service = EngineDouble(), ServiceDouble()
    service.open = 1
    async with evaluating(tmp_path, engine, service, judge=Broken(broken)) as w:
        await until(lambda: w.daemon.progress.evaluations_failed == 1)
        await publish(engine, service, 10)
        await until(lambda: w.daemon.progress.evaluations_failed == 2)
    assert len(service.groups) == 2
    assert service.evaluations == []
    assert "evaluation words failed" in caplog.text and "no judge" in caplog.text


async def test_a_result_is_recorded_once_the_service_is_back(tmp_path: Path) -> None:
    engine, service = EngineDouble(), ServiceDouble()
    service.open = 1
    away = ServiceUnavailable("restarting", retry_after_s=0.0)
    service.faults["evaluation"] = deque([away, away])
    async with evaluating(tmp_path, engine, service):
        await service.until(lambda: len(service.evaluations) == 1)


async def test_a_refused_result_is_logged_and_the_generator_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a rewind that took the version back while it was evaluated."""
    engine, service = EngineDouble(), ServiceDouble()
    service.open = 1
    service.faults["evaluation"] = deque([Invalid("version is 0; it was taken back", name="version")])
    async with evaluating(tmp_path, engine, service):
        await service.until(lambda: not service.faults["evaluation"])
        await publish(engine, service, 10)
        await service.until(lambda: len(service.evaluations) == 1)
    assert "the service does not record evaluation words: version is 0; it was taken back" in caplog.text


def test_held_out_prompts_that_are_training_prompts_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_overlap([make_prompt("ab"), make_prompt("cd")], [make_prompt("cd"), make_prompt("ef")])
        assert "also used for training: 1 held-out prompt;" in caplog.text
        caplog.clear()
        warn_of_overlap([make_prompt("ab")], [make_prompt("cd")])
        assert caplog.text == ""

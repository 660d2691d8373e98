"""A run whose only engine restarts while the trainer waits for a batch: each needs the other to continue."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replaybuf.client.client import AsyncClient, Client
from replaybuf.generator.daemon import Daemon
from replaybuf.generator.daemon_options import DaemonOptions
from replaybuf.generator.engines import Sampling, VllmEngine
from replaybuf.generator.environments import ExactMatch
from replaybuf.generator.environments.scoring import Scorer
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.prompts import Prompts
from replaybuf.wire.group import group_to_json
from replaybuf.wire.text.model_tokenizer import Tokenizer
from replaybuf_trainer.feeds.service import ServiceFeed
from replaybuf_trainer.option_groups import ReaderOptions
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.trainer import Trainer
from tests.conftest import RunClient
from tests.generator.doubles import make_prompt
from tests.trainer.batches import group_of, rollouts
from tests.trainer.served import served
from tests.waiting import eventually, patience

TIMEOUT_S = 60.0
STEPS, BEFORE = 4, 2
"""Number of steps of the run, and of steps before the restart of the engine."""
OPTIONS: dict[str, dict[str, Any]] = {"reload": {}, "nccl": {"backend": "gloo"}}
"""Publishers and their options."""


@contextlib.contextmanager
def training(
    run: RunClient, engine: str, folder: Path, model: Path, held: threading.Event, publisher: str
) -> Iterator[Trainer]:
    """Train beside the block, to the end of the run. An engine is loaded again only once `held` is set."""

    class Held(ServiceFeed):
        def confirm(self) -> None:
            assert threading.current_thread().name != "engine-watch" or held.wait(TIMEOUT_S)
            super().confirm()

    options = TrainOptions(
        url=str(run.http.base_url),
        run=run.run,
        model=model,
        engines=(engine,),
        publisher=publisher,
        publisher_options=OPTIONS[publisher],
        checkpoint_dir=folder / "checkpoints",
        weights_dir=folder / "weights",
        metrics_file=folder / "train.jsonl",
        reader_options=ReaderOptions(poll_s=0.05),
    )
    with Client(options.url, options.run) as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
        trainer = Trainer(options, Held(options, client))
        steps = threads.submit(trainer.train)
        try:
            yield trainer
            assert steps.result(TIMEOUT_S * patience()) == STEPS
        finally:
            trainer.stop()


async def generate(run: RunClient, engine: str, model: Path, held: threading.Event) -> str | None:
    """Generate to the end of the run; return what was waited for when the engine was found out."""
    tokenizer = Tokenizer(model)
    prompts = [make_prompt(word, answer=word[::-1]) for word in ("abc", "abd", "bcd")]
    async with AsyncClient(str(run.http.base_url), run.run) as client, asyncio.timeout(TIMEOUT_S * patience()):
        fleet = Fleet([VllmEngine(engine, timeout_s=TIMEOUT_S)])
        await fleet.prepare(TIMEOUT_S)
        scorer = Scorer(ExactMatch(), timeout_s=TIMEOUT_S)
        options = DaemonOptions(producer="me", sampling=Sampling(n=4, max_tokens=8), poll_wait_ms=100)
        daemon = Daemon(client, fleet, scorer, Prompts(prompts, shuffle=False), tokenizer, options)
        stop = asyncio.Event()
        running = asyncio.create_task(daemon.run(stop))
        while fleet.waiting is None:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.01)
        waiting = daemon.waiting
        held.set()
        await running
        await fleet.aclose()
        return waiting


@pytest.mark.parametrize("publisher", OPTIONS)
def test_a_run_continues_after_a_restart_of_its_only_engine(
    run: RunClient, tmp_path: Path, models: Path, caplog: pytest.LogCaptureFixture, publisher: str
) -> None:
    """Generator and trainer report the reason, and no token of other weights is stored."""
    run.put(batch={"groups_per_batch": 1, "seq_len": 64}, max_steps=STEPS)
    for number in range(BEFORE):
        group = group_of(rollouts(4, seed=number), group_id=f"g{number}", prompt_id=f"p{number}")
        assert run.append(msgspec.to_builtins(group_to_json(group)))[0]["status"] == "stored"
    held = threading.Event()
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        engine = first.enter_context(served(models / "a"))
        with training(run, engine.url, tmp_path, models / "a", held, publisher):
            eventually(lambda: run.state()["published_version"], TIMEOUT_S, lambda version: version == BEFORE)
            first.close()
            anew = second.enter_context(served(models / "a", engine.port))
            assert anew.version() == "0"
            assert asyncio.run(generate(run, anew.url, models / "a", held)) == "engine_stale"
    assert run.state()["state"] == "finished"
    groups = run.get("groups").json()["groups"]
    oldest = [group["policy_version"] for group in groups if not group["group_id"].startswith("g")]
    assert len(oldest) >= STEPS - BEFORE and min(oldest) == BEFORE
    assert f"engine {engine.url} lacks version {BEFORE}, loading it again" in caplog.text
    assert json.loads((tmp_path / "train.jsonl").read_text().splitlines()[-1])["engine_reloads"] == 1

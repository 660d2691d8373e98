"""Compare a step of the demo with the same training joined by a folder of files.

    python benchmarks/file_queue.py --steps 60

First `replaybuf demo` trains for some steps. Then the same model, engine, prompts, scoring, advantages, packing and
trainer code run with the same seed and batch, but without service, Redis and client. A producer writes the batch of
step s into a folder once version s-1 is published (one step off-policy), and the trainer reads it. Both are compared
by the time between steps. The reference has no durability, tickets, staleness checks, ledger, resume, console or
accuracy measurements, so the ratio is an upper bound of the cost of the service.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from measured import Measured
from one_rank import one_rank_body

from replaybuf.client.client import Client
from replaybuf.errors import RunFinished
from replaybuf.generator.engines import Sampling, VllmEngine
from replaybuf.generator.environments import load_environment
from replaybuf.generator.environments.scoring import Scorer
from replaybuf.generator.group_maker import new_group
from replaybuf.generator.prompts import Prompts
from replaybuf.generator.prompts.sources import read_prompts
from replaybuf.lab.demo import run_file
from replaybuf.lab.demo.command import PROGRAM
from replaybuf.lab.demo.folder import Folder
from replaybuf.launch.plan import QUIET
from replaybuf.launch.progress import LineReader, TrainerLine
from replaybuf.launch.supervisor import Program, Stop, Supervisor
from replaybuf.wire.answer.run_status import RunFacts
from replaybuf.wire.contract import Amount, Attachment, Ticket, WaitingAnswer
from replaybuf.wire.group import Group
from replaybuf.wire.text.model_tokenizer import Tokenizer

WARM_UP_STEPS = 5
"""First steps, which are not counted: processes start and caches fill."""
POLL_S = 0.002
DEMO_TIMEOUT_S = 1800.0
START_TIMEOUT_S = 60.0
MAX_STALENESS = 1
"""As in the demo."""
TARGET = 1.3
QUEUE = "file queue"
NO_BATCH = WaitingAnswer(
    reason="no_groups",
    have=Amount(0, 0),
    need=Amount(run_file.GROUPS_PER_BATCH, 0),
    blocked_on="producers",
    retry_after_s=POLL_S,
)


def main() -> None:
    """Compare, or run one part of the file queue."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=("produce", "train"), help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part == "produce":
        asyncio.run(produce(Folder(arguments.root), arguments.engine, arguments.steps, arguments.seed))
    elif arguments.part == "train":
        train(Folder(arguments.root), arguments.engine, arguments.steps, arguments.seed)
    else:
        compare(arguments.steps, arguments.seed)


def compare(steps: int, seed: int) -> None:
    """Run both; print the time per step of each and the ratio of their medians."""
    with tempfile.TemporaryDirectory() as scratch:
        demo, queue = Folder(Path(scratch) / "demo"), Folder(Path(scratch) / "queue")
        options = ["--data-dir", str(demo.root), "--steps", str(steps), "--seed", str(seed)]
        subprocess.run([*PROGRAM, "demo", *options], check=True, timeout=DEMO_TIMEOUT_S)
        queue.create()
        queue.model.symlink_to(demo.model)
        asyncio.run(run_queue(queue, steps, seed))
        with_buffer, without = step_seconds(demo), step_seconds(queue)
    results = Measured("file_queue", reference=QUEUE, packages=["torch"], settings={"steps": steps, "seed": seed})
    results.record(
        f"a step; at most {TARGET} is wanted", {"demo, through the buffer": with_buffer, QUEUE: without}, unit="s"
    )
    results.save()


def step_seconds(folder: Folder) -> list[float]:
    """Read the seconds between the trainer's steps, without the first ones."""
    times = [line.time for line in LineReader(folder.train_metrics, TrainerLine).new_lines()]
    return np.diff(times[WARM_UP_STEPS:]).tolist()


async def run_queue(folder: Folder, steps: int, seed: int) -> None:
    """Run engine, producer and trainer to the last step. Raises `SystemExit` if one of them dies."""
    async with Supervisor(folder.logs) as supervisor:

        async def whole() -> None:
            options = ["--model", str(folder.model), "--port", "0", "--threads", "1"]
            environment = {**QUIET, **run_file.CHILD_ENVIRONMENT}
            command = [*PROGRAM, "engine", *options]
            engine = supervisor.start(Program(name="engine", command=command, environment=environment))
            url = await supervisor.listening(engine, START_TIMEOUT_S)
            common = ["--root", str(folder.root), "--engine", url, "--steps", str(steps), "--seed", str(seed)]
            for part in ("produce", "train"):
                command = [sys.executable, __file__, "--part", part, *common]
                program = Program(name=part, command=command, environment=environment, may_finish=True)
                child = supervisor.start(program)
            await supervisor.finished(child)

        stop = await supervisor.supervise(whole())
    if isinstance(stop, Stop):
        raise SystemExit("\n".join([stop.reason, *stop.log_lines]))


async def produce(folder: Folder, engine_url: str, steps: int, seed: int) -> None:
    """Generate the groups of every step and write them into the folder, one step ahead of the trainer."""
    tokenizer = Tokenizer(folder.model)
    prompts = Prompts(read_prompts(folder.prompts, tokenizer), seed=seed)
    scorer = Scorer(load_environment(run_file.ENVIRONMENT), timeout_s=30.0)
    engine = VllmEngine(engine_url, timeout_s=60.0)
    await engine.prepare()
    sampling = Sampling(n=run_file.GROUP_SIZE, max_tokens=run_file.MAX_NEW_TOKENS)

    async def generate(index: int) -> Group:
        prompt = prompts.at(index)
        sample = await engine.generate(prompt.token_ids, sampling)
        scores = await scorer.score(prompt, tokenizer.decode(sample.completions))
        ticket = Ticket(ticket="", prompt_index=index)
        return new_group(ticket, prompt, sample, scores, temperature=1.0, advantage="grpo", metadata={})

    for step in range(steps):
        while published(folder) < step - MAX_STALENESS:  # noqa: ASYNC110 - another process publishes
            await asyncio.sleep(POLL_S)
        first = step * run_file.GROUPS_PER_BATCH
        groups = await asyncio.gather(*(generate(first + n) for n in range(run_file.GROUPS_PER_BATCH)))
        put(batch_file(folder, step), bytes(one_rank_body(groups, step, run_file.SEQ_LEN)))
    await engine.aclose()


class FileQueue:
    """The part of a client that the reference trainer uses, backed by a folder; also the state of its run.

    `step`: the first; the trainer reads it when it attaches.
    """

    step = 0

    def __init__(self, folder: Folder, steps: int) -> None:
        self._folder = folder
        self._steps = steps

    def get_run(self) -> Self:
        """Return what has the facts that the trainer reads."""
        return self

    def facts(self) -> RunFacts:
        """Return the facts of a run without options."""
        return RunFacts()

    def attach(self, **_: Any) -> Attachment:
        """Accept any trainer."""
        return Attachment(epoch=1, step=0)

    def fetch_batch(self, step: int, epoch: int, dp_rank: int = 0, wait_ms: int = 0) -> bytes | WaitingAnswer:
        """Return the batch of a step from the folder; wait up to `wait_ms` for it."""
        if step >= self._steps:
            raise RunFinished("all steps are trained")
        path, deadline = batch_file(self._folder, step), time.monotonic() + wait_ms / 1000
        while not path.exists():
            if time.monotonic() >= deadline:
                return NO_BATCH
            time.sleep(POLL_S)
        return path.read_bytes()

    def ack(self, step: int, epoch: int, feedback: dict[str, Any] | None = None, metrics: Any = None) -> None:
        """Delete the batch of a trained step."""
        batch_file(self._folder, step).unlink()

    def publish_policy(self, version: int, epoch: int, weights_uri: str | None = None, adapter: str = "") -> None:
        """Record the version that the engine has loaded."""
        put(self._folder.root / "version", str(version).encode())

    def checkpoint(self, step: int, epoch: int, keep: int | None = None) -> None:
        """Do nothing."""


def train(folder: Folder, engine_url: str, steps: int, seed: int) -> None:
    """Run the reference trainer over the file queue."""
    import torch

    from replaybuf_trainer.feeds.service import ServiceFeed
    from replaybuf_trainer.option_groups import ReaderOptions
    from replaybuf_trainer.options import TrainOptions
    from replaybuf_trainer.trainer import Trainer

    torch.set_num_threads(1)
    options = TrainOptions(
        url="",
        run="queue",
        model=folder.model,
        engines=(engine_url,),
        checkpoint_dir=folder.checkpoints,
        weights_dir=folder.weights,
        reader_options=ReaderOptions(wait_ms=run_file.LONG_POLL_MS),
        learning_rate=run_file.LEARNING_RATE,
        metrics_file=folder.train_metrics,
        seed=seed,
    )
    # The trainer asks for no more of its client than FileQueue has.
    Trainer(options, ServiceFeed(options, cast(Client, FileQueue(folder, steps)))).train()


def batch_file(folder: Folder, step: int) -> Path:
    """Return the path of a step's batch."""
    return folder.root / f"batch-{step}.safetensors"


def published(folder: Folder) -> int:
    """Read the newest version that the engine has loaded."""
    path = folder.root / "version"
    return int(path.read_text()) if path.exists() else 0


def put(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    scratch = path.with_suffix(".part")
    scratch.write_bytes(content)
    scratch.rename(path)


if __name__ == "__main__":
    main()

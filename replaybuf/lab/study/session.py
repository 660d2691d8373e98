"""Running of a study: the shared warm start, the trainings one after the other, and one engine that scores them.

::

    warm start ─► training 1 ─► ... ─► training n ─► engine ─► scores of the model and of all checkpoints
     (once)        each a session of `replaybuf up`              (what has no score yet)

What is finished is not run again: the model, each training with its costs, each scored checkpoint.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console

from replaybuf.errors import Invalid, ServiceUnavailable, counted
from replaybuf.files import STATE_BYTES, read_bounded, write_whole
from replaybuf.generator.checkpoint_scores import (
    SCORES_FILE,
    Checkpoint,
    ScoreFile,
    open_checkpoints,
    score_checkpoints,
    setting_of,
)
from replaybuf.generator.engines import VllmEngine
from replaybuf.generator.evaluation import HeldOut, open_held_out
from replaybuf.lab.demo.accuracy import ENGINE_TIMEOUT_S, SCORE_TIMEOUT_S
from replaybuf.lab.demo.run_file import CHILD_ENVIRONMENT, MAX_NEW_TOKENS, read_plan, warm_start_program
from replaybuf.lab.study.plan import StudyPlan, Training
from replaybuf.launch.plan import QUIET
from replaybuf.launch.progress import GeneratorLine, LineReader, Progress
from replaybuf.launch.session import Session
from replaybuf.launch.supervisor import Program, Stop, Supervisor
from replaybuf.launch.view import View
from replaybuf.wire.model.checkpoints import TrainerState
from replaybuf.wire.text.model_tokenizer import Tokenizer

ENGINE_START_S = 300.0
WARM_START_S = 1800.0
GRACE_S = 2.0
BEFORE = "before training"
"""Name of the score that the model has before any training."""


class Costs(msgspec.Struct, frozen=True):
    """What a training had cost when each step was done; lists by step, the first at step 0.

    `wall_s`: seconds of the trainer's steps, waits included, without pauses between two sessions; `tokens`: completion
    tokens that the generator had sampled; `groups`: groups stored in all; `staleness`: mean over the steps of the mean
    staleness of their rollouts. None = not known.
    """

    step: list[int]
    wall_s: list[float]
    tokens: list[float]
    groups: int | None
    staleness: float | None = None


async def run_study(plan: StudyPlan, console: Console, lock: int, program: Sequence[str]) -> Stop | None:
    """Run what is missing of a study; return what stopped it early.

    `program`: words that run a command of replaybuf. Raises `ServiceUnavailable` for a training above its time, and
    what a session raises.
    """
    if plan.needs_warm_start:
        file = plan.file
        warm_up = warm_start_program(program, plan.model, file.warm_start_seed, file.target_accuracy, file.task)

        async def warm_start(supervisor: Supervisor) -> None:
            child = supervisor.start(warm_up)
            try:
                async with asyncio.timeout(WARM_START_S):
                    await supervisor.finished(child)
            except TimeoutError:
                detail = f"the warm start is not done after {WARM_START_S:g} s; its log: {child.log}"
                raise ServiceUnavailable(detail, name="warm start", bound=WARM_START_S) from None

        if stop := await _supervised(plan, console, lock, "warm start of the shared model", warm_start):
            return stop
    for number, training in enumerate(plan.trainings, 1):
        if training.costs.is_file():
            continue
        with View(console) as view:
            view.event(f"training {number} of {len(plan.trainings)}: {training.name}")
            if stop := await _train(training, plan, view, lock, program):
                return stop
    return await _score_all(plan, console, lock, program)


async def _train(training: Training, plan: StudyPlan, view: View, lock: int, program: Sequence[str]) -> Stop | None:
    """Run one training to its end, and write its costs."""
    folder = training.folder
    folder.create()
    folder.run_file.write_text(training.text)
    launch, _ = read_plan(folder, None, program)
    session = Session(launch, view, lock=lock)
    try:
        async with asyncio.timeout(plan.file.limit_s):
            stop = await session.run()
    except TimeoutError:
        done, limit_s = session.progress.done_steps, plan.file.limit_s
        detail = f"training {training.name} has done {counted(done, 'step')} after {limit_s:g} s, its limit_s"
        raise ServiceUnavailable(
            f"{detail}; the same command goes on at its checkpoint", name="limit_s", value=done, bound=limit_s
        ) from None
    if stop is None:
        costs = costs_of(session.progress, LineReader(folder.generator_metrics, GeneratorLine).new_lines())
        write_whole(training.costs, msgspec.json.encode(costs) + b"\n")
    return stop


def costs_of(progress: Progress, generated: Sequence[GeneratorLine]) -> Costs:
    """Add up the costs of a finished training. Raises `Invalid` where trainer or generator wrote no figures."""
    lines = progress.lines
    if not lines or not generated:
        who = "generator" if lines else "trainer"
        raise Invalid(f"the {who} wrote no metrics, so the costs are not known", name=who, value=0, bound=1)
    seconds = np.cumsum([line.wait_s + line.train_s + line.publish_s for line in lines])
    tokens = generated_until(np.array([line.time for line in lines]), generated)
    return Costs(
        step=[0, *(line.step + 1 for line in lines)],
        wall_s=[0.0, *(round(value, 3) for value in seconds.tolist())],
        tokens=[0.0, *(round(value) for value in tokens.tolist())],
        groups=progress.state.get("groups", {}).get("stored"),
        staleness=round(float(np.mean([line.staleness_mean for line in lines])), 3),
    )


def generated_until(times: npt.NDArray[np.float64], generated: Sequence[GeneratorLine]) -> npt.NDArray[np.float64]:
    """Return the tokens generated until each of these times, between lines by interpolation."""
    counts = np.array([line.generated_tokens for line in generated], np.float64)
    # A restarted generator counts from 0: its first line is what it has generated since.
    grown = np.where(np.diff(counts) >= 0, np.diff(counts), counts[1:])
    totals = np.concatenate([counts[:1], counts[0] + np.cumsum(grown)])
    at_times: npt.NDArray[np.float64] = np.interp(times, [line.time for line in generated], totals)
    return at_times


async def _score_all(plan: StudyPlan, console: Console, lock: int, program: Sequence[str]) -> Stop | None:
    held_out = open_problems(plan)
    setting = setting_of(held_out, plan.file.environment, 1)
    work = [([model_before(plan)], ScoreFile(plan.data_dir / SCORES_FILE))]
    for training in plan.trainings:
        work.append((open_checkpoints(training.folder.checkpoints, plan.model), ScoreFile(training.scores)))
    missing = [
        ([checkpoint for checkpoint in checkpoints if scores.find(checkpoint, setting) is None], scores)
        for checkpoints, scores in work
    ]
    if not (count := sum(len(checkpoints) for checkpoints, _ in missing)):
        return None
    engine = Program(
        name="engine",
        command=[*program, "engine", "--model", str(plan.model), "--port", "0"],
        environment={**QUIET, **CHILD_ENVIRONMENT},
    )

    async def score(supervisor: Supervisor) -> None:
        url = await supervisor.listening(supervisor.start(engine), ENGINE_START_S)
        async with aclosing(VllmEngine(url, timeout_s=ENGINE_TIMEOUT_S)) as client:
            await client.prepare()
            for checkpoints, scores in missing:
                await score_checkpoints(checkpoints, held_out, client, scores, setting=setting, producer="study")

    return await _supervised(plan, console, lock, f"scoring {counted(count, 'checkpoint')} by one engine", score)


def open_problems(plan: StudyPlan) -> HeldOut:
    """Open the held-out problems with the sampling of the study. Raises as `open_held_out`."""
    return open_held_out(
        str(plan.held_out),
        plan.file.environment,
        Tokenizer(plan.model),
        max_turns=1,
        reward_timeout_s=SCORE_TIMEOUT_S,
        max_tokens=MAX_NEW_TOKENS,
        temperature=1.0,
        samples=plan.file.samples,
        name="held-out",
    )


def model_before(plan: StudyPlan) -> Checkpoint:
    """Return the shared model as a checkpoint of step 0."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(plan.model.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return Checkpoint(BEFORE, plan.model, TrainerState(run=BEFORE, step=0, version=0), digest.hexdigest())


def read_costs(training: Training) -> Costs:
    """Read the costs of a finished training. Raises `Invalid` for a broken file."""
    try:
        return msgspec.json.decode(read_bounded(training.costs, STATE_BYTES), type=Costs)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        detail = f"{training.costs} is broken: {error}; delete {training.folder.root} to train again"
        raise Invalid(detail, name="costs", value=str(training.costs)) from error


async def _supervised(
    plan: StudyPlan, console: Console, lock: int, what: str, script: Callable[[Supervisor], Awaitable[None]]
) -> Stop | None:
    """Run a script with processes of its own; all of them have ended when this returns."""
    with View(console) as view:
        view.event(what)
        async with Supervisor(
            plan.data_dir / "logs", keep_open=[lock], grace_s=GRACE_S, report=view.event
        ) as supervisor:

            async def run() -> None:
                await script(supervisor)

            return await supervisor.supervise(run())

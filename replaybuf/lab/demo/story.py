"""What the demo does, from the warm start to the last evaluation.

::

    init-model ─► serve, engine ─► PUT run ─► accuracy before ─► generate, train ─► accuracy after
    (new only)                                                    accuracy during, every `EXAM_SHARES` of the steps

The demo trains nothing itself: it starts the processes, asks the service for the run's state, reads the metrics files
and asks the engine the held-out problems.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec

from replaybuf.client.client import AsyncClient
from replaybuf.lab.demo.exam import Exam
from replaybuf.lab.demo.folder import Folder, Request
from replaybuf.lab.demo.processes import look
from replaybuf.lab.demo.progress import (
    KILLED,
    SESSION_EVERY_S,
    Evaluation,
    GeneratorLine,
    LineReader,
    Progress,
    Session,
    TrainerLine,
    append_line,
)
from replaybuf.lab.demo.supervisor import Child, Stop, Supervisor
from replaybuf.lab.demo.view import TRAINING, View, percent
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec, TicketSpec

PROGRAM = (sys.executable, "-m", "replaybuf")
RUN = "demo"
TASK = "spell_backward"
ENVIRONMENT = "reasoning-gym"
TARGET_ACCURACY = 0.25
GROUP_SIZE = 8
GROUPS_PER_BATCH = 32
SEQ_LEN = 128
MAX_NEW_TOKENS = 8
MAX_STALENESS = 1
LEARNING_RATE = 1e-4
LONG_POLL_MS = 1000
"""The service holds the trainer's question for a batch so long: steps here are shorter than the pause of a poll."""
REPORT_EVERY_S = 2.0
SAMPLES = 4
"""Completions per held-out problem at temperature 1."""
EXAM_SHARES = (0.2, 0.4, 0.6, 0.8)
"""Shares of the steps at which the accuracy is measured while the training goes on."""

LISTEN_TIMEOUT_S = 60.0
HTTP_TIMEOUT_S = 10.0
POLL_S = 1.0

CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # each process has one core's worth of work; more threads only get in each other's way
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
    # Buffers of some MB are used again instead of being given back to the system and asked for anew each time.
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "268435456",
    "MALLOC_TOP_PAD_": "16777216",
}


def run_config(request: Request) -> RunConfig:
    """Build the configuration of the demo's run: batches of 32 groups of 8, each used at most one version late.

    A ticket lasts seconds, as long as a group takes here many times over: after a crash the work of a dead generator
    comes back at once.
    """
    return RunConfig(
        strategy=StrategySpec("one-step-off-policy", {"max_staleness": MAX_STALENESS}),
        batch=BatchSpec(
            tokens_per_batch=GROUPS_PER_BATCH * GROUP_SIZE * SEQ_LEN, groups_per_batch=GROUPS_PER_BATCH, seq_len=SEQ_LEN
        ),
        group_size=GROUP_SIZE,
        max_steps=request.steps,
        seed=request.seed,
        advantage="grpo",
        tickets=TicketSpec(ttl_s=20, max_attempts=10),
    )


class Demo:
    """One start of the demo on one folder. `run` returns what stopped it early, or None when the training is done."""

    def __init__(
        self, folder: Folder, request: Request, view: View, *, lock: int, program: Sequence[str] = PROGRAM
    ) -> None:
        """`lock` is the file descriptor that holds the folder, `program` what runs the commands of the children."""
        self.progress = Progress(seed=request.seed, total_steps=request.steps)
        self._folder = folder
        self._request = request
        self._view = view
        self._lock = lock
        self._program = tuple(program)
        self._trainer_lines = LineReader(folder.train_metrics, TrainerLine)
        self._generator_lines = LineReader(folder.generate_metrics, GeneratorLine)
        self._client: AsyncClient | None = None
        self._engine_url = ""
        self._warming: Child | None = None
        self._started = time.time()
        self._session_due_s = 0.0
        self._resumed = False
        self._load_history()

    async def run(self) -> Stop | None:
        """Run all processes to the end of the training; every one of them is gone when this returns."""
        try:
            async with Supervisor(self._folder.logs, keep_open=[self._lock]) as supervisor:
                stop = await supervisor.supervise(self._story(supervisor))
                if stop:
                    self._view.event(f"stopping: {stop.reason}")
                self._look(supervisor)
        except ExceptionGroup as faults:  # of the story's tasks: they stop each other, so the first is the cause
            self._close_session("failed")
            raise faults.exceptions[0] from faults
        self._close_session(stop.reason if stop else "finished")
        return stop

    def _load_history(self) -> None:
        self.progress.add_steps(self._trainer_lines.new_lines())
        self._generator_lines.new_lines()
        for evaluation in LineReader(self._folder.evaluations, Evaluation).new_lines():
            self.progress.add_evaluation(evaluation)
        self.progress.first_step = self.progress.done_steps
        self._resumed = self.progress.first_step > 0

    def _close_session(self, outcome: str) -> None:
        self.progress.phases.leave()
        self._write_session(outcome)

    def _write_session(self, outcome: str) -> None:
        known = self.progress
        known.phases.add_up()
        append_line(
            self._folder.sessions,
            Session(
                started=self._started,
                phases=known.phases.seconds,
                peaks=known.peaks,
                cpu_s=known.cpu_s,
                outcome=outcome,
            ),
        )
        self._session_due_s = time.monotonic() + SESSION_EVERY_S

    async def _story(self, supervisor: Supervisor) -> None:
        async with asyncio.TaskGroup() as background, AsyncExitStack() as clients:
            poller = background.create_task(self._poll(supervisor))
            await self._warm_start(supervisor)
            serve_url = await self._start_services(supervisor)
            client = AsyncClient(serve_url, RUN, timeout_s=HTTP_TIMEOUT_S, retry_for_s=HTTP_TIMEOUT_S)
            await clients.enter_async_context(client)
            await client.put_run(run_config(self._request), if_absent=True)  # an operator may have changed it by PATCH
            self._client = client
            exam = await asyncio.to_thread(Exam, self._folder, ENVIRONMENT, MAX_NEW_TOKENS)
            if self.progress.before is None:
                self._enter("accuracy before")
                await self._measure(exam, 0, greedy=True)
            marks = background.create_task(self._measure_during(exam))
            await self._train(supervisor, client, serve_url)
            marks.cancel()
            self._enter("accuracy after")
            await self._measure(exam, self.progress.total_steps, greedy=True)
            self.progress.state = msgspec.to_builtins(await client.get_run())
            poller.cancel()

    def _enter(self, phase: str) -> None:
        self.progress.phases.enter(phase)
        self.progress.note = ""
        self._write_session(KILLED)
        self._view.update(self.progress)

    async def _warm_start(self, supervisor: Supervisor) -> None:
        """Make the model, unless an earlier start has made it; what a broken one left is made again."""
        if self._folder.prompts.is_file() and self._folder.held_out.is_file():
            done, total = self.progress.done_steps, self.progress.total_steps
            self._view.event(f"resuming: {done} of {total} steps are done; model and buffer are taken as they are")
            return
        self._enter("warm start")
        self._view.event(f"warm start: supervised training to {TARGET_ACCURACY:.0%} sampled accuracy; this is not RL")
        options = ["--task", TASK, "--seed", str(self._request.seed), "--target-accuracy", str(TARGET_ACCURACY)]
        child = self._start(supervisor, "init-model", "--out", str(self._folder.model), *options, may_finish=True)
        self._warming = child
        await supervisor.finished(child)
        self._warming = None
        self._view.event(f"model ready in {self._folder.model}")

    async def _start_services(self, supervisor: Supervisor) -> str:
        """Start service and engine side by side; return the service's URL."""
        self._enter("starting")
        folder = self._folder
        serve = self._start(supervisor, "serve", "--port", "0", "--data-dir", str(folder.serve), stops_last=True)
        options = ("--model", str(folder.model), "--port", "0", "--threads", "1")
        engine = self._start(supervisor, "engine", *options, stops_last=True)
        serve_url = await supervisor.listening(serve, LISTEN_TIMEOUT_S)
        self._view.event(f"service listening on {serve_url}")
        self._engine_url = await supervisor.listening(engine, LISTEN_TIMEOUT_S)
        self._view.event(f"engine listening on {self._engine_url}")
        return serve_url

    async def _train(self, supervisor: Supervisor, client: AsyncClient, serve_url: str) -> None:
        """Start trainer and generator; return when the trainer has done the last step."""
        self._enter(TRAINING)
        folder, url = self._folder, ("--url", serve_url, "--run", RUN, "--engine", self._engine_url)
        epoch = (await client.get_run()).epoch
        train = self._start(
            supervisor,
            "train",
            *url,
            *("--model", str(folder.model)),
            *("--checkpoint-dir", str(folder.checkpoints)),
            *("--weights-dir", str(folder.weights)),
            *("--metrics-file", str(folder.train_metrics)),
            *("--learning-rate", str(LEARNING_RATE)),
            *("--wait-ms", str(LONG_POLL_MS)),
            *("--seed", str(self._request.seed)),
            may_finish=True,
        )
        if self.progress.first_step:
            await self._attached(client, epoch)
        self._start(
            supervisor,
            "generate",
            *url,
            *("--environment", ENVIRONMENT),
            *("--prompts", str(folder.prompts)),
            *("--tokenizer", str(folder.model)),
            *("--group-size", str(GROUP_SIZE)),
            *("--max-tokens", str(MAX_NEW_TOKENS)),
            *("--metrics-file", str(folder.generate_metrics)),
            *("--report-every-s", str(REPORT_EVERY_S)),
            "--seed-requests",
            may_finish=True,
        )
        await supervisor.finished(train)
        self._read_metrics()

    async def _attached(self, client: AsyncClient, epoch: int) -> None:
        """Wait until a resumed trainer has taken the run over, and with it brought the engine back to its weights.

        Groups that the engine made with its initial weights would only be evicted as too old.
        """
        while (await client.get_run()).epoch == epoch:  # noqa: ASYNC110 - another process attaches
            await asyncio.sleep(POLL_S)

    def _start(
        self, supervisor: Supervisor, command: str, *options: str, may_finish: bool = False, stops_last: bool = False
    ) -> Child:
        return supervisor.start(
            command,
            [*self._program, command, *options],
            environment=CHILD_ENVIRONMENT,
            may_finish=may_finish,
            stops_last=stops_last,
        )

    async def _measure(self, exam: Exam, step: int, *, greedy: bool) -> None:
        """Hold an exam and write its result down."""
        sampled = await exam.hold(self._engine_url, temperature=1.0, samples=SAMPLES)
        best = await exam.hold(self._engine_url, temperature=0.0, samples=1) if greedy else None
        evaluation = Evaluation(
            step=step,
            problems=exam.problems,
            samples=SAMPLES,
            sampled=sampled.accuracy,
            greedy=best.accuracy if best else None,
        )
        append_line(self._folder.evaluations, evaluation)
        self.progress.add_evaluation(evaluation)
        told = f"sampled {percent(evaluation.sampled)}" + (f", greedy {percent(evaluation.greedy)}" if best else "")
        self._view.event(f"accuracy on {exam.problems} held-out problems at step {step}: {told}")

    async def _measure_during(self, exam: Exam) -> None:
        """Hold an exam whenever the trainer passes a mark; a training that is faster than exams skips some."""
        marks = [round(share * self.progress.total_steps) for share in EXAM_SHARES]
        left = [mark for mark in marks if mark > self.progress.first_step]
        while left:
            await asyncio.sleep(POLL_S)
            done = self.progress.done_steps
            if left[0] <= done < self.progress.total_steps:
                await self._measure(exam, done, greedy=False)
                left = [mark for mark in left if mark > done]

    async def _poll(self, supervisor: Supervisor) -> None:
        """Learn what is new, once a second, and show it."""
        while True:
            self._read_metrics()
            if self._client is not None:
                self.progress.state = msgspec.to_builtins(await self._client.get_run())
            if self._warming is not None:
                self.progress.note = self._warming.last_line()
            self._look(supervisor)
            if time.monotonic() >= self._session_due_s:
                self._write_session(KILLED)
            self._view.update(self.progress)
            await asyncio.sleep(POLL_S)

    def _read_metrics(self) -> None:
        lines = self._trainer_lines.new_lines()
        if self._resumed and lines:
            self._resumed = False
            self.progress.first_step = lines[0].step
            self._view.event(f"trainer went on at step {lines[0].step}, its newest checkpoint")
        self.progress.add_steps(lines)
        self.progress.generated += self._generator_lines.new_lines()

    def _look(self, supervisor: Supervisor) -> None:
        alive = [child for child in supervisor.children if not child.exited.done()]
        found = [state for child in alive for state in look(child.name, child.pid)]
        self.progress.add_processes([*found, *look("demo", os.getpid())[:1]])

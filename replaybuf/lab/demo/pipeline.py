"""The demo from the warm start to the last evaluation.

::

    init-model ─► serve, engine ─► PUT run ─► accuracy before ─► generate, train ─► accuracy after
    (new only)                                                    accuracy during (at `EVALUATION_SHARES`)

The demo itself trains nothing: it starts the processes, reads the run's state from the service and the metrics files,
and measures accuracy at the engine.
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
from replaybuf.lab.demo.accuracy import HeldOutProblems
from replaybuf.lab.demo.folder import Folder, Request
from replaybuf.launch.processes import process_states
from replaybuf.launch.progress import (
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
from replaybuf.launch.supervisor import Child, Program, Stop, Supervisor
from replaybuf.launch.text import percent
from replaybuf.launch.view import TRAINING, View
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
"""Long-poll of the trainer: a step of the demo is shorter than a polling pause."""
REPORT_EVERY_S = 2.0
SAMPLES = 4
"""Completions per held-out problem at temperature 1."""
EVALUATION_SHARES = (0.2, 0.4, 0.6, 0.8)
"""Shares of the steps after which accuracy is measured during the training."""

LISTEN_TIMEOUT_S = 60.0
HTTP_TIMEOUT_S = 10.0
POLL_S = 1.0

CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # each process needs one core; more threads only compete
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
    # glibc reuses buffers of some MB instead of returning them to the system and requesting them again each time.
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "268435456",
    "MALLOC_TOP_PAD_": "16777216",
}


def run_config(request: Request) -> RunConfig:
    """Return the configuration of the demo's run: batches of 32 groups of 8, staleness at most 1.

    A ticket lives 20 s, many times the duration of a group: after a crash the work of a dead generator is soon issued
    again.
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
    """One session of the demo on one folder. `run` returns what stopped it early, or None after the training."""

    def __init__(
        self, folder: Folder, request: Request, view: View, *, lock: int, program: Sequence[str] = PROGRAM
    ) -> None:
        """Read the history of earlier sessions. `lock`: file descriptor; `program`: runs the children's commands."""
        title = f"replaybuf demo · seed {request.seed}"
        self.progress = Progress(total_steps=request.steps, seed=request.seed, title=title)
        self._folder = folder
        self._request = request
        self._view = view
        self._lock = lock
        self._program = tuple(program)
        self._client: AsyncClient | None = None
        self._engine_url = ""
        self._warm_up: Child | None = None
        self._started = time.time()
        self._session_due_s = 0.0
        self._trainer_lines = LineReader(folder.train_metrics, TrainerLine)
        self._generator_lines = LineReader(folder.generate_metrics, GeneratorLine)
        self.progress.add_steps(self._trainer_lines.new_lines())
        self._generator_lines.new_lines()
        for evaluation in LineReader(folder.evaluations, Evaluation).new_lines():
            self.progress.add_evaluation(evaluation)
        self.progress.first_step = self.progress.done_steps
        self._resumed = self.progress.first_step > 0

    async def run(self) -> Stop | None:
        """Run all processes to the end of the training; all of them have ended when this returns."""
        try:
            async with Supervisor(self._folder.logs, keep_open=[self._lock]) as supervisor:
                stop = await supervisor.supervise(self._script(supervisor))
                if stop:
                    self._view.event(f"stopping: {stop.reason}")
                self._read_processes(supervisor)
        except ExceptionGroup as faults:  # the first fault cancelled the other tasks of the script
            self._end_session("failed")
            raise faults.exceptions[0] from faults
        self._end_session(stop.reason if stop else "finished")
        return stop

    async def _script(self, supervisor: Supervisor) -> None:
        async with asyncio.TaskGroup() as background, AsyncExitStack() as clients:
            poller = background.create_task(self._poll(supervisor))
            await self._warm_start(supervisor)
            serve_url = await self._start_services(supervisor)
            client = AsyncClient(serve_url, RUN, timeout_s=HTTP_TIMEOUT_S, retry_for_s=HTTP_TIMEOUT_S)
            await clients.enter_async_context(client)
            await client.put_run(run_config(self._request), if_absent=True)  # an operator may have changed it by PATCH
            self._client = client
            problems = await asyncio.to_thread(HeldOutProblems, self._folder, ENVIRONMENT, MAX_NEW_TOKENS)
            if self.progress.before is None:
                self._enter("accuracy before")
                await self._evaluate(problems, 0, greedy=True)
            during = background.create_task(self._evaluate_during(problems))
            await self._train(supervisor, client, serve_url)
            during.cancel()
            self._enter("accuracy after")
            await self._evaluate(problems, self._request.steps, greedy=True)
            self.progress.state = msgspec.to_builtins(await client.get_run())
            poller.cancel()

    # ------------------------------------------------------------------ processes

    async def _warm_start(self, supervisor: Supervisor) -> None:
        """Create the model, unless an earlier session has completed it."""
        if self._folder.prompts.is_file() and self._folder.held_out.is_file():
            done, total = self.progress.done_steps, self._request.steps
            self._view.event(f"resuming: {done} of {total} steps are done; model and buffer are reused")
            return
        self._enter("warm start")
        self._view.event(f"warm start: supervised training to {TARGET_ACCURACY:.0%} sampled accuracy; this is not RL")
        options = ["--task", TASK, "--seed", str(self._request.seed), "--target-accuracy", str(TARGET_ACCURACY)]
        self._warm_up = supervisor.start(self._command("init-model", "--out", str(self._folder.model), *options))
        await supervisor.finished(self._warm_up)
        self._warm_up = None
        self._view.event(f"model ready in {self._folder.model}")

    async def _start_services(self, supervisor: Supervisor) -> str:
        """Start service and engine in parallel; return the URL of the service."""
        self._enter("starting")
        data_dir, model = str(self._folder.serve), str(self._folder.model)
        serve = supervisor.start(self._server("serve", "--port", "0", "--data-dir", data_dir))
        engine = supervisor.start(self._server("engine", "--model", model, "--port", "0", "--threads", "1"))
        serve_url = await supervisor.listening(serve, LISTEN_TIMEOUT_S)
        self._view.event(f"service listening on {serve_url}")
        self._engine_url = await supervisor.listening(engine, LISTEN_TIMEOUT_S)
        self._view.event(f"engine listening on {self._engine_url}")
        return serve_url

    async def _train(self, supervisor: Supervisor, client: AsyncClient, serve_url: str) -> None:
        """Start trainer and generator; return when the trainer has done the last step."""
        self._enter(TRAINING)
        folder, common = self._folder, {"--url": serve_url, "--run": RUN, "--engine": self._engine_url}
        train = {
            "--model": folder.model,
            "--checkpoint-dir": folder.checkpoints,
            "--weights-dir": folder.weights,
            "--metrics-file": folder.train_metrics,
            "--learning-rate": LEARNING_RATE,
            "--wait-ms": LONG_POLL_MS,
            "--seed": self._request.seed,
        }
        generate = {
            "--environment": ENVIRONMENT,
            "--prompts": folder.prompts,
            "--tokenizer": folder.model,
            "--group-size": GROUP_SIZE,
            "--max-tokens": MAX_NEW_TOKENS,
            "--metrics-file": folder.generate_metrics,
            "--report-every-s": REPORT_EVERY_S,
        }
        epoch = (await client.get_run()).epoch
        trainer = supervisor.start(self._command("train", *_words(common | train)))
        # A resumed trainer loads its weights into the engine when it attaches. Groups that the engine samples earlier,
        # with its initial weights, would only be evicted as too stale.
        while self.progress.first_step and (await client.get_run()).epoch == epoch:  # noqa: ASYNC110 - it attaches
            await asyncio.sleep(POLL_S)
        supervisor.start(self._command("generate", *_words(common | generate), "--seed-requests"))
        await supervisor.finished(trainer)
        self._read_metrics()

    def _command(self, *words: str) -> Program:
        """Return a program that may finish, named by its command."""
        command = [*self._program, *words]
        return Program(name=words[0], command=command, environment=CHILD_ENVIRONMENT, may_finish=True)

    def _server(self, *words: str) -> Program:
        """Return a program that others use: it runs to the end and stops after them."""
        command = [*self._program, *words]
        return Program(name=words[0], command=command, environment=CHILD_ENVIRONMENT, stop_phase=1)

    # ------------------------------------------------------------------ accuracy

    async def _evaluate(self, problems: HeldOutProblems, step: int, *, greedy: bool) -> None:
        """Measure the accuracy and record it."""
        sampled = await problems.accuracy(self._engine_url, temperature=1.0, samples=SAMPLES)
        best = await problems.accuracy(self._engine_url, temperature=0.0, samples=1) if greedy else None
        evaluation = Evaluation(step=step, problems=len(problems), samples=SAMPLES, sampled=sampled, greedy=best)
        append_line(self._folder.evaluations, evaluation)
        self.progress.add_evaluation(evaluation)
        figures = f"sampled {percent(sampled)}" + ("" if best is None else f", greedy {percent(best)}")
        self._view.event(f"accuracy on {len(problems)} held-out problems at step {step}: {figures}")

    async def _evaluate_during(self, problems: HeldOutProblems) -> None:
        """Measure the accuracy when the trainer reaches a mark; a fast training may skip marks."""
        marks = [round(share * self._request.steps) for share in EVALUATION_SHARES]
        left = [mark for mark in marks if mark > self.progress.first_step]
        while left:
            await asyncio.sleep(POLL_S)
            done = self.progress.done_steps
            if left[0] <= done < self._request.steps:
                await self._evaluate(problems, done, greedy=False)
                left = [mark for mark in left if mark > done]

    # ------------------------------------------------------------------ progress

    async def _poll(self, supervisor: Supervisor) -> None:
        """Update progress and view once a second."""
        while True:
            self._read_metrics()
            if self._client is not None:
                self.progress.state = msgspec.to_builtins(await self._client.get_run())
            if self._warm_up is not None:
                self.progress.note = self._warm_up.last_line()
            self._read_processes(supervisor)
            if time.monotonic() >= self._session_due_s:
                self._write_session(KILLED)
            self._view.update(self.progress)
            await asyncio.sleep(POLL_S)

    def _read_metrics(self) -> None:
        lines = self._trainer_lines.new_lines()
        if self._resumed and lines:
            self._resumed = False
            self.progress.first_step = lines[0].step
            self._view.event(f"trainer resumed at step {lines[0].step}, its newest checkpoint")
        self.progress.add_steps(lines)
        self.progress.generated += self._generator_lines.new_lines()

    def _read_processes(self, supervisor: Supervisor) -> None:
        alive = [child for child in supervisor.children if not child.exited.done()]
        found = [state for child in alive for state in process_states(child.name, child.pid)]
        self.progress.add_processes([*found, *process_states("demo", os.getpid())[:1]])

    def _enter(self, phase: str) -> None:
        self.progress.phases.enter(phase)
        self.progress.note = ""
        self._write_session(KILLED)
        self._view.update(self.progress)

    def _end_session(self, outcome: str) -> None:
        self.progress.phases.enter("")
        self._write_session(outcome)

    def _write_session(self, outcome: str) -> None:
        progress = self.progress
        progress.phases.add_up()
        session = Session(
            started=self._started,
            phases=progress.phases.seconds,
            peaks=progress.peaks,
            cpu_s=progress.cpu_s,
            outcome=outcome,
        )
        append_line(self._folder.sessions, session)
        self._session_due_s = time.monotonic() + SESSION_EVERY_S


def _words(options: dict[str, object]) -> list[str]:
    return [str(word) for option in options.items() for word in option]

"""The session of the demo: that of `replaybuf up`, with a warm start before and accuracy before, during and after.

::

    service ─► PUT run ─► init-model ─► engine ─► accuracy before ─► trainer, generator ─► accuracy after ─► report
                          (new only)                                 accuracy during (at `EVALUATION_SHARES`)

The demo itself trains nothing: it starts the processes, reads the run's state from the service and the metrics files,
and measures accuracy at the engine. The console of the service is open from the first second to the last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from replaybuf.errors import ReplaybufError, counted
from replaybuf.lab.demo.accuracy import HeldOutProblems
from replaybuf.lab.demo.folder import Folder, Request
from replaybuf.lab.demo.report import KILLED, SESSION_EVERY_S, Session, append_line
from replaybuf.lab.demo.run_file import TARGET_ACCURACY, warm_start_program
from replaybuf.launch import session as sessions
from replaybuf.launch.plan import Plan
from replaybuf.launch.progress import Evaluation, LineReader
from replaybuf.launch.session import HTTP_TIMEOUT_S, POLL_S
from replaybuf.launch.supervisor import Child, Stop, Supervisor
from replaybuf.launch.view import View, percent
from replaybuf.wire.answer.run_status import RunStatus

EVALUATION_SHARES = (0.2, 0.4, 0.6, 0.8)
"""Shares of the steps after which accuracy is measured during the training."""


class Demo(sessions.Session):
    """One session of the demo on one folder. `run` returns what stopped it early, or None after the training.

    `finish` is called after the last measurement, while the service still runs.
    """

    command = "demo"

    def __init__(
        self,
        folder: Folder,
        request: Request,
        plan: Plan,
        tables: Mapping[str, Any],
        view: View,
        *,
        lock: int,
        finish: Callable[[], Awaitable[None]],
        program: Sequence[str],
    ) -> None:
        """Read the history of earlier sessions. `lock`: file descriptor; `program`: runs the children's commands."""
        super().__init__(plan, view, lock=lock)
        self.progress.seed = request.seed
        self._folder = folder
        self._request = request
        self._generator = tables["generator"]
        self._finish = finish
        self._program = tuple(program)
        self._engine_url = plan.engines[0].url
        self._warm_up: Child | None = None
        self._problems: asyncio.Task[HeldOutProblems]
        self._started = time.time()
        self._session_due_s = 0.0
        self._ended = False
        for evaluation in LineReader(folder.evaluations, Evaluation).new_lines():
            self.progress.add_evaluation(evaluation)

    async def run(self) -> Stop | None:
        """Run all processes to the end of the training; all of them have ended when this returns."""
        outcome = "failed"
        try:
            stop = await super().run()
            outcome = stop.reason if stop else "finished"
            return stop
        finally:
            self._end_session(outcome)

    # ------------------------------------------------------------------ parts of the session

    def nothing_to_start(self, status: RunStatus) -> bool:
        """Return False: without a report, the accuracy after the training is still to be measured."""
        return False

    async def prepare(self, supervisor: Supervisor) -> None:
        """Create the model, unless an earlier session has completed it, and load the held-out problems."""
        if self._folder.prompts.is_file() and self._folder.held_out.is_file():
            done, total = self.progress.done_steps, self._request.steps
            self._view.event(f"resuming: {done} of {counted(total, 'step')} are done; model and buffer are reused")
        else:
            await self._warm_start(supervisor)
        environment, max_tokens = self._generator["environment"], self._generator["max_tokens"]
        loading = asyncio.to_thread(HeldOutProblems, self._folder, environment, max_tokens)
        self._problems = asyncio.create_task(loading)  # while the engine starts

    async def _warm_start(self, supervisor: Supervisor) -> None:
        self.enter("warm start", "importing torch and reasoning-gym")
        self._view.event(f"warm start: supervised training to {TARGET_ACCURACY:.0%} sampled accuracy; this is not RL")
        program = warm_start_program(self._program, self._folder.model, self._request.seed, TARGET_ACCURACY)
        self._warm_up = supervisor.start(program)
        await supervisor.finished(self._warm_up)
        self._warm_up = None
        self._view.event(f"model ready in {self._folder.model}")

    async def measure_before(self, supervisor: Supervisor, status: RunStatus) -> None:
        """Measure the accuracy, unless an earlier session has."""
        await self._problems
        if self.progress.before is None:
            self.enter("accuracy before", "sampling the held-out problems")
            await self._measure(0, greedy=True)

    async def measure_during(self) -> None:
        """Measure the accuracy when the trainer reaches a mark; a fast training may skip marks."""
        marks = [round(share * self._request.steps) for share in EVALUATION_SHARES]
        left = [mark for mark in marks if mark > self.progress.first_step]
        while left:
            await asyncio.sleep(POLL_S)
            done = self.progress.done_steps
            if left[0] <= done < self._request.steps:
                try:
                    await self._measure(done, greedy=False)
                except ReplaybufError as error:  # an engine that is restarted, for example: the training goes on
                    self._view.event(f"the accuracy at step {done} was not measured: {error}")
                left = [mark for mark in left if mark > done]

    async def measure_after(self, supervisor: Supervisor) -> None:
        """Measure the accuracy, and read the last state of the run."""
        self.enter("accuracy after", "sampling the held-out problems")
        await self._measure(self._request.steps, greedy=True)
        async with self.client(HTTP_TIMEOUT_S) as client:
            self.progress.state = msgspec.to_builtins(await client.get_run())

    async def conclude(self) -> None:
        """End the session's times, and call `finish`."""
        self._end_session("finished")
        await self._finish()

    # ------------------------------------------------------------------ accuracy

    async def _measure(self, step: int, *, greedy: bool) -> None:
        """Measure the accuracy, and record it here and in the service."""
        problems = await self._problems
        evaluation, results = await problems.evaluate(self._engine_url, step, greedy=greedy)
        append_line(self._folder.evaluations, evaluation)
        self.progress.add_evaluation(evaluation)
        figures = f"sampled {percent(evaluation.sampled)}"
        figures += "" if evaluation.greedy is None else f", greedy {percent(evaluation.greedy)}"
        self._view.event(f"accuracy on {counted(evaluation.problems, 'held-out problem')} at step {step}: {figures}")
        async with self.client(HTTP_TIMEOUT_S) as client:
            for result in results:
                await client.record_evaluation(result)

    # ------------------------------------------------------------------ progress

    def look(self) -> None:
        """Show the warm start, and record the session."""
        if self._warm_up is not None and (line := self._warm_up.last_line()):
            self.progress.note = line
        if time.monotonic() >= self._session_due_s:
            self._write_session(KILLED)

    def enter(self, phase: str, note: str = "") -> None:
        """Begin a phase, and record it."""
        super().enter(phase, note)
        self._write_session(KILLED)

    def _end_session(self, outcome: str) -> None:
        self.progress.phases.enter("")
        self._write_session(outcome)
        self._ended = True

    def _write_session(self, outcome: str) -> None:
        if self._ended:
            return
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

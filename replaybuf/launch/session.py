"""One session of `replaybuf up`: start the parts of a plan in order, watch them, stop them.

::

    service ─► PUT run ─► engines ─► evaluation ─► trainer, generators ─► evaluation ─► stop
                      │              (new run)                  │         (trainer done) │
                      └ prepare       measure_before            └ measure_during         └ measure_after, conclude

The session trains and decides nothing: it starts processes and reads the state of the run and the metrics files. All
that must survive is in the data folder, so the next session continues the run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec

from replaybuf.client.client import AsyncClient
from replaybuf.errors import ReplaybufError, ServiceUnavailable, counted, first_error
from replaybuf.launch.plan import Engine, Plan
from replaybuf.launch.processes import process_uses
from replaybuf.launch.progress import GeneratorLine, LineReader, Progress, TrainerLine
from replaybuf.launch.supervisor import Stop, Supervisor
from replaybuf.launch.view import TRAINING, View
from replaybuf.report import POINTS, Introduction, render
from replaybuf.wire.answer.evaluations import MOST_LISTED
from replaybuf.wire.answer.run_status import RunStatus
from replaybuf.wire.config import RunConfig
from replaybuf.wire.config_patch import differing_fields

POLL_S = 1.0
HTTP_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 2.0
SILENCE_S = 10.0
"""A person's trainer that was silent for so long after the end of the run has read the end."""


class Session:
    """One session of a plan. `run` returns what stopped it early, or None at the end of the training.

    A subclass adds work of its own in the methods without an underscore.
    """

    command = "up"

    def __init__(self, plan: Plan, view: View, *, lock: int, token: str | None = None) -> None:
        """`lock`: file descriptor that the guard keeps open; `token`: of the role operator."""
        self.progress = Progress(total_steps=plan.config.max_steps)
        self._plan = plan
        self._view = view
        self._lock = lock
        self._token = token
        self._trainer_lines = LineReader(plan.trainer_metrics, TrainerLine) if plan.trainer_metrics else None
        self._generator_lines = [LineReader(path, GeneratorLine) for path in plan.generator_metrics[:1]]
        if self._trainer_lines:
            self.progress.add_steps(self._trainer_lines.new_lines())
        for reader in self._generator_lines:
            reader.new_lines()
        self.progress.first_step = self.progress.done_steps
        self._resumed = self.progress.first_step > 0

    # ------------------------------------------------------------------ for subclasses

    def nothing_to_start(self, status: RunStatus) -> bool:
        """Return whether the run needs no processes any more."""
        return status.state == "finished"

    async def prepare(self, supervisor: Supervisor) -> None:
        """Do what engines need; the service runs already."""

    async def measure_before(self, supervisor: Supervisor, status: RunStatus) -> None:
        """Evaluate before the training."""
        if self._plan.evaluate_at_start and status.step == 0:
            await self._evaluate(supervisor)

    async def measure_during(self) -> None:
        """Measure while the training goes on; cancelled at its end."""

    async def measure_after(self, supervisor: Supervisor) -> None:
        """Evaluate after the training."""
        if self._plan.evaluate_at_end:
            await self._evaluate(supervisor)

    def look(self) -> None:
        """Update the progress, once a second."""

    async def conclude(self) -> None:
        """Write the report of the run: what needs the service after all measurements. The view is updated no more."""
        try:
            await self.write_page()
        except (ReplaybufError, OSError) as error:  # the training is done, whatever becomes of its report
            self._view.event(f"there is no report: {error}")
        else:
            self._view.event(f"report of this run: {self._plan.report}")

    async def write_page(self, introduction: Introduction | None = None) -> None:
        """Write the HTML report. Raises what the client raises, and `OSError`."""
        async with self.client(HTTP_TIMEOUT_S) as client:
            results = await client.list_evaluations(MOST_LISTED)
            page = render(await client.get_run(), await client.get_history(POINTS), results, introduction)
        await asyncio.to_thread(self._plan.report.write_text, page, encoding="utf-8")

    # ------------------------------------------------------------------ script

    async def run(self) -> Stop | None:
        """Run all processes; all of them have ended when this returns."""
        plan = self._plan
        try:
            async with Supervisor(
                plan.logs, keep_open=[self._lock], grace_s=plan.stop_timeout_s, report=self._view.event
            ) as supervisor:
                stop = await supervisor.supervise(self._script(supervisor))
                self._view.event(f"stopping: {stop.reason}" if stop else "stopping all processes")
            return stop
        except ExceptionGroup as faults:  # the first fault cancelled the other tasks of the script
            raise first_error(faults) from faults

    async def _script(self, supervisor: Supervisor) -> None:
        async with asyncio.TaskGroup() as background:
            poller = background.create_task(self._poll(supervisor))
            status = await self._create_run(supervisor)
            if self.nothing_to_start(status):
                self._view.event(f"run {self._plan.run} is finished; there is nothing to start")
            else:
                await self.prepare(supervisor)
                self.enter("starting")
                await self._start_engines(supervisor)
                await self.measure_before(supervisor, status)
                during = background.create_task(self.measure_during())
                await self._train(supervisor, status)
                during.cancel()
                await self.measure_after(supervisor)
            self._read_processes(supervisor)
            poller.cancel()
            await self.conclude()

    async def _create_run(self, supervisor: Supervisor) -> RunStatus:
        """Start the service, and create the run unless an earlier session did."""
        plan = self._plan
        self.enter("starting", f"waiting for the service at {plan.url}")
        supervisor.start(plan.service)
        async with self.client(plan.start_timeout_s) as client:
            await client.put_run(plan.config, if_absent=True)  # an operator may have changed it by PATCH
            status = await client.get_run()
        self._view.event(f"service at {plan.url}, run {plan.run} at step {status.step}")
        if plan.console:
            self._view.event(f"console of this run: {plan.console}")
        stored = msgspec.convert(status.config, RunConfig)
        for field in differing_fields(plan.config, stored):
            self._view.event(f"run.{field} differs in the service, which keeps its value; change it with PATCH")
        return status

    async def _start_engines(self, supervisor: Supervisor) -> None:
        for engine in self._plan.engines:
            if engine.program:
                supervisor.start(engine.program, slow=True)
        for engine in self._plan.engines:
            await self._wait_for(engine)
            if engine.program:
                supervisor.has_started(engine.program)
            self._view.event(f"{engine.name} at {engine.url}")

    async def _wait_for(self, engine: Engine) -> None:
        """Wait until an engine accepts connections. Raises `ServiceUnavailable` after `start_timeout_s`."""
        plan, began_s = self._plan, time.monotonic()
        while not await _listens(engine.url):
            waited_s = time.monotonic() - began_s
            if waited_s > plan.start_timeout_s:
                log = f"; its log: {plan.logs / f'{engine.name}.log'}" if engine.program else ""
                detail = f"{engine.name} does not listen at {engine.url} after {plan.start_timeout_s:g} s{log}"
                raise ServiceUnavailable(detail, name=engine.name, value=engine.url, bound=plan.start_timeout_s)
            limit = f"{waited_s:.0f} s of at most {plan.start_timeout_s:g} s"
            self.progress.note = f"waiting for {engine.name} at {engine.url}, {limit}"
            await asyncio.sleep(POLL_S / 4)

    async def _evaluate(self, supervisor: Supervisor) -> None:
        program = self._plan.evaluation
        if program is None:
            return
        self.enter("evaluation", "sampling held-out prompts")
        child = supervisor.start(program)
        await supervisor.finished(child)
        async with self.client(HTTP_TIMEOUT_S) as client:
            for result in await client.list_evaluations(1):
                figures = f"reward {result.reward_mean:.3f} over {counted(result.rollouts, 'completion')}"
                self._view.event(f"evaluation {result.set_name} of version {result.version}: {figures}")

    async def _train(self, supervisor: Supervisor, status: RunStatus) -> None:
        """Start trainer and generators; return when the trainer is done."""
        plan = self._plan
        self.enter(TRAINING)
        trainer = supervisor.start(plan.trainer) if plan.trainer else None
        if trainer is None:
            for line in plan.trainer_lines():
                self._view.event(line)
        elif status.step > 0:
            # A resumed trainer loads its weights into the engines when it attaches. Groups that engines sample
            # earlier, with their initial weights, would only be evicted as too stale.
            await self._until(lambda now: now.epoch > status.epoch)
        for generator in plan.generators:
            supervisor.start(generator)
        if trainer:
            await supervisor.finished(trainer)
        else:
            await self._until(_is_over)
        self._read_metrics()
        self._view.event(f"training is done at step {self.progress.done_steps}")

    async def _until(self, condition: Callable[[RunStatus], bool]) -> None:
        """Wait for a state of the run; the service may be restarted meanwhile."""
        async with self.client(0.0) as client:
            # Another process changes the state.
            while (status := await _or_none(client.get_run())) is None or not condition(status):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    def client(self, retry_for_s: float) -> AsyncClient:
        """Return a client of the run that repeats failed calls for `retry_for_s`."""
        plan = self._plan
        return AsyncClient(plan.url, plan.run, self._token, timeout_s=HTTP_TIMEOUT_S, retry_for_s=retry_for_s)

    # ------------------------------------------------------------------ progress

    async def _poll(self, supervisor: Supervisor) -> None:
        """Update progress and view once a second."""
        async with self.client(0.0) as client:
            while True:
                self._read_metrics()
                status = await _or_none(client.get_run())
                if status is not None:
                    self.progress.state = msgspec.to_builtins(status)
                elif self.progress.state:
                    self.progress.note = "the service does not answer; it is restarted"
                self._read_processes(supervisor)
                self.look()
                self._view.update(self.progress)
                await asyncio.sleep(POLL_S)

    def _read_metrics(self) -> None:
        lines = self._trainer_lines.new_lines() if self._trainer_lines else []
        if self._resumed and lines:
            self._resumed = False
            self.progress.first_step = lines[0].step
            self._view.event(f"trainer resumed at step {lines[0].step}, its newest checkpoint")
        self.progress.add_steps(lines)
        for reader in self._generator_lines:
            self.progress.generated += reader.new_lines()

    def _read_processes(self, supervisor: Supervisor) -> None:
        alive = [child for child in supervisor.children if not child.exited.done()]
        uses = [use for child in alive for use in process_uses(child.name, child.pid)]
        self.progress.add_uses([*uses, *process_uses(self.command, os.getpid())[:1]])

    def enter(self, phase: str, note: str = "") -> None:
        """Begin a phase, and show it."""
        self.progress.phases.enter(phase)
        self.progress.note = note
        self._view.update(self.progress)


def _is_over(status: RunStatus) -> bool:
    """Return whether a run is finished and a person's trainer has had time to read that."""
    return status.state == "finished" and (status.trainer is None or status.trainer.last_seen_s >= SILENCE_S)


async def _or_none(answer: Awaitable[RunStatus]) -> RunStatus | None:
    """Return the answer; None if the service is away."""
    try:
        return await answer
    except ReplaybufError:
        return None


async def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True

"""`replaybuf up` as a whole, over real processes: the service is real, the trainer appends its own groups."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from replaybuf.client import Client
from replaybuf.errors import counted
from tests.forked import ForkedProcess
from tests.ports import free_ports
from tests.waiting import eventually, still_running

TRAINER = Path(__file__).with_name("standin_trainer.py")
ENGINE = "import http.server, sys; http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), None).serve_forever()"
STEPS = 6
WITHIN_S = 120.0
pytestmark = pytest.mark.timeout(300)  # a session takes 10 s; many times that on a loaded machine


class Run:
    """One file in a folder, and the sessions that a test starts on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "run.toml"
        self.state = folder / "state"
        self.fault = folder / "fault"
        self.logs = folder / "data" / "logs"
        self.port, self.engine_port = free_ports(2)
        self.sessions: list[ForkedProcess] = []
        trainer = [sys.executable, str(TRAINER), str(self.state), str(self.fault)]
        engine = [sys.executable, "-c", ENGINE, str(self.engine_port)]
        engine_url = f"http://127.0.0.1:{self.engine_port}"
        self.file.write_text(
            f"""
            data_dir = "data"
            stop_timeout_s = 10
            run = {{ name = "up", max_steps = {STEPS}, batch = {{ groups_per_batch = 2 }} }}
            service = {{ port = {self.port} }}
            trainer = {{ command = {json.dumps(trainer)} }}
            restarts = {{ first_pause_s = 0.01, longest_pause_s = 0.01, most = 3 }}
            engines = [{{ name = "small", command = {json.dumps(engine)}, url = "{engine_url}" }}]
            """
        )

    def start(self, *options: str, **environment: str) -> ForkedProcess:
        """Start `replaybuf up` on the file."""
        session = ForkedProcess("replaybuf", ["up", str(self.file), *options], os.environ | environment, None)
        self.sessions.append(session)
        return session

    def reached(self, steps: int, session: ForkedProcess) -> list[psutil.Process]:
        """Wait until the trainer has done so many steps; return all processes of the session."""

        def done() -> bool:
            if session.poll() is not None:
                raise AssertionError(f"the session ended: {session.communicate(10)}")
            return self.state.exists() and int(self.state.read_text() or 0) >= steps

        eventually(done, WITHIN_S)
        return psutil.Process(session.pid).children(recursive=True)

    def pid(self, name: str, than: int = 0) -> int:
        """Wait for the newest process of a name that is not `than`; return its pid."""

        def newest() -> int:
            matches = re.findall(rf"started name={name} pid=(\d+)", (self.logs / "up.log").read_text())
            return int(matches[-1]) if matches else 0

        return eventually(newest, WITHIN_S, lambda pid: pid not in (0, than))


def ended(session: ForkedProcess) -> tuple[int | None, str]:
    """Wait for the end; return exit code and all output."""
    output, errors = session.communicate(WITHIN_S)
    return session.returncode, output + errors


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run after the guard's time."""
    return still_running(processes, WITHIN_S)


@contextlib.contextmanager
def run_in(folder: Path) -> Iterator[Run]:
    """Write the file of a run with six steps; its sessions end with the block."""
    made = Run(folder)
    try:
        yield made
    finally:
        for session in made.sessions:
            if session.poll() is None:
                session.send_signal(signal.SIGTERM)
                session.communicate(WITHIN_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run of one test."""
    with run_in(tmp_path) as made:
        yield made


class Finished(NamedTuple):
    """A run that a script started, and that went to its end; `again`: the second `up`."""

    run: Run
    left: list[psutil.Process]
    code: int | None
    output: str
    lines: str
    again: tuple[int | None, str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """One session with `--json` and no fault."""
    with run_in(tmp_path_factory.mktemp("finished")) as run:
        session = run.start("--json")
        processes = run.reached(1, session)
        output, lines = session.communicate(WITHIN_S)
        yield Finished(run, left(processes), session.returncode, output, lines, ended(run.start()))


def test_a_run_goes_to_its_end_and_leaves_no_process(finished: Finished) -> None:
    """Plain lines name the service, the engine and the end; the second `up` has nothing to start."""
    run, lines = finished.run, finished.lines
    assert finished.code == 0, lines
    for line in (f"service at http://127.0.0.1:{run.port}, run up at step 0", "small at http://", "training is done"):
        assert line in lines
    assert f"run up is done; data and logs are in {run.folder / 'data'}" in lines
    assert re.search(rf"open its console again: .* serve .*{run.folder / 'data' / 'service'}", lines)
    report = run.folder / "data" / "report.html"
    assert f"report of this run: {report}" in lines
    assert f"up: finished, {counted(STEPS, 'trained step')}" in report.read_text()
    assert finished.left == []
    code, output = finished.again
    assert (code, "run up is finished; there is nothing to start" in output) == (0, True), output
    assert run.state.read_text() == str(STEPS)


def test_a_run_that_a_script_starts_prints_one_json_object(finished: Finished) -> None:
    """How it ended, on standard output; the progress is on the other stream."""
    summary = json.loads(finished.output)
    assert (summary["run"], summary["stopped"]) == ("up", None)
    assert summary["data_dir"] == str(finished.run.folder / "data") and " serve " in summary["console"]


def test_every_killed_child_is_restarted_and_the_run_completes(run: Run) -> None:
    """kill -9 of trainer, engine and service in the middle; each restart is explained, and no step is lost."""
    run.fault.write_text("hold")
    session = run.start()
    run.reached(1, session)
    for name in ("trainer", "small", "service"):
        pid = run.pid(name)
        os.kill(pid, signal.SIGKILL)
        run.pid(name, than=pid)
    with Client(f"http://127.0.0.1:{run.port}", "up", retry_for_s=WITHIN_S) as client:
        status = client.get_run()
    assert (status.step, status.groups.stored) == (1, 2), "stored survives the kill of the service"
    run.fault.unlink()
    code, output = ended(session)
    assert code == 0, output
    for name in ("trainer", "small", "service"):
        assert re.search(rf"{name} \(pid \d+\) was killed by SIGKILL; restart 1 of 3 in 0\.01 s; its log: ", output)
    steps = [int(line.split()[1]) for line in (run.logs / "trainer.log").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))


class Interrupted(NamedTuple):
    """A session that Ctrl-C stopped, another `up` beside it, and the session that went on with a changed file."""

    run: Run
    left: list[psutil.Process]
    stopped: tuple[int | None, str]
    exits: list[str]
    beside: tuple[int | None, str]
    resumed: tuple[int | None, str]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interrupted]:
    """Three sessions in one folder."""
    with run_in(tmp_path_factory.mktemp("interrupted")) as run:
        run.fault.write_text("hold")
        session = run.start()
        processes = run.reached(1, session)
        beside = ended(run.start())
        assert session.poll() is None, "the second session disturbed the first"
        session.send_signal(signal.SIGINT)
        stopped = ended(session)
        exits = re.findall(r"exited name=(\w+)", (run.logs / "up.log").read_text())
        run.fault.unlink()
        run.file.write_text(run.file.read_text().replace("groups_per_batch = 2", "groups_per_batch = 3"))
        yield Interrupted(run, left(processes), stopped, exits, beside, ended(run.start()))


def test_a_signal_stops_all_in_order(interrupted: Interrupted) -> None:
    """Trainer, engine and service end in this order."""
    code, output = interrupted.stopped
    assert (code, interrupted.left) == (130, [])
    assert "stopped: stopped by Ctrl-C" in output
    assert f"continue with: {sys.executable} -m replaybuf up {interrupted.run.file}" in output
    assert f"console of this run: http://127.0.0.1:{interrupted.run.port}/#/runs/up" in output
    assert interrupted.exits == ["trainer", "small", "service", "guard"]


def test_up_again_continues_at_the_step_of_the_stopped_session(interrupted: Interrupted) -> None:
    code, output = interrupted.resumed
    assert (code, "run up at step 1" in output) == (0, True), output
    steps = [int(line.split()[1]) for line in (interrupted.run.logs / "trainer.log").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))


def test_one_folder_has_one_session(interrupted: Interrupted) -> None:
    """The second session says what to do, and does not disturb the first."""
    code, output = interrupted.beside
    assert (code, "is in use by another `replaybuf up`" in output) == (1, True), output


def test_changed_keys_of_an_existing_run_are_named(interrupted: Interrupted) -> None:
    """The service keeps the configuration of a run; the file cannot change it in silence."""
    _, output = interrupted.resumed
    assert "run.batch.groups_per_batch differs in the service, which keeps its value; change it with PATCH" in output


def test_no_process_survives_kill_9_of_up_and_up_again_continues(run: Run) -> None:
    """The guard ends the children; the next session waits for that and goes on."""
    run.fault.write_text("hold")
    session = run.start()
    processes = run.reached(1, session)
    session.kill()
    session.communicate(WITHIN_S)
    run.fault.unlink()
    code, output = ended(run.start())
    assert left(processes) == []
    assert (code, "run up at step 1" in output) == (0, True), output


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_the_service_and_its_valkey_end_when_up_is_killed_together_with_its_guard(run: Run) -> None:
    """`up` is stopped first, so that it cannot see that its guard is gone."""
    run.fault.write_text("hold")
    session = run.start()
    processes = run.reached(1, session)
    service = psutil.Process(run.pid("service"))
    ours = [service, *service.children(recursive=True)]
    assert [process.name() for process in ours[1:]] == ["valkey-server"]
    session.send_signal(signal.SIGSTOP)
    try:
        for process in processes:
            if "guard.py" in " ".join(process.cmdline()):
                process.kill()
        session.kill()
        session.communicate(WITHIN_S)
        assert left(ours) == []
    finally:
        for process in still_running(processes, 0.0):  # nobody stops the others
            process.kill()


def test_a_child_that_keeps_failing_ends_the_session_with_its_last_lines(run: Run) -> None:
    """After three restarts: its name, its exit code, the last lines of its log, exit code 1, nothing left."""
    run.fault.write_text("die")
    session = run.start("--json")
    processes = run.reached(1, session)
    output, lines = session.communicate(WITHIN_S)
    assert (session.returncode, left(processes)) == (1, [])
    assert "restart 3 of 3 in 0.01 s" in lines
    assert re.search(r"stopped: trainer \(pid \d+\) exited with code 7 after 3 restarts", lines)
    assert "  weights are not finite" in lines
    assert "exited with code 7 after 3 restarts" in json.loads(output)["stopped"]


def test_a_wrong_file_starts_nothing(run: Run) -> None:
    """Exit code 2 and every problem, as text or as JSON; no folder is created."""
    run.file.write_text(run.file.read_text() + "\n[evaluation]\nsample = 3\n[generator]\nmax_token = 4\n")
    code, output = ended(run.start())
    assert code == 2
    assert "problems, and nothing was started" in output
    assert "  - evaluation.sample is not a key of this file; did you mean samples?" in output
    assert "  - generator.max_token is not a key of this file; did you mean max_tokens?" in output
    assert not (run.folder / "data").exists()
    code, output = ended(run.start("--json"))
    assert (code, len(json.loads(output)["problems"]) > 2) == (2, True)


def test_a_dry_run_prints_commands_without_secrets_and_starts_nothing(run: Run) -> None:
    """As text that a shell could run, and as JSON; a token in the file goes by the environment and is hidden."""
    secret = "c2VjcmV0"
    generator = {"environment": "exact-match", "prompts": "m:f", "max_tokens": 4, "tokenizer": ".", "token": secret}
    service = f'service = {{ port = {run.port}, redis_url = "redis://:{secret}@127.0.0.1:6379" }}'
    text = re.sub("service = .*", service, run.file.read_text())
    run.file.write_text(f"{text}\n[generator]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in generator.items()))
    code, output = ended(run.start("--dry-run"))
    assert code == 0, output
    assert (
        f"{sys.executable} -m replaybuf serve --data-dir {run.folder / 'data' / 'service'} --port {run.port}" in output
    )
    assert f"--url http://127.0.0.1:{run.port} --run up" in output
    assert f"--engine http://127.0.0.1:{run.engine_port}" in output
    code, document = ended(run.start("--dry-run", "--json"))
    described: dict[str, Any] = json.loads(document)
    assert [process["name"] for process in described["processes"]] == ["service", "small", "trainer", "generator"]
    environments = {process["name"]: process["environment"] for process in described["processes"]}
    assert environments["generator"] == {"REPLAYBUF_GENERATE_TOKEN": "***"}
    assert environments["service"] == {"REPLAYBUF_SERVE_REDIS_URL": "***"}
    assert environments["trainer"] == {"REPLAYBUF_URL": f"http://127.0.0.1:{run.port}", "REPLAYBUF_RUN": "up"}
    assert secret not in output + document
    assert not (run.folder / "data").exists()


def test_the_lines_for_a_trainer_of_your_own_are_enough_to_run_it(run: Run) -> None:
    """With `trainer = "mine"` the session prints address and run, and ends after the run has finished."""
    text = re.sub(r"trainer = .*\n", 'trainer = "mine"\n', run.file.read_text())
    run.file.write_text(text)
    session = run.start()
    seen = next(line for line in session.stdout if "from a shell: export" in line)
    variables = dict(word.split("=", 1) for word in seen.split("export ")[1].split())
    trainer = subprocess.run(
        [sys.executable, str(TRAINER), str(run.state), str(run.fault)],
        env=os.environ | variables,
        timeout=WITHIN_S,
        capture_output=True,
        text=True,
    )
    assert trainer.returncode == 0, trainer.stderr
    code, output = ended(session)
    assert code == 0, output
    assert f"training is done at step {STEPS}" in output

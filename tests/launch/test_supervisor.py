"""The supervisor: everything stops in time, with the reason, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from replaybuf.errors import Invalid, ServiceUnavailable
from replaybuf.launch.supervisor import Child, Program, Restarts, Stop, Supervisor
from tests.waiting import eventually, until

FOREVER = [sys.executable, "-c", "import signal; signal.pause()"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n"
    "while True: signal.pause()",
]
WITH_GRANDCHILD = [
    sys.executable,
    "-c",
    "import subprocess, sys, signal\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    "print('grandchild', child.pid, flush=True); signal.pause()",
]
DEMO = Path(__file__).with_name("supervised.py")
GRACE_S = 1000.0
"""More than a test may take: a stop that waits for the whole grace time is seen."""
WITHIN_S = 60.0


def dying(code: int) -> list[str]:
    return [sys.executable, "-c", f"print('the disk is full'); raise SystemExit({code})"]


async def forever() -> None:
    await asyncio.Event().wait()


async def printed(child: Child, word: str) -> str:
    await until(lambda: word in child.output())
    return child.output()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pids: list[int]) -> None:
    eventually(lambda: [pid for pid in pids if not gone(pid)], WITHIN_S, lambda left: not left)


async def test_a_dying_child_stops_everything_with_its_name_code_and_last_log_lines(tmp_path: Path) -> None:
    """The reason names the child and how it ended; the others are gone within the bound."""
    async with Supervisor(tmp_path, grace_s=GRACE_S) as supervisor:
        supervisor.start(Program(name="serve", command=FOREVER, stop_phase=1))
        supervisor.start(Program(name="engine", command=FOREVER))
        supervisor.start(Program(name="train", command=dying(3)))
        stop = await supervisor.supervise(forever())
    stop, pids = stop, [child.pid for child in supervisor.children]
    assert isinstance(stop, Stop)
    assert stop.reason == f"train (pid {pids[2]}) exited with code 3"
    assert (stop.exit_code, stop.log, stop.log_lines) == (1, tmp_path / "train.log", ("the disk is full",))
    assert all(gone(pid) for pid in pids)


async def test_the_reason_names_the_signal_that_killed_a_child(tmp_path: Path) -> None:
    """`kill -9` of a child is named by its signal."""
    async with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(Program(name="engine", command=FOREVER))
        os.kill(child.pid, signal.SIGKILL)
        stop = await supervisor.supervise(forever())
    assert isinstance(stop, Stop)
    assert stop.reason.endswith("was killed by SIGKILL")


def test_a_child_that_may_finish_ends_nothing_unless_it_fails(tmp_path: Path) -> None:
    """After exit code 0 of such a child the demo continues; another code stops it."""

    async def scene(code: int) -> object:
        async with Supervisor(tmp_path) as supervisor:
            child = supervisor.start(Program(name="init-model", command=dying(code), may_finish=True))

            async def story() -> str:
                await supervisor.finished(child)
                return "went on"

            return await supervisor.supervise(story())

    assert asyncio.run(scene(0)) == "went on"
    assert isinstance(asyncio.run(scene(1)), Stop)


async def test_a_service_that_may_not_finish_stops_the_demo_even_with_code_0(tmp_path: Path) -> None:
    """A clean exit of a child that is needed to the end is a fault too."""
    async with Supervisor(tmp_path) as supervisor:
        supervisor.start(Program(name="serve", command=dying(0)))
        stop = await supervisor.supervise(forever())
    assert isinstance(stop, Stop)
    assert stop.reason.endswith("exited with code 0")


async def test_a_child_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    """SIGTERM comes first, then SIGKILL."""
    async with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(Program(name="engine", command=STUBBORN))
        await printed(child, "deaf")
    assert gone(child.pid) and child.exited.result() == -signal.SIGKILL


async def test_processes_started_by_a_child_end_with_it(tmp_path: Path) -> None:
    """A killed child's own processes (the embedded Valkey of serve) are not left behind."""
    async with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(Program(name="serve", command=WITH_GRANDCHILD))
        grandchild = int((await printed(child, "grandchild")).split()[1])
        os.kill(child.pid, signal.SIGKILL)
        await supervisor.supervise(forever())
    wait_until_gone([grandchild])


async def test_a_child_in_a_cancelled_wait_is_stopped(tmp_path: Path) -> None:
    """After the wait is cancelled, the supervisor still sends SIGTERM to the child."""
    async with Supervisor(tmp_path, grace_s=GRACE_S) as supervisor:
        train = supervisor.start(Program(name="train", command=FOREVER))
        engine = supervisor.start(Program(name="engine", command=FOREVER))
        story = supervisor.finished(train)
        asyncio.get_running_loop().call_later(0.1, os.kill, engine.pid, signal.SIGKILL)
        await supervisor.supervise(story)
    assert train.exited.result() == -signal.SIGTERM


async def test_the_url_is_read_from_the_childs_own_output(tmp_path: Path) -> None:
    """A line that an earlier start left in the same log file is not taken for this one's."""
    (tmp_path / "serve.log").write_text("listening on http://127.0.0.1:1\n")
    code = "import signal; print('listening on http://127.0.0.1:2', flush=True); signal.pause()"
    async with Supervisor(tmp_path) as supervisor:
        outcome = await supervisor.listening(
            supervisor.start(Program(name="serve", command=[sys.executable, "-c", code])), 20
        )
    assert outcome == "http://127.0.0.1:2"


def test_a_child_that_never_listens_is_named_with_its_log(tmp_path: Path) -> None:
    """The wait for the URL has a limit, and the message names the log."""

    async def scene() -> None:
        async with Supervisor(tmp_path) as supervisor:
            await supervisor.listening(supervisor.start(Program(name="engine", command=FOREVER)), 0.1)

    with pytest.raises(ServiceUnavailable, match=r"engine did not listen within 0\.1 s; its log: .*engine\.log"):
        asyncio.run(scene())


async def test_a_failed_call_is_blamed_on_the_child_whose_death_caused_it(tmp_path: Path) -> None:
    """The story's own error comes second to the exit behind it."""
    async with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(Program(name="serve", command=FOREVER))

        async def story() -> None:
            os.kill(child.pid, signal.SIGKILL)
            raise ServiceUnavailable("connection refused")

        stop = await supervisor.supervise(story())
    assert isinstance(stop, Stop)
    assert stop.reason.startswith("serve")


def test_an_error_of_the_story_itself_passes_through_and_stops_everything(tmp_path: Path) -> None:
    """Nothing is swallowed: the error arrives, the children are gone."""
    pids: list[int] = []

    async def scene() -> None:
        async with Supervisor(tmp_path) as supervisor:
            pids.append(supervisor.start(Program(name="serve", command=FOREVER)).pid)

            async def story() -> None:
                raise ServiceUnavailable("no route")

            await supervisor.supervise(story())

    with pytest.raises(ServiceUnavailable, match="no route"):
        asyncio.run(scene())
    assert gone(pids[0])


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that supervises three children (one with a child of its own), and the pids of all, guard included."""
    with subprocess.Popen(
        [sys.executable, str(DEMO), str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        if process.stdout is None:
            raise RuntimeError("no pipe")
        pids = [int(word) for word in process.stdout.readline().split()]
        yield process, pids
        process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything_and_sets_the_exit_code(
    supervised: tuple[subprocess.Popen[str], list[int]], number: signal.Signals, code: int
) -> None:
    """Ctrl-C and SIGTERM: 128 + signal, and no process left, the guard included."""
    process, pids = supervised
    process.send_signal(number)
    assert process.wait(WITHIN_S) == code
    wait_until_gone(pids)


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
async def test_the_reason_names_the_signal(tmp_path: Path, number: signal.Signals, word: str) -> None:
    async with Supervisor(tmp_path) as supervisor:
        os.kill(os.getpid(), number)
        outcome = await supervisor.supervise(forever())
    assert outcome == Stop(f"stopped by {word}", 128 + number)


def test_no_process_survives_kill_9_of_the_supervisor(
    supervised: tuple[subprocess.Popen[str], list[int]],
) -> None:
    """The guard ends every group, grandchildren included, and leaves."""
    process, pids = supervised
    assert len(pids) == 5
    assert [pid for pid in pids if gone(pid)] == []
    process.kill()
    process.wait(WITHIN_S)
    wait_until_gone(pids)


async def test_kill_9_of_the_guard_stops_the_demo(tmp_path: Path) -> None:
    """Without its guard the demo could leave processes behind, so it stops."""
    async with Supervisor(tmp_path) as supervisor:
        supervisor.start(Program(name="serve", command=FOREVER))
        for child in psutil.Process().children():
            if "guard.py" in " ".join(child.cmdline()):
                child.kill()
        stop = await supervisor.supervise(forever())
    assert isinstance(stop, Stop)
    assert stop.reason.startswith("guard")


async def test_a_second_signal_kills_children_at_once(tmp_path: Path) -> None:
    """After a second Ctrl-C, children that ignore SIGTERM are killed."""
    async with Supervisor(tmp_path, grace_s=GRACE_S) as supervisor:
        child = supervisor.start(Program(name="engine", command=STUBBORN))
        await printed(child, "deaf")
        os.kill(os.getpid(), signal.SIGINT)
        await supervisor.supervise(forever())
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
    assert child.exited.result() == -signal.SIGKILL


FAST = Restarts(most=2, first_pause_s=0.01, longest_pause_s=0.01)


def dying_until(count: int, log: Path) -> list[str]:
    """A program that fails with code 3 until its log has so many lines, and then succeeds."""
    code = (
        f"from pathlib import Path; n = len(Path({str(log)!r}).read_text().splitlines()); print('try', n, flush=True)"
    )
    return [sys.executable, "-c", f"{code}; raise SystemExit(3 if n < {count} else 0)"]


@pytest.mark.parametrize(("failures", "ends"), [(2, "went on"), (3, "after 2 restarts")])
async def test_a_child_is_restarted_a_bounded_number_of_times(tmp_path: Path, failures: int, ends: str) -> None:
    """Two restarts cure two failures; the third failure stops everything and names the restarts. Each is reported."""
    reports: list[str] = []
    async with Supervisor(tmp_path, report=reports.append) as supervisor:
        command = dying_until(failures, tmp_path / "train.log")
        child = supervisor.start(Program(name="train", command=command, may_finish=True, restarts=FAST))

        async def story() -> str:
            await supervisor.finished(child)
            return "went on"

        outcome = await supervisor.supervise(story())
    assert ends in (outcome.reason if isinstance(outcome, Stop) else str(outcome))
    assert len(reports) == 2
    assert "exited with code 3; restart 1 of 2 in 0.01 s; its log: " in reports[0]
    assert (tmp_path / "train.log").read_text().splitlines()[-1] == f"try {failures if failures < 3 else 2}"


async def test_a_child_that_ran_long_enough_gets_its_restarts_back(tmp_path: Path) -> None:
    """With `reset_s` 0 every exit is a first failure, so one restart is enough for any number of exits."""
    async with Supervisor(tmp_path) as supervisor:
        restarts = Restarts(most=1, first_pause_s=0.01, reset_s=0.0)
        command = dying_until(4, tmp_path / "train.log")
        child = supervisor.start(Program(name="train", command=command, may_finish=True, restarts=restarts))
        outcome = await supervisor.supervise(supervisor.finished(child))
    assert outcome is None
    assert (tmp_path / "train.log").read_text().splitlines()[-1] == "try 4"


@pytest.mark.parametrize("has_started", [False, True])
async def test_a_slow_start_that_fails_again_and_again_uses_up_the_restarts(tmp_path: Path, has_started: bool) -> None:
    """With `reset_s` 0 too: a process that takes minutes to fail has not run yet. Once it was up, it has."""
    async with Supervisor(tmp_path) as supervisor:
        restarts = Restarts(most=1, first_pause_s=0.01, reset_s=0.0)
        command = dying_until(4, tmp_path / "vllm.log")
        program = Program(name="vllm", command=command, may_finish=True, restarts=restarts)
        child = supervisor.start(program, slow=True)
        if has_started:
            supervisor.has_started(program)
        outcome = await supervisor.supervise(supervisor.finished(child))
    assert outcome is None if has_started else isinstance(outcome, Stop) and "after 1 restart" in outcome.reason


async def test_an_exit_code_that_no_restart_cures_stops_everything_with_its_meaning(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as supervisor:
        codes = {3: "another trainer has the run"}
        supervisor.start(Program(name="train", command=dying(3), restarts=FAST, final_codes=codes))
        stop = await supervisor.supervise(forever())
    assert isinstance(stop, Stop)
    assert stop.reason.endswith("exited with code 3: another trainer has the run")


def test_pauses_double_up_to_the_longest() -> None:
    restarts = Restarts(first_pause_s=1.0, longest_pause_s=5.0)
    assert [restarts.pause_s(failures) for failures in (1, 2, 3, 4)] == [1.0, 2.0, 4.0, 5.0]


async def test_phases_stop_in_their_order(tmp_path: Path) -> None:
    """A phase gets SIGTERM when the earlier ones are gone; each child prints when its signal came."""
    code = (
        "import signal, sys; print('ready', flush=True); signal.sigwait({signal.SIGTERM}); "
        f"open({str(tmp_path / 'order')!r}, 'a').write(sys.argv[1] + ' ')"
    )
    blocked = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}}); {code}"
    async with Supervisor(tmp_path, grace_s=GRACE_S) as supervisor:
        for phase, name in ((2, "serve"), (0, "train"), (1, "generate")):
            command = [sys.executable, "-c", blocked, name]
            await printed(supervisor.start(Program(name=name, command=command, stop_phase=phase)), "ready")
    assert (tmp_path / "order").read_text().split() == ["train", "generate", "serve"]


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Supervisor(tmp_path) as supervisor:
            supervisor.start(Program(name="engine-1", command=["/no/vllm", "serve"]))

    with pytest.raises(Invalid, match=r"engine-1 cannot be started: .*/no/vllm"):
        asyncio.run(scene())

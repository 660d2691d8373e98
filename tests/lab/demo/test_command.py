"""The command as a whole, over the real service and stand-ins for the programs that need a model."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console

from replaybuf.cli.up import UpOptions, run_up
from replaybuf.errors import Invalid
from replaybuf.lab.demo.command import PROGRAM, run_demo
from replaybuf.lab.demo.folder import DemoOptions, Folder, Request
from replaybuf.lab.demo.run_file import inline_toml, read_plan, write_run_file
from tests.waiting import eventually, still_running

STEPS = 10
STANDINS = Path(__file__).with_name("standins.py")
COMMAND = (
    "import sys; from pathlib import Path; from rich.console import Console\n"
    "from replaybuf.lab.demo.command import run_demo; from replaybuf.lab.demo.folder import DemoOptions\n"
    "root, steps, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]\n"
    "resume, keep_open = '--resume' in words, True if '--keep-open' in words else None\n"
    "as_json = '--json' in words\n"
    "options = DemoOptions(data_dir=root, steps=steps, resume=resume, keep_open=keep_open, json=as_json)\n"
    "sys.exit(run_demo(Console(width=200, stderr=as_json), options,\n"
    f"                  program=(sys.executable, {str(STANDINS)!r})))"
)
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start the demo on one folder; `train`: what the stand-in trainer does after half of its steps."""

    def start_demo(*options: str, train: str = "", init_model: str = "") -> subprocess.Popen[str]:
        behaviour = {"STANDIN_STEPS": str(STEPS), "STANDIN_TRAIN": train, "STANDIN_INIT_MODEL": init_model}
        environment = {**os.environ, **behaviour}
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(tmp_path / "demo"), str(STEPS), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    return start_demo


def finished(process: subprocess.Popen[str], typed: str | None = None) -> tuple[int, str]:
    """Type something and wait for the end; return exit code and output."""
    output, _ = process.communicate(typed, timeout=110)
    return process.returncode, output


def state_of(console: str) -> dict[str, Any]:
    """Ask the service of a console for the run that the console shows."""
    state: dict[str, Any] = httpx.get(console.replace("#", "v1"), timeout=30).raise_for_status().json()
    return state


def training(process: subprocess.Popen[str], root: Path) -> list[psutil.Process]:
    """Wait until the stand-in trainer hangs; return every process of the demo."""
    log = root / "logs" / "trainer.log"

    def hangs() -> bool:
        if process.poll() is not None:
            raise AssertionError(f"the trainer did not start: {process.communicate(timeout=10)[0]}")
        return log.exists() and "hangs" in log.read_text()

    eventually(hangs, 60)
    return psutil.Process(process.pid).children(recursive=True)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Read the output up to a line with `words`; return it."""
    if process.stdout is None:
        raise RuntimeError("no pipe")
    seen = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return "".join(seen)
    raise AssertionError("".join(seen))


def test_the_first_line_needs_no_slow_import() -> None:
    """Clients, engines and figures take a second of processor time to import: the demo says before that it starts."""
    slow = ("aiohttp", "httpx", "matplotlib", "numpy", "reasoning_gym", "redis", "torch", "transformers")
    code = f"import sys, replaybuf.lab.demo.command; print([name for name in {slow!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"


def test_a_demo_shows_the_warm_start_and_reports_and_leaves_no_process(start: Start, tmp_path: Path) -> None:
    """The console is open during the warm start, whose last log line is shown, and after the report until Enter.

    Then: exit code 0, the accuracy, all three files, the command that opens the console again, no process.
    """
    process = start("--keep-open", init_model="waits")
    output = read_until(process, "console of this run:")
    assert "starting the service" in output.splitlines()[0]
    console = output.split()[-1]
    output += read_until(process, "warm start: step 10: sampled accuracy 0.100")
    assert httpx.get(console).text.startswith("<!doctype html>")
    assert state_of(console)["waiting"]["reason"] == "no_producers"
    (tmp_path / "demo" / "go").touch()
    output += read_until(process, f"the console stays open: {console}")
    assert state_of(console)["state"] == "finished"
    processes = psutil.Process(process.pid).children(recursive=True)
    code, rest = finished(process, "\n")
    output += rest
    assert (code, still_running(processes, 60.0)) == (0, []), output
    assert f"open the console again: {sys.executable} -m replaybuf serve --data-dir {tmp_path / 'demo'}" in output
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["accuracy"] == {"sampled": {"before": 0.5, "after": 0.5}, "greedy": {"before": 1.0, "after": 1.0}}
    assert (report["steps"], report["sessions"]) == (STEPS, 1)
    for name in ("report.json", "report.png", "report.html"):
        assert str(tmp_path / "demo" / name) in output
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "What was measured" in page and ">Held-out: held-out, sampled<" in page and ">Reward<" in page
    assert not re.search(r"https?://|@import|url\(|<script|<link", page), "the page needs no other file"
    assert "this is not RL" in output
    assert "Sampled accuracy (temperature 1) did not change measurably: from 50.0 to 50.0 %" in " ".join(output.split())
    assert report["evaluations"][-1]["examples"][0] == {
        "prompt": "abc",
        "answer": "cba",
        "greedy": "cba",
        "greedy_right": True,
        "sampled": ["cba", "aaa", "cba", "aaa"],
        "sampled_right": [True, False, True, False],
    }
    assert {"service", "valkey", "engine", "demo"} <= report["peak_memory_bytes"].keys()
    again = subprocess.run(
        [sys.executable, "-m", "replaybuf", "demo", "--resume", "--json", "--data-dir", tmp_path / "demo"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (again.returncode, json.loads(again.stdout)) == (0, report), again.stderr
    assert "is finished; its report" in again.stderr


def test_the_file_of_a_demo_is_one_that_up_accepts(tmp_path: Path) -> None:
    """With the model in place, `up --dry-run` finds no problem, and its run is that of the demo."""
    folder = Folder(tmp_path)
    folder.create()
    write_run_file(folder, Request(seed=3, steps=7))
    folder.model.mkdir()
    folder.prompts.touch()
    shown = io.StringIO()
    assert run_up(Console(file=shown, width=1000), folder.run_file, UpOptions(dry_run=True)) == 0
    assert "max_steps" not in shown.getvalue() and "replaybuf train --url http://127.0.0.1:" in shown.getvalue()
    plan, _ = read_plan(folder, 8123, PROGRAM)
    assert (plan.config.max_steps, plan.config.seed, plan.config.group_size) == (7, 3, 8)
    assert plan.console == "http://127.0.0.1:8123/#/runs/demo"


def test_the_file_of_a_demo_has_its_strategy(tmp_path: Path) -> None:
    """Options may be nested, as those of the mixture are."""
    options = {"max_uses": 4, "fresh_fraction": 0.25, "order": "fifo"}
    folder = Folder(tmp_path)
    folder.create()
    write_run_file(folder, Request(seed=0, steps=7, strategy="replay", strategy_options=options))
    strategy = read_plan(folder, None, PROGRAM)[0].config.strategy
    assert (strategy.name, strategy.options | options) == ("replay", strategy.options)
    nested = {"sources": {"a b": [1, 0.5, True, "x\n"], "": {}}}
    assert tomllib.loads(f"x = {inline_toml(nested)}") == {"x": nested}


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("replaay", None, "replaay.*installed.*replay"),
        ("replay", '{"max_uses": 0}', "max_uses"),
        ("replay", '{"max_usses": 2}', "max_usses"),
        ("replay", '{"max_uses": null}', "null"),
        (None, '{"max_staleness": -1}', "max_staleness"),
    ],
)
def test_a_wrong_strategy_is_named_before_anything_starts(
    tmp_path: Path, strategy: str | None, options: str | None, message: str
) -> None:
    wrong = DemoOptions(data_dir=tmp_path / "demo", strategy=strategy, strategy_options=options)
    with pytest.raises(Invalid, match=message):
        run_demo(Console(file=io.StringIO()), wrong)
    assert not (tmp_path / "demo").exists()


def test_a_broken_file_of_a_demo_is_named_with_its_problems(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.create()
    write_run_file(folder, Request(seed=0, steps=7))
    text = folder.run_file.read_text()
    folder.run_file.write_text(text.replace("group_size = 8", "group_size = 0").replace("wait_ms", "wait_s"))
    with pytest.raises(
        Invalid, match=r"run\.toml cannot be used: run\.group_size .*; trainer\.reader_options\.wait_s is not"
    ):
        read_plan(folder, None, PROGRAM)


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.create()
    write_run_file(folder, Request(seed=0, steps=7))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Invalid, match=rf"service\.port is {port}: .*choose another port \(0 = a free port\)"):
            read_plan(folder, port, PROGRAM)


def test_a_demo_whose_child_fails_says_why_and_how_to_continue(tmp_path: Path) -> None:
    """Restarts and the last lines of a log: `tests/launch/test_up.py`, whose session the demo inherits."""
    shown = io.StringIO()
    options = DemoOptions(data_dir=tmp_path / "demo", steps=STEPS)
    failing = (sys.executable, "-c", "print('the disk is full'); raise SystemExit(7)")
    assert run_demo(Console(file=shown, width=200), options, program=failing) == 1
    output = shown.getvalue()
    assert re.search(r"demo stopped: service \(pid \d+\) exited with code 7", output), output
    assert "  the disk is full" in output
    assert f"continue with: {sys.executable} -m replaybuf demo --resume --data-dir {tmp_path / 'demo'}" in output


@pytest.mark.timeout(300)  # two starts of the demo, 10 s alone; many times that on a loaded machine
def test_a_demo_resumes_after_kill_9(start: Start, tmp_path: Path) -> None:
    """The guard ends every process. `--resume` continues from the checkpoint without a second warm start.

    The report counts both starts. Signals: `tests/launch/test_up.py`, whose session the demo inherits.
    """
    process = start(train="hangs")
    processes = training(process, tmp_path / "demo")
    process.kill()
    process.communicate(timeout=10)

    process = start("--resume")
    output = read_until(process, "starting the service")
    assert still_running(processes, 0.0) == [], "the folder is free only after the guard has ended them"
    code, rest = finished(process)
    output += rest
    assert code == 0, output
    assert f"resuming: {STEPS // 2} of {STEPS} steps are done" in output
    assert f"trainer resumed at step {STEPS // 2}, its newest checkpoint" in output
    assert "warm start" not in output.split("accuracy")[0]
    assert "2, 1 killed: up to 5 s of each are not counted" in output
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["curve"]["step"] == list(range(STEPS))
    assert (report["sessions"], report["killed"]) == (2, 1)
    assert report["phases"]["warm start"] > 0

"""The data folder: a new one is made, an existing one is never touched unasked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import Conflict, Invalid
from replaybuf.lab.demo.folder import DEFAULT_STEPS, DemoOptions, Folder, Request, open_folder


def opened(options: DemoOptions) -> Request:
    """Open the folder and release it again."""
    _, request, lock = open_folder(options)
    os.close(lock)
    return request


def new(root: Path, *, seed: int | None = None, steps: int | None = None) -> Request:
    """Start a demo there and end it at once."""
    return opened(DemoOptions(data_dir=root, seed=seed, steps=steps))


def resume(root: Path, *, seed: int | None = None, steps: int | None = None) -> Request:
    """Resume a demo in its folder and release the folder."""
    return opened(DemoOptions(data_dir=root, seed=seed, steps=steps, resume=True))


def test_a_new_folder_gets_the_defaults(tmp_path: Path) -> None:
    """Seed 0 and the default number of steps, written down for a resume."""
    assert new(tmp_path / "demo") == Request(0, DEFAULT_STEPS)
    assert resume(tmp_path / "demo") == Request(0, DEFAULT_STEPS)


def test_an_existing_demo_is_rejected_with_its_state_and_advice(tmp_path: Path) -> None:
    """Nothing is lost by starting the demo twice."""
    new(tmp_path, seed=3, steps=40)
    with pytest.raises(Conflict) as caught:
        new(tmp_path, seed=5)
    program = f"{sys.executable} -m replaybuf demo"
    assert str(caught.value) == (
        f"{tmp_path} holds an unfinished demo (seed 3, 40 steps); "
        f"continue it: {program} --resume --data-dir {tmp_path}; "
        f"delete it and start again: {program} --overwrite --seed 5 --data-dir {tmp_path}; "
        "or choose another --data-dir"
    )


def test_a_finished_demo_is_called_finished(tmp_path: Path) -> None:
    """The message distinguishes a demo with a report from a stopped demo."""
    new(tmp_path)
    Folder(tmp_path).report_json.write_text("{}")
    with pytest.raises(Conflict, match="holds a finished demo"):
        new(tmp_path)


def test_overwrite_deletes_a_demo_and_nothing_else(tmp_path: Path) -> None:
    """`--overwrite` empties a demo's folder; a folder of something else stays as it is."""
    demo, other = tmp_path / "demo", tmp_path / "other"
    new(demo, seed=1)
    (demo / "logs" / "serve.log").write_text("old")
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    assert opened(DemoOptions(data_dir=demo, seed=2, overwrite=True)).seed == 2
    assert not (demo / "logs" / "serve.log").exists()
    with pytest.raises(Conflict, match="is not the folder of a demo"):
        opened(DemoOptions(data_dir=other, seed=2, overwrite=True))
    assert (other / "thesis.txt").read_text() == "years of work"


def test_resuming_keeps_seed_and_steps_and_refuses_others(tmp_path: Path) -> None:
    """A resumed demo is the same demo."""
    new(tmp_path, seed=1, steps=40)
    assert resume(tmp_path) == Request(1, 40)
    assert resume(tmp_path, seed=1, steps=40) == Request(1, 40)
    with pytest.raises(Invalid, match=r"--steps is 50; the demo in .* was started with 40"):
        resume(tmp_path, steps=50)


def test_a_demo_keeps_its_strategy_and_refuses_another_in_a_resume(tmp_path: Path) -> None:
    """A strategy without options has its own defaults; options alone are those of the default strategy."""
    asked = DemoOptions(data_dir=tmp_path / "a", strategy="replay", strategy_options='{"max_uses": 4}')
    assert opened(asked) == resume(tmp_path / "a") == Request(0, DEFAULT_STEPS, "replay", {"max_uses": 4})
    with pytest.raises(Invalid, match=r"--strategy is on-policy; the demo in .* was started with replay"):
        opened(DemoOptions(data_dir=tmp_path / "a", strategy="on-policy", resume=True))
    assert DemoOptions(strategy="replay").request().strategy_options == {}
    two = DemoOptions(strategy_options='{"max_staleness": 2}').request()
    assert (two.strategy, two.strategy_options) == ("one-step-off-policy", {"max_staleness": 2})


@pytest.mark.parametrize("content", [b"", b'{"seed": 1, "st', b'{"seed": 1}', b"\xff"])
def test_a_broken_demo_json_is_named_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    """A resume and a new start report it; `--overwrite` repairs it."""
    new(tmp_path, seed=3)
    (tmp_path / "demo.json").write_bytes(content)
    for begin in (resume, new):
        with pytest.raises(Invalid, match=r"demo\.json is broken: .* demo --overwrite --data-dir") as caught:
            begin(tmp_path)
        assert caught.value.value == str(tmp_path)
    opened(DemoOptions(data_dir=tmp_path, seed=4, overwrite=True))
    assert resume(tmp_path) == Request(4, DEFAULT_STEPS)


def test_demo_json_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed during the write leaves no partial file."""

    def killed(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", killed)
        with pytest.raises(KeyboardInterrupt):
            new(tmp_path)
    assert not (tmp_path / "demo.json").exists()
    assert new(tmp_path, seed=1) == Request(1, DEFAULT_STEPS)


def test_a_resume_without_a_demo_is_rejected(tmp_path: Path) -> None:
    """A folder without a demo is named as such and not created."""
    with pytest.raises(Invalid, match="holds no demo to resume"):
        resume(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps is 0; the minimum is 1"),
        ({"seed": -1}, "--seed is -1; the minimum is 0"),
        ({"resume": True, "overwrite": True}, "exclude each other"),
        ({"strategy_options": "[1]"}, r"--strategy-options is '\[1\]': .*; give a JSON object"),
    ],
)
def test_options_out_of_bounds_are_rejected(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """Each is named with its value and bound, before anything is written."""
    with pytest.raises(Invalid, match=message):
        opened(DemoOptions(data_dir=tmp_path / "demo", **options))
    assert not (tmp_path / "demo").exists()


def test_two_demos_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second demo is rejected while the first demo or its guard runs."""
    monkeypatch.setattr("replaybuf.launch.guard.LOCK_WAIT_S", 0.1)
    new(tmp_path)
    holder = (
        "import sys; from pathlib import Path; from replaybuf.lab.demo.folder import DemoOptions, open_folder\n"
        "open_folder(DemoOptions(data_dir=Path(sys.argv[1]), resume=True))\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        if process.stdout is None or process.stdin is None:
            raise RuntimeError("no pipe")
        assert process.stdout.readline() == "held\n"
        with pytest.raises(Conflict, match="is in use by another demo"):
            resume(tmp_path)
        process.stdin.close()
        process.wait(timeout=20)
    assert resume(tmp_path) == Request(0, DEFAULT_STEPS)

"""The demo's data folder: what lies where, what was asked for, and who holds it.

::

    DATA/
      demo.json        seed and number of steps, written first; makes the folder a demo's
      lock             held while a demo, or its guard, is alive
      model/           initial model, prompts.jsonl, held_out.jsonl
      serve/           the service's data: the embedded Valkey and its append-only file
      checkpoints/     the trainer's
      weights/         what the trainer publishes to the engine
      metrics/         train.jsonl, generate.jsonl, evaluations.jsonl, sessions.jsonl
      logs/            NAME.log, one per process
      report.json, report.png, report.html
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from replaybuf.errors import Conflict, Invalid
from replaybuf.program import command_line

DEFAULT_DATA_DIR = Path(".replaybuf/demo")
DEFAULT_SEED = 0
DEFAULT_STEPS = 300
LOCK_WAIT_S = 5.0
POLL_S = 0.1


def demo_command(root: Path, *options: str) -> str:
    """Return the shell command of a demo in the folder `root`."""
    where = () if root == DEFAULT_DATA_DIR else ("--data-dir", str(root))
    return command_line("demo", *options, *where)


class Request(msgspec.Struct, frozen=True):
    """What one demo does from its first start to its end, across resumes."""

    seed: int
    steps: int


class Folder:
    """Paths of one data folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.request = root / "demo.json"
        self.unfinished_request = root / "demo.part"
        self.lock = root / "lock"
        self.model = root / "model"
        self.prompts = self.model / "prompts.jsonl"
        self.held_out = self.model / "held_out.jsonl"
        self.serve = root / "serve"
        self.checkpoints = root / "checkpoints"
        self.weights = root / "weights"
        self.logs = root / "logs"
        self.train_metrics = root / "metrics" / "train.jsonl"
        self.generate_metrics = root / "metrics" / "generate.jsonl"
        self.evaluations = root / "metrics" / "evaluations.jsonl"
        self.sessions = root / "metrics" / "sessions.jsonl"
        self.report_json = root / "report.json"
        self.report_png = root / "report.png"
        self.report_html = root / "report.html"

    def create(self) -> None:
        """Make the folders that the demo itself writes to."""
        for folder in (self.root, self.logs, self.train_metrics.parent):
            folder.mkdir(parents=True, exist_ok=True)


def take(folder: Folder, *, seed: int | None, steps: int | None, resume: bool, overwrite: bool) -> tuple[Request, int]:
    """Make a new data folder, or take an existing one up again.

    Returns what is asked of the demo and the file descriptor whose lock keeps other demos out as long as it is open.
    Raises `Invalid` where the options contradict each other or the folder, `Conflict` where something is in the way.
    """
    _check_options(seed=seed, steps=steps, resume=resume, overwrite=overwrite)
    if resume:
        request = _resumed(folder, seed=seed, steps=steps)
        return request, _hold(folder)
    if not (overwrite and folder.request.is_file()):
        _check_free(folder, _words(seed=seed, steps=steps))
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Invalid(
            f"data folder {folder.root} cannot be made: {error.strerror}", name="--data-dir", value=str(folder.root)
        ) from error
    descriptor = _hold(folder)
    request = Request(DEFAULT_SEED if seed is None else seed, DEFAULT_STEPS if steps is None else steps)
    try:
        _empty(folder)
        _write(folder, request)
        folder.create()
    except BaseException:
        os.close(descriptor)
        raise
    return request, descriptor


def _write(folder: Folder, request: Request) -> None:
    """Write demo.json, whole or not at all: it is what makes the folder a demo's."""
    folder.unfinished_request.write_bytes(msgspec.json.encode(request))
    folder.unfinished_request.rename(folder.request)


def _words(**options: int | None) -> list[str]:
    """Write options as typed, without those that were not given."""
    return [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]


def _check_options(*, seed: int | None, steps: int | None, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise Invalid("--resume and --overwrite exclude each other", name="--overwrite", value=True, bound=False)
    if steps is not None and steps < 1:
        raise Invalid(f"--steps is {steps}; at least 1 is needed", name="--steps", value=steps, bound=1)
    if seed is not None and seed < 0:
        raise Invalid(f"--seed is {seed}; at least 0 is needed", name="--seed", value=seed, bound=0)


def _hold(folder: Folder) -> int:
    """Lock the folder. A demo that was just killed still holds it for the moment in which its guard clears up."""
    descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_WAIT_S
    while not _locked(descriptor):
        if time.monotonic() > deadline:
            os.close(descriptor)
            raise Conflict(
                f"{folder.root} is in use by another demo; stop that one, or give another --data-dir",
                name="--data-dir",
                value=str(folder.root),
                bound="a folder not in use",
            )
        time.sleep(POLL_S)
    return descriptor


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _resumed(folder: Folder, *, seed: int | None, steps: int | None) -> Request:
    if not folder.request.is_file():
        raise Invalid(
            f"{folder.root} holds no demo to resume; start one without --resume",
            name="--data-dir",
            value=str(folder.root),
            bound="a folder with demo.json",
        )
    request = _read(folder)
    for name, asked, stored in (("--seed", seed, request.seed), ("--steps", steps, request.steps)):
        if asked is not None and asked != stored:
            raise Invalid(
                f"{name} is {asked}; the demo in {folder.root} was started with {stored}, and resuming keeps it",
                name=name,
                value=asked,
                bound=stored,
            )
    return request


def _read(folder: Folder) -> Request:
    try:
        return msgspec.json.decode(folder.request.read_bytes(), type=Request)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(
            f"{folder.request} is broken: {error}; write seed and steps of that demo into it to resume, as in "
            f"{msgspec.json.encode(Request(DEFAULT_SEED, DEFAULT_STEPS)).decode()}; "
            f"or delete the demo and start anew with: {demo_command(folder.root, '--overwrite')}; "
            "or give another --data-dir",
            name="--data-dir",
            value=str(folder.root),
            bound="a folder whose demo.json is whole",
        ) from error


def _check_free(folder: Folder, asked: Sequence[str]) -> None:
    if not folder.root.exists() or (folder.root.is_dir() and not _contents(folder)):
        return
    where: dict[str, Any] = {"name": "--data-dir", "value": str(folder.root), "bound": "a new or empty folder"}
    if not folder.request.is_file():
        raise Conflict(f"{folder.root} exists and is not a demo's; give another --data-dir", **where)
    request = _read(folder)
    state = "a finished demo" if folder.report_json.is_file() else "an unfinished demo"
    raise Conflict(
        f"{folder.root} holds {state} (seed {request.seed}, {request.steps} steps); "
        f"go on with: {demo_command(folder.root, '--resume')}; "
        f"delete it and start anew with: {demo_command(folder.root, '--overwrite', *asked)}; "
        "or give another --data-dir",
        **where,
    )


def _contents(folder: Folder) -> list[Path]:
    return [path for path in folder.root.iterdir() if path not in (folder.lock, folder.unfinished_request)]


def _empty(folder: Folder) -> None:
    for path in _contents(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

"""The data folder of a demo: its paths, its request and its lock.

::

    DATA/
      demo.json        seed, number of steps and strategy, written first; marks the folder as a demo
      run.toml         the run with its hyperparameters, as `replaybuf up` reads it
      lock             locked while a demo, or its guard, is alive
      model/           initial model, prompts.jsonl, held_out.jsonl
      service/         data of the service: the embedded Valkey and its append-only file
      checkpoints/     checkpoints of the trainer
      weights/         weights that the trainer publishes to the engine
      metrics/         trainer.jsonl, generator.jsonl, evaluations.jsonl, sessions.jsonl
      logs/            NAME.log, one per process
      report.json, report.png, report.html
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from cyclopts.types import Port

from replaybuf.errors import Conflict, Invalid, counted
from replaybuf.files import CONFIG_BYTES, read_bounded
from replaybuf.launch.guard import lock_folder
from replaybuf.program import command_line

DEFAULT_DATA_DIR = Path(".replaybuf/demo")
CHARACTERS = Path(__file__).with_name("characters")
"""Folder with the tokenizer of the demo's model, for a console that is open before there is a model."""
PROMPTS, HELD_OUT = "prompts.jsonl", "held_out.jsonl"
"""Training prompts and held-out problems in the folder of a model."""
DEFAULT_SEED, DEFAULT_STEPS = 0, 300
DEFAULT_STRATEGY, DEFAULT_STRATEGY_OPTIONS = "one-step-off-policy", {"max_staleness": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of `replaybuf demo`. The docstring of each field is its help text."""

    data_dir: Path = DEFAULT_DATA_DIR
    """Folder for all files of the demo."""
    seed: int | None = None
    """Seed of the model, the problems and the requests (default 0). Two demos with one seed still differ in timing."""
    steps: int | None = None
    """Number of optimizer steps (default 300). On 2 cores a step takes about 1 s, and the warm start about a minute."""
    strategy: str | None = None
    """Strategy of the run (default one-step-off-policy); "replaybuf strategies list" has the others."""
    strategy_options: Annotated[str | None, Parameter(show_default=False)] = None
    """Options of the strategy as a JSON object, such as {"max_uses": 4, "max_staleness": 4}. The default is that of the
    strategy, and {"max_staleness": 1} without --strategy."""
    resume: Annotated[bool, Parameter(negative="")] = False
    """Continue the demo in the data folder with the same seed, number of steps and strategy."""
    overwrite: Annotated[bool, Parameter(negative="")] = False
    """Delete the demo in the data folder first."""
    port: Port | None = None
    """Port of the service and its console; by default a free port."""
    keep_open: bool | None = None
    """Leave service and console open after the report, until Enter or Ctrl-C. The default is yes in a terminal."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print the report as JSON when the demo is done, as in report.json. Its progress goes to standard error."""

    def check(self) -> None:
        """Raise `Invalid` for values out of bounds and for contradictions."""
        if self.resume and self.overwrite:
            raise Invalid("--resume and --overwrite exclude each other", name="--overwrite", value=True, bound=False)
        for name, value, least in (("--steps", self.steps, 1), ("--seed", self.seed, 0)):
            if value is not None and value < least:
                raise Invalid(f"{name} is {value}; the minimum is {least}", name=name, value=value, bound=least)
        self.read_strategy_options()

    def read_strategy_options(self) -> dict[str, Any] | None:
        """Return the options of the strategy as they were typed; None without them. Raises `Invalid`."""
        if self.strategy_options is None:
            return None
        try:
            return msgspec.json.decode(self.strategy_options, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
            raise Invalid(
                f"--strategy-options is {self.strategy_options!r}: {error}; give a JSON object, as in "
                '{"max_staleness": 2}',
                name="--strategy-options",
                value=self.strategy_options,
            ) from error

    def request(self) -> Request:
        """Return what a new demo runs. Raises `Invalid`."""
        options = self.read_strategy_options()
        if options is None:
            options = DEFAULT_STRATEGY_OPTIONS if self.strategy is None else {}
        return Request(
            seed=DEFAULT_SEED if self.seed is None else self.seed,
            steps=self.steps or DEFAULT_STEPS,
            strategy=self.strategy or DEFAULT_STRATEGY,
            strategy_options=options,
        )

    def as_words(self) -> list[str]:
        """Return seed, steps and strategy as they were typed."""
        typed = {
            "--seed": self.seed,
            "--steps": self.steps,
            "--strategy": self.strategy,
            "--strategy-options": self.strategy_options,
        }
        return [word for name, value in typed.items() if value is not None for word in (name, str(value))]


class Request(msgspec.Struct, frozen=True):
    """Seed, number of steps and strategy of one demo; they stay the same across resumes."""

    seed: int
    steps: int
    strategy: str = DEFAULT_STRATEGY
    strategy_options: dict[str, Any] = msgspec.field(default_factory=lambda: dict(DEFAULT_STRATEGY_OPTIONS))


class Folder:
    """Paths of one data folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.request = root / "demo.json"
        self.unfinished_request = root / "demo.part"
        self.run_file = root / "run.toml"
        self.lock = root / "lock"
        self.model = root / "model"
        self.prompts = self.model / PROMPTS
        self.held_out = self.model / HELD_OUT
        self.service = root / "service"
        self.checkpoints = root / "checkpoints"
        self.weights = root / "weights"
        self.logs = root / "logs"
        self.train_metrics = root / "metrics" / "trainer.jsonl"
        self.generator_metrics = root / "metrics" / "generator.jsonl"
        self.evaluations = root / "metrics" / "evaluations.jsonl"
        self.sessions = root / "metrics" / "sessions.jsonl"
        self.report_json = root / "report.json"
        self.report_png = root / "report.png"
        self.report_html = root / "report.html"
        self.reports = (self.report_html, self.report_png, self.report_json)

    def create(self) -> None:
        """Create the folders that the demo itself writes to."""
        for folder in (self.root, self.logs, self.train_metrics.parent):
            folder.mkdir(parents=True, exist_ok=True)

    def contents(self) -> list[Path]:
        """List the files and folders of a demo, without the lock."""
        return [path for path in self.root.iterdir() if path not in (self.lock, self.unfinished_request)]


def open_folder(options: DemoOptions) -> tuple[Folder, Request, int]:
    """Create a data folder, or open an existing one to resume it.

    Returns the folder, its request and the file descriptor of its lock: no other demo uses the folder while that is
    open. Raises `Invalid` if the options contradict each other or the folder, `Conflict` if the folder is in use.
    """
    options.check()
    folder = Folder(options.data_dir)
    if options.resume:
        return folder, _resumed_request(folder, options), _lock(folder)
    if not (options.overwrite and folder.request.is_file()):
        _check_unused(folder, options)
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        detail = f"data folder {folder.root} cannot be created: {error.strerror}"
        raise Invalid(detail, name="--data-dir", value=str(folder.root)) from error
    lock = _lock(folder)
    request = options.request()
    try:
        for path in folder.contents():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.unfinished_request.write_bytes(msgspec.json.encode(request))
        folder.unfinished_request.rename(folder.request)  # complete or not there: it marks the folder as a demo
        folder.create()
    except BaseException:
        os.close(lock)
        raise
    return folder, request, lock


def demo_command(root: Path, *options: str) -> str:
    """Return the shell command of a demo in the folder `root`."""
    where = () if root == DEFAULT_DATA_DIR else ("--data-dir", str(root))
    return command_line("demo", *options, *where)


def _lock(folder: Folder) -> int:
    detail = f"{folder.root} is in use by another demo; stop that demo, or choose another --data-dir"
    return lock_folder(folder.lock, Conflict(detail, name="--data-dir", value=str(folder.root)))


def _resumed_request(folder: Folder, options: DemoOptions) -> Request:
    if not folder.request.is_file():
        detail = f"{folder.root} holds no demo to resume; start one without --resume"
        raise Invalid(detail, name="--data-dir", value=str(folder.root), bound="a folder with demo.json")
    request = _read_request(folder)
    for name, value, stored in (
        ("--seed", options.seed, request.seed),
        ("--steps", options.steps, request.steps),
        ("--strategy", options.strategy, request.strategy),
        ("--strategy-options", options.read_strategy_options(), request.strategy_options),
    ):
        if value is not None and value != stored:
            raise Invalid(
                f"{name} is {value}; the demo in {folder.root} was started with {stored}, and a resume keeps it",
                name=name,
                value=value,
                bound=stored,
            )
    return request


def _read_request(folder: Folder) -> Request:
    try:
        return msgspec.json.decode(read_bounded(folder.request, CONFIG_BYTES), type=Request)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        example = msgspec.json.encode(Request(DEFAULT_SEED, DEFAULT_STEPS)).decode()
        raise Invalid(
            f"{folder.request} is broken: {error}; to resume, write seed and steps of that demo into it, as in "
            f"{example}; to delete it and start again: {demo_command(folder.root, '--overwrite')}",
            name="--data-dir",
            value=str(folder.root),
            bound="a demo.json with seed and steps",
        ) from error


def _check_unused(folder: Folder, options: DemoOptions) -> None:
    """Raise `Conflict` for a folder with a demo or with other files in it."""
    if not folder.root.exists() or (folder.root.is_dir() and not folder.contents()):
        return
    where: dict[str, Any] = {"name": "--data-dir", "value": str(folder.root), "bound": "a new or empty folder"}
    if not folder.request.is_file():
        raise Conflict(f"{folder.root} exists and is not the folder of a demo; choose another --data-dir", **where)
    request = _read_request(folder)
    state = "a finished demo" if folder.report_json.is_file() else "an unfinished demo"
    raise Conflict(
        f"{folder.root} holds {state} (seed {request.seed}, {counted(request.steps, 'step')}); "
        f"continue it: {demo_command(folder.root, '--resume')}; "
        f"delete it and start again: {demo_command(folder.root, '--overwrite', *options.as_words())}; "
        "or choose another --data-dir",
        **where,
    )

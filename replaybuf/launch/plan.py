"""What one file starts: programs with their exact commands, and addresses."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from replaybuf.launch.supervisor import Program
from replaybuf.listening import url_here
from replaybuf.wire.config import RunConfig

SECRET = re.compile(r"(token|key|secret|password|redis.url)$", re.IGNORECASE)
"""End of the names of flags and environment variables whose values are hidden."""
HIDDEN = "***"
QUIET = {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
"""Environment of every process, for complete log lines without colours."""


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Host and port at which a part listens, with the key of the file that sets the port; a URL for clients."""

    where: str
    host: str
    port: int

    @property
    def url(self) -> str:
        """URL for clients on this machine."""
        return url_here(self.host, self.port)


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """An engine by name and URL; `program` None: it runs already."""

    name: str
    url: str
    program: Program | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that one file starts, in the order of the fields; `trainer` None: a person starts it."""

    folder: Path
    data_dir: Path
    run: str
    config: RunConfig
    url: str
    addresses: Sequence[Address]
    service: Program
    engines: Sequence[Engine]
    trainer: Program | None
    generators: Sequence[Program]
    evaluation: Program | None
    evaluate_at_start: bool
    evaluate_at_end: bool
    trainer_metrics: Path | None
    generator_metrics: Sequence[Path]
    start_timeout_s: float
    stop_timeout_s: float

    @property
    def report(self) -> Path:
        """File of the report."""
        return self.data_dir / "report.html"

    @property
    def logs(self) -> Path:
        """Folder of the logs."""
        return self.data_dir / "logs"

    @property
    def console(self) -> str:
        """Address of the run's page in the console; empty if the service has no TCP port."""
        return f"{self.url}/#/runs/{self.run}" if self.url.startswith("http") else ""

    def programs(self) -> Iterator[Program]:
        """Yield all programs in the order of their start."""
        yield self.service
        yield from (engine.program for engine in self.engines if engine.program)
        yield from (program for program in (self.evaluation, self.trainer) if program)
        yield from self.generators

    def described(self) -> dict[str, Any]:
        """Return the plan for `--dry-run --json`, without secrets."""
        return {
            "run": self.run,
            "url": self.url,
            "data_dir": str(self.data_dir),
            "folder": str(self.folder),
            "engines": {engine.name: engine.url for engine in self.engines},
            "trainer": "file" if self.trainer else "mine",
            "processes": [
                {
                    "name": program.name,
                    "command": shown_words(program.command),
                    "environment": shown_environment(program),
                    "log": str(self.logs / f"{program.name}.log"),
                }
                for program in self.programs()
            ],
        }

    def lines(self) -> Iterator[str]:
        """Yield the plan as text: shell commands that a person could paste, without secrets."""
        yield f"run {self.run} at {self.url}, data in {self.data_dir}"
        yield from (f"engine {engine.name} runs at {engine.url}" for engine in self.engines if not engine.program)
        yield f"cd {shlex.quote(str(self.folder))}"
        for program in self.programs():
            variables = [f"{name}={shlex.quote(value)}" for name, value in shown_environment(program).items()]
            yield f"# {program.name}"
            yield " ".join([*variables, shlex.join(shown_words(program.command))])
        if self.trainer is None:
            yield from self.trainer_lines()

    def trainer_lines(self) -> Iterator[str]:
        """Yield what a person's own trainer needs."""
        yield f"your trainer: address {self.url}, run {self.run}"
        yield f"  from Python: Client({self.url!r}, {self.run!r})"
        yield f"  from a shell: export REPLAYBUF_URL={self.url} REPLAYBUF_RUN={self.run}"


def shown_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command; a value after a flag that names a secret is hidden."""
    flags = ["", *words]
    return [
        HIDDEN if flag.startswith("--") and SECRET.search(flag) and not word.startswith("--") else word
        for flag, word in zip(flags, words, strict=False)
    ]


def shown_environment(program: Program) -> dict[str, str]:
    """Return the environment that only this program gets; secrets are hidden."""
    return {
        name: HIDDEN if SECRET.search(name) else value
        for name, value in program.environment.items()
        if QUIET.get(name) != value
    }

"""Derive a plan from a file: addresses, folders and engines of one section become options of the others.

`Planner.plan` returns the plan, or None with all problems in `problems`. A section with wrong keys is not derived, but
the others are still checked against its names.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET

from replaybuf.errors import Invalid
from replaybuf.kernel.strategy.plugin_set import resolve_config
from replaybuf.launch import options
from replaybuf.launch.crosschecks import cross_problems
from replaybuf.launch.file import decode_file
from replaybuf.launch.machine import file_problems, program_problem
from replaybuf.launch.plan import QUIET, Address, Engine, Plan
from replaybuf.launch.sections import (
    FIRST_ENGINE_PORT,
    ClientSection,
    EngineSection,
    EvaluationSection,
    GeneratorSection,
    Section,
    TrainerSection,
)
from replaybuf.launch.supervisor import Program
from replaybuf.wire.config import RunConfig

PROGRAM = (sys.executable, "-m", "replaybuf")
FENCED_EXIT_CODE = 3
TRAINER_PHASE, GENERATOR_PHASE, ENGINE_PHASE, SERVICE_PHASE = range(4)
"""Order of the stop."""


class Planner:
    """Builder of one plan. `folder`: of the file; relative paths start there.

    `program`: the words that run a command of replaybuf; `made_later`: folder that may be missing until the service
    runs.
    """

    def __init__(
        self,
        tables: Mapping[str, Any],
        folder: Path,
        *,
        has_token: bool = False,
        program: Sequence[str] = PROGRAM,
        made_later: Path | None = None,
    ) -> None:
        self._decoded = decode_file(tables)
        self._file, self._broken = self._decoded.sections, self._decoded.broken
        self._folder = folder.resolve()
        self._data_dir = (self._folder / self._file.data_dir).resolve()
        self._has_token = has_token
        self._words = tuple(program)
        self._made_later = made_later
        self.problems = list(self._decoded.problems)
        self.addresses: list[Address] = []

    def plan(self) -> Plan | None:
        """Return the plan; None if there are problems."""
        file, run = self._file, self._file.run.name
        config = self._config()
        service, url = self._service()
        sections = [] if "engines" in self._broken else file.engines
        engines = [
            engine
            for place, (name, section) in enumerate(zip(file.engine_names, sections, strict=False), 1)
            if (engine := self._engine(f"engines[{place}]", name, section, FIRST_ENGINE_PORT + place - 1))
        ]
        self._engines = {engine.name: engine.url for engine in engines}
        self.problems += cross_problems(self._decoded, has_token=self._has_token)
        common = {"url": url, "run": run}
        generator_sections = {} if "generator" in self._broken else file.generators
        generators = [self._generator(common, where, section) for where, section in generator_sections.items()]
        trainer = None
        if isinstance(file.trainer, TrainerSection) and "trainer" not in self._broken:
            trainer = self._trainer(common, file.trainer)
        evaluation = None
        if file.evaluation is not UNSET and not self._broken & {"evaluation", "generator"}:
            evaluation = self._evaluation(common, file.evaluation, next(iter(generator_sections.values()), None))
        if self.problems or config is None or service is None:
            return None
        return Plan(
            folder=self._folder,
            data_dir=self._data_dir,
            run=run,
            config=config,
            url=url,
            addresses=self.addresses,
            service=service,
            engines=engines,
            trainer=trainer,
            generators=[program for program in generators if program],
            evaluation=evaluation,
            evaluate_at_start=file.evaluation is not UNSET and file.evaluation.at_start,
            evaluate_at_end=file.evaluation is not UNSET and file.evaluation.at_end,
            trainer_metrics=self._metrics_file(trainer),
            generator_metrics=[path for program in generators if (path := self._metrics_file(program))],
            start_timeout_s=file.start_timeout_s,
            stop_timeout_s=file.stop_timeout_s,
        )

    # ------------------------------------------------------------------ sections

    def _config(self) -> RunConfig | None:
        if "run" in self._broken:
            return None
        try:
            return resolve_config(self._file.run.config)[0]
        except Invalid as error:
            self.problems.append(f"run: {error}")
            return None

    def _service(self) -> tuple[Program | None, str]:
        """Return the program of the service and its URL."""
        if "service" in self._broken:
            return None, ""
        section = self._file.service
        values = {"data_dir": str(self._data_dir / "service"), **section.options}
        if values.get("tcp", True):
            address = self._address("service.port", values, 8900)
            values["port"], url = address.port, address.url
        else:
            url = f"unix:{(self._folder / values.get('uds', '')).resolve()}"
        return self._program("service", "service", section, values, phase=SERVICE_PHASE), url

    def _engine(self, where: str, name: str, section: EngineSection, port: int) -> Engine | None:
        values = dict(section.options)
        if section.url is UNSET and section.command is UNSET and "model" in values:
            address = self._address(f"{where}.port", values, port)
            values["port"] = address.port
            return Engine(name, address.url, self._program(where, name, section, values, phase=ENGINE_PHASE))
        if section.url is UNSET:
            needed = (
                "url, the address at which command listens" if section.command else "model, url, or command with url"
            )
            self.problems.append(f"{where} ({name}) lacks {needed}")
            return None
        if values:
            self.problems.append(f"{where} ({name}) has url, so it is not `replaybuf engine`; remove {_names(values)}")
            return None
        program = self._custom(name, section.command, section.env, phase=ENGINE_PHASE) if section.command else None
        return Engine(name, section.url, program)

    def _generator(self, common: Mapping[str, str], where: str, section: GeneratorSection) -> Program | None:
        name = section.name or where.replace("[", "-").removesuffix("]")
        values = {
            **common,
            **self._file.trained_model,
            "metrics_file": str(self._data_dir / "metrics" / f"{name}.jsonl"),
            **section.options,
            "engine": self._engine_urls(section),
        }
        return self._program(where, name, section, values, phase=GENERATOR_PHASE, may_finish=True)

    def _trainer(self, common: Mapping[str, str], section: TrainerSection) -> Program | None:
        if section.command:
            if section.options:
                text = f"trainer has command; remove the options of `replaybuf train`: {_names(section.options)}"
                self.problems.append(text)
            environment = {"REPLAYBUF_URL": common["url"], "REPLAYBUF_RUN": common["run"], **section.env}
            return self._custom("trainer", section.command, environment, phase=TRAINER_PHASE, may_finish=True)
        data = self._data_dir
        values = {
            **common,
            "checkpoint_dir": str(data / "checkpoints"),
            "weights_dir": str(data / "weights"),
            "metrics_file": str(data / "metrics" / "trainer.jsonl"),
            **section.options,
            "engine": self._engine_urls(section),
        }
        codes = {
            FENCED_EXIT_CODE: f"another trainer took the run {common['run']}; stop it before you start this file again"
        }
        return self._program("trainer", "trainer", section, values, may_finish=True, final_codes=codes)

    def _evaluation(
        self, common: Mapping[str, str], section: EvaluationSection, generator: GeneratorSection | None
    ) -> Program | None:
        first: Mapping[str, Any] = generator.options if generator else {}
        values = {
            **common,
            **self._file.trained_model,
            **{key: first[key] for key in ("environment", "tokenizer", "max_tokens") if key in first},
            **section.options,
            "engine": self._engine_urls(section),
        }
        return self._program("evaluation", "evaluation", section, values, may_finish=True)

    # ------------------------------------------------------------------ parts of sections

    def _program(
        self,
        where: str,
        name: str,
        section: Section,
        values: Mapping[str, Any],
        *,
        phase: int = TRAINER_PHASE,
        may_finish: bool = False,
        final_codes: Mapping[int, str] | None = None,
    ) -> Program | None:
        """Check the options as the command does, and return the program."""
        command = section.subcommand
        known = options.options_of(command)
        missing = [key for key, option in known.items() if option.required and not values.get(key)]
        self.problems += [f"{where}.{key} is missing: {known[key].help}" for key in missing if key != "engine"]
        self.problems += file_problems(where, command, values, self._folder, self._made_later)
        if missing:  # a missing engine is a problem between sections
            return None
        try:
            options.check(command, values)
        except Invalid as error:
            self.problems.append(f"{where}: {error.detail}")
            return None
        return Program(
            name=name,
            command=[*self._words, command, *options.words(command, values)],
            environment={**QUIET, **options.secrets(command, values), **section.env},
            folder=self._folder,
            may_finish=may_finish,
            stop_phase=phase,
            ends_children=command == "serve",
            restarts=self._file.restarts,
            final_codes=final_codes or {},
        )

    def _custom(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, phase: int, may_finish: bool = False
    ) -> Program:
        program = Program(
            name=name,
            command=list(command),
            environment={**QUIET, **environment},
            folder=self._folder,
            may_finish=may_finish,
            stop_phase=phase,
            restarts=self._file.restarts,
        )
        if problem := program_problem(program):
            self.problems.append(problem)
        return program

    def _engine_urls(self, section: ClientSection) -> list[str]:
        """Return the URLs of the engines that a section names, or of all."""
        names = self._engines if section.engines is UNSET else section.engines
        return [self._engines[name] for name in names if name in self._engines]

    def _address(self, where: str, values: Mapping[str, Any], default: int) -> Address:
        """Return where a part listens; port 0 becomes a free port now, because other sections need its number."""
        host = values.get("host", "127.0.0.1")
        address = Address(where, host, values.get("port", default) or _free_port())
        self.addresses.append(address)
        return address

    def _metrics_file(self, program: Program | None) -> Path | None:
        """Return the path of a program's metrics; None for a person's own command."""
        if program is None or "--metrics-file" not in program.command:
            return None
        return self._folder / program.command[list(program.command).index("--metrics-file") + 1]


def _names(values: Mapping[str, Any]) -> str:
    return ", ".join(sorted(values))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

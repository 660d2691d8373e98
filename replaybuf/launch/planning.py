"""Derive a plan from a file: addresses, folders and engines of one section become options of the others.

`Planner.plan` returns the plan, or None with all problems in `problems`. A section with wrong keys is not derived, but
the others are still checked against its names.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from replaybuf.errors import Invalid
from replaybuf.kernel.strategy.plugin_set import resolve_config
from replaybuf.launch import options
from replaybuf.launch.crosschecks import cross_problems
from replaybuf.launch.file import problems_of
from replaybuf.launch.machine import file_problems, program_problem
from replaybuf.launch.plan import QUIET, Address, Engine, Plan
from replaybuf.launch.sections import (
    COMMANDS,
    FIRST_ENGINE_PORT,
    MINE,
    OWN_KEYS,
    EngineKeys,
    EvaluationKeys,
    FileKeys,
    GeneratorKeys,
    Keys,
    ProcessKeys,
    RestartKeys,
    TrainerKeys,
)
from replaybuf.launch.supervisor import Program
from replaybuf.wire.config import RunConfig

PROGRAM = (sys.executable, "-m", "replaybuf")
FENCED_EXIT_CODE = 3
TRAINER_PHASE, GENERATOR_PHASE, ENGINE_PHASE, SERVICE_PHASE = range(4)
"""Order of the stop."""

KeysT = TypeVar("KeysT", bound=Keys)


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
        self._words = tuple(program)
        self._made_later = made_later
        self.problems = problems_of(dict(tables))
        self._tables = tables
        self._folder = folder.resolve()
        self._has_token = has_token
        self._broken = {re.split(r"[.\[ ]", problem)[0] for problem in self.problems}
        keys = self._own(FileKeys, {} if self._broken & set(FileKeys.__struct_fields__) else tables)
        self._start_timeout_s, self._stop_timeout_s = keys.start_timeout_s, keys.stop_timeout_s
        self._data_dir = (self._folder / keys.data_dir).resolve()
        self._restarts = self._sound(RestartKeys, "restarts").bounds()
        self._engine_tables: list[dict[str, Any]] = self._sound_table("engines", [])
        self.addresses: list[Address] = []

    def plan(self) -> Plan | None:
        """Return the plan; None if there are problems."""
        config = self._config()
        service = self._service()
        url = self._url()
        engines = [self._engine(place, table) for place, table in enumerate(self._engine_tables, 1)]
        self._engines = {engine.name: engine.url for engine in engines if engine}
        generators = self._generator_tables()
        trainer = self._sound_table("trainer", MINE)
        self.problems += cross_problems(self._tables, self._broken, has_token=self._has_token)
        common = {"url": url, "run": self._run_name()}
        generator_programs = [
            self._generator(common, place, len(generators), table) for place, table in enumerate(generators, 1)
        ]
        trainer_program = None if trainer == MINE else self._trainer(common, trainer)
        evaluation, keys = self._evaluation(common, generators)
        if self.problems or config is None or service is None:
            return None
        return Plan(
            folder=self._folder,
            data_dir=self._data_dir,
            run=self._run_name(),
            config=config,
            url=url,
            addresses=self.addresses,
            service=service,
            engines=[engine for engine in engines if engine],
            trainer=trainer_program,
            generators=[program for program in generator_programs if program],
            evaluation=evaluation,
            evaluate_at_start=keys.at_start,
            evaluate_at_end=keys.at_end,
            trainer_metrics=self._path_in(trainer_program, "--metrics-file"),
            generator_metrics=[
                path for program in generator_programs if (path := self._path_in(program, "--metrics-file"))
            ],
            start_timeout_s=self._start_timeout_s,
            stop_timeout_s=self._stop_timeout_s,
        )

    # ------------------------------------------------------------------ sections

    def _config(self) -> RunConfig | None:
        if "run" in self._broken:
            return None
        try:
            config = msgspec.convert({k: v for k, v in self._tables["run"].items() if k != "name"}, RunConfig)
            return resolve_config(config)[0]
        except (Invalid, msgspec.ValidationError) as error:
            self.problems.append(f"run: {error}")
            return None

    def _run_name(self) -> str:
        return "" if "run" in self._broken else str(self._tables["run"]["name"])

    def _service(self) -> Program | None:
        values = {"data_dir": str(self._data_dir / "service"), **self._options("service")}
        if "service" in self._broken:
            return None
        if values.get("tcp", True):
            address = self._address("service.port", values, 8900)
            values["port"] = address.port
        return self._program("service", "service", values, phase=SERVICE_PHASE)

    def _url(self) -> str:
        values = self._options("service")
        if values.get("tcp", True):
            return next((address.url for address in self.addresses if address.where == "service.port"), "")
        return f"unix:{(self._folder / values.get('uds', '')).resolve()}"

    def _engine(self, place: int, table: Mapping[str, Any]) -> Engine | None:
        keys, where = self._own(EngineKeys, table), f"engines[{place}]"
        name = keys.name or f"engine-{place}"
        values = self._options("engines", table)
        if keys.url is msgspec.UNSET and keys.command is msgspec.UNSET and "model" in values:
            address = self._address(f"{where}.port", values, FIRST_ENGINE_PORT + place - 1)
            values["port"] = address.port
            return Engine(name, address.url, self._program(where, name, values, phase=ENGINE_PHASE, keys=keys))
        if keys.url is msgspec.UNSET:
            needed = "url, the address at which command listens" if keys.command else "model, url, or command with url"
            self.problems.append(f"{where} ({name}) lacks {needed}")
            return None
        if values:
            self.problems.append(f"{where} ({name}) has url, so it is not `replaybuf engine`; remove {_names(values)}")
            return None
        program = None
        if keys.command:
            program = self._custom(name, keys.command, keys.env, phase=ENGINE_PHASE)
        return Engine(name, keys.url, program)

    def _generator_tables(self) -> list[dict[str, Any]]:
        given: Any = self._sound_table("generator", [])
        return given if isinstance(given, list) else [given]

    def _generator(self, common: Mapping[str, str], place: int, count: int, table: Mapping[str, Any]) -> Program | None:
        keys, where = self._own(GeneratorKeys, table), "generator" if count == 1 else f"generator[{place}]"
        name = keys.name or ("generator" if count == 1 else f"generator-{place}")
        trainer = self._tables.get("trainer")
        model = trainer.get("model") if isinstance(trainer, dict) else None
        derived = {"tokenizer": model} if model else {}
        values = {
            **common,
            **derived,
            "metrics_file": str(self._data_dir / "metrics" / f"{name}.jsonl"),
            **self._options("generator", table),
            "engine": self._engine_urls(where, keys.engines),
        }
        return self._program(where, name, values, phase=GENERATOR_PHASE, keys=keys, may_finish=True)

    def _trainer(self, common: Mapping[str, str], table: Mapping[str, Any]) -> Program | None:
        keys, values = self._own(TrainerKeys, table), self._options("trainer", table)
        if keys.command:
            if values:
                self.problems.append(f"trainer has command; remove the options of `replaybuf train`: {_names(values)}")
            environment = {"REPLAYBUF_URL": common["url"], "REPLAYBUF_RUN": common["run"], **keys.env}
            return self._custom("trainer", keys.command, environment, phase=TRAINER_PHASE, may_finish=True)
        data = self._data_dir
        values = {
            **common,
            "checkpoint_dir": str(data / "checkpoints"),
            "weights_dir": str(data / "weights"),
            "metrics_file": str(data / "metrics" / "trainer.jsonl"),
            **values,
            "engine": self._engine_urls("trainer", keys.engines),
        }
        codes = {
            FENCED_EXIT_CODE: f"another trainer took the run {common['run']}; stop it before you start this file again"
        }
        return self._program(
            "trainer", "trainer", values, phase=TRAINER_PHASE, keys=keys, may_finish=True, final_codes=codes
        )

    def _evaluation(
        self, common: Mapping[str, str], generators: Sequence[Mapping[str, Any]]
    ) -> tuple[Program | None, EvaluationKeys]:
        table = self._sound_table("evaluation", None)
        if table is None or "generator" in self._broken:
            return None, EvaluationKeys()
        keys, first = self._own(EvaluationKeys, table), next(iter(generators), {})
        trainer = self._tables.get("trainer")
        model = {"tokenizer": trainer["model"]} if isinstance(trainer, dict) and "model" in trainer else {}
        same = {key: first[key] for key in ("environment", "tokenizer", "max_tokens") if key in first}
        values = {
            **common,
            **model,
            **same,
            **self._options("evaluation", table),
            "engine": self._engine_urls("evaluation", keys.engines),
        }
        return self._program("evaluation", "evaluation", values, keys=keys, may_finish=True), keys

    # ------------------------------------------------------------------ parts of sections

    def _program(
        self,
        where: str,
        name: str,
        values: Mapping[str, Any],
        *,
        phase: int = TRAINER_PHASE,
        keys: ProcessKeys | None = None,
        may_finish: bool = False,
        final_codes: Mapping[int, str] | None = None,
    ) -> Program | None:
        """Check the options as the command does, and return the program."""
        command = COMMANDS[where.partition("[")[0]]
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
        own = keys or self._own(ProcessKeys, self._sound_table(where, {}))
        return Program(
            name=name,
            command=[*self._words, command, *options.words(command, values)],
            environment={**QUIET, **options.secrets(command, values), **own.env},
            folder=self._folder,
            may_finish=may_finish,
            stop_phase=phase,
            ends_children=command == "serve",
            restarts=self._restarts,
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
            restarts=self._restarts,
        )
        if problem := program_problem(program):
            self.problems.append(problem)
        return program

    def _engine_urls(self, where: str, names: Any) -> list[str]:
        """Return the URLs of the named engines, or of all."""
        if names is msgspec.UNSET:
            return list(self._engines.values())
        return [self._engines[name] for name in names if name in self._engines]

    def _address(self, where: str, values: Mapping[str, Any], default: int) -> Address:
        """Return where a part listens; port 0 becomes a free port now, because other sections need its number."""
        host = values.get("host", "127.0.0.1")
        address = Address(where, host, values.get("port", default) or _free_port())
        self.addresses.append(address)
        return address

    def _options(self, section: str, table: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the keys of a section that are options of its command."""
        table = self._sound_table(section, {}) if table is None else table
        known = options.options_of(COMMANDS[section])
        own = OWN_KEYS[section].__struct_fields__
        return {key: value for key, value in table.items() if key in known and key not in own}

    def _own(self, shape: type[KeysT], table: Mapping[str, Any]) -> KeysT:
        """Return the keys of a section that are none of its command."""
        return msgspec.convert({key: value for key, value in table.items() if key in shape.__struct_fields__}, shape)

    def _sound(self, shape: type[KeysT], section: str) -> KeysT:
        return self._own(shape, self._sound_table(section, {}))

    def _sound_table(self, section: str, otherwise: Any) -> Any:
        """Return a section of the file; `otherwise` if it is missing or has problems."""
        return otherwise if section in self._broken else self._tables.get(section, otherwise)

    def _path_in(self, program: Program | None, flag: str) -> Path | None:
        """Return the path that a command has after a flag."""
        if program is None or flag not in program.command:
            return None
        return self._folder / program.command[list(program.command).index(flag) + 1]


def _names(values: Mapping[str, Any]) -> str:
    return ", ".join(sorted(values))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

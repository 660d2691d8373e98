"""Checks between the sections of a file: names that one section takes from another, and values that contradict."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from replaybuf.generator.prompts.filters import PromptFilterOptions
from replaybuf.launch.file import DecodedFile
from replaybuf.launch.sections import ClientSection, GeneratorSection, RunSection, TrainerSection

Clients = Mapping[str, ClientSection]
"""Sections that use engines, by their place in the file."""


def cross_problems(decoded: DecodedFile, *, has_token: bool) -> Iterator[str]:
    """Yield what is wrong between sections, one line each. Broken sections only lend their names."""
    file, broken = decoded.sections, decoded.broken
    engines = file.engine_names
    generators = {} if "generator" in broken else file.generators
    trainer = None if "trainer" in broken or not isinstance(file.trainer, TrainerSection) else file.trainer
    clients: dict[str, ClientSection] = dict(generators)
    if trainer is not None:
        clients["trainer"] = trainer
    if "evaluation" not in broken and file.evaluation is not UNSET:
        clients["evaluation"] = file.evaluation
    yield from _repeated("engines", engines)
    yield from _repeated("generator", [section.name for section in generators.values() if section.name])
    yield from _engine_problems(clients, engines)
    run = None if "run" in broken else file.run
    yield from _agreement(generators, trainer, run)
    if run is not None:
        yield from _adapter_problems(clients, list(run.adapters))
    if "service" not in broken and file.service.options.get("tokens_file"):
        yield from _token_problems(clients, has_token=has_token)


def _repeated(section: str, names: Sequence[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{section}: {count} entries have the name {name!r}; give each its own"


def _engine_problems(clients: Clients, engines: Sequence[str]) -> Iterator[str]:
    for where, section in clients.items():
        if not engines and where != "trainer":
            yield f"{where} needs an engine, and the file has none; add [[engines]] with a model or a url"
        for name in section.engines or ():
            if name in engines:
                continue
            near = difflib.get_close_matches(name, engines, 1)
            hint = f"did you mean {near[0]}?" if near else f"known names: {', '.join(engines) or 'none'}"
            yield f"{where}.engines has {name!r}, which is no name in [[engines]]; {hint}"
        if section.engines == []:
            yield f"{where}.engines is empty; name at least one engine, or leave the key out to use all"


def _agreement(
    generators: Mapping[str, GeneratorSection], trainer: TrainerSection | None, run: RunSection | None
) -> Iterator[str]:
    """Find values that several sections must share."""
    for where, section in generators.items():
        sizes = (section.options.get("group_size"), run and run.group_size)
        if None not in sizes and sizes[0] != sizes[1]:
            yield f"{where}.group_size is {sizes[0]}, and run.group_size is {sizes[1]}; both must be the same"
        if trainer is not None and not trainer.command:
            modes = [options.get("on_publish", "in-flight") for options in (section.options, trainer.options)]
            if modes[0] != modes[1]:
                yield f"{where}.on_publish is {modes[0]}, and trainer.on_publish is {modes[1]}; both must be the same"
    options = [section.options for section in generators.values()]
    if len({values.get("seed") for values in options}) > 1:
        yield "generator: the entries have different seeds; all generators of a run need the same seed"
    filters = {(values.get("adapter"), _prompt_filter(values)) for values in options}
    if len(filters) > len({adapter for adapter, _ in filters}):
        yield "generator: the entries have different prompt_filter; a prompt index needs the same prompt in all"


def _prompt_filter(values: Mapping[str, Any]) -> PromptFilterOptions:
    return msgspec.convert(values.get("prompt_filter", {}), PromptFilterOptions)


def _adapter_problems(clients: Clients, adapters: Sequence[str]) -> Iterator[str]:
    for where, section in clients.items():
        adapter = section.options.get("adapter")
        if where == "trainer" or (adapter is None and not adapters):
            continue
        if adapter is None:
            yield f"{where}.adapter is missing; run.adapters has {', '.join(adapters)}"
        elif adapter not in adapters:
            yield f"{where}.adapter is {adapter!r}; run.adapters has {', '.join(adapters) or 'none'}"


def _token_problems(clients: Clients, *, has_token: bool) -> Iterator[str]:
    """Find clients without a token of a service that asks for one."""
    if not has_token:
        yield "service.tokens_file is set, so give --token or REPLAYBUF_UP_TOKEN with the role operator"
    for where, section in clients.items():
        variable = f"REPLAYBUF_{section.subcommand.upper()}_TOKEN"
        custom_trainer = isinstance(section, TrainerSection) and bool(section.command)
        if not custom_trainer and "token" not in section.options and variable not in {*os.environ, *section.env}:
            role = "trainer" if isinstance(section, TrainerSection) else "producer"
            yield f"{where}.token is missing: service.tokens_file is set. Set {variable} with the role {role}"

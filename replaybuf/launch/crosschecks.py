"""Checks between the sections of a file: names that one section takes from another, and values that contradict."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from replaybuf.generator.prompts.filters import PromptFilterOptions
from replaybuf.launch.sections import MINE

TOKEN_ROLES = {
    "generator": ("GENERATE", "producer"),
    "trainer": ("TRAIN", "trainer"),
    "evaluation": ("EVAL", "producer"),
}


def cross_problems(tables: Mapping[str, Any], broken: Collection[str], *, has_token: bool) -> list[str]:
    """List what is wrong between sections, one line each. Sections in `broken` only lend their names."""
    sound = {name: table for name, table in tables.items() if name not in broken}
    engines = engine_names(tables.get("engines", []))
    users = dict(_engine_users(sound))
    return [
        *_repeated("engines", engines),
        *_repeated("generator", [str(table["name"]) for table in _generators(sound) if "name" in table]),
        *_engine_problems(users, engines),
        *_agreement(sound),
        *_adapter_problems(sound),
        *(_token_problems(sound, has_token=has_token) if sound.get("service", {}).get("tokens_file") else ()),
    ]


def engine_names(engines: Any) -> list[str]:
    """Return the names of the entries of [[engines]], also of a section with problems."""
    tables = [table if isinstance(table, dict) else {} for table in (engines if isinstance(engines, list) else [])]
    return [str(table.get("name", f"engine-{place}")) for place, table in enumerate(tables, 1)]


def _generators(tables: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    given: Any = tables.get("generator", [])
    return given if isinstance(given, list) else [given]


def _engine_users(tables: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the sections that use engines, by their place in the file."""
    generators = _generators(tables)
    for place, table in enumerate(generators, 1):
        yield ("generator" if len(generators) == 1 else f"generator[{place}]"), table
    for name in ("trainer", "evaluation"):
        if isinstance(tables.get(name), dict):
            yield name, tables[name]


def _repeated(section: str, names: Sequence[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{section}: {count} entries have the name {name!r}; give each its own"


def _engine_problems(users: Mapping[str, Mapping[str, Any]], engines: Sequence[str]) -> Iterator[str]:
    for where, table in users.items():
        if not engines and not where.startswith("trainer"):
            yield f"{where} needs an engine, and the file has none; add [[engines]] with a model or a url"
        for name in table.get("engines", ()):
            if name in engines:
                continue
            near = difflib.get_close_matches(name, engines, 1)
            hint = f"did you mean {near[0]}?" if near else f"known names: {', '.join(engines) or 'none'}"
            yield f"{where}.engines has {name!r}, which is no name in [[engines]]; {hint}"
        if table.get("engines") == []:
            yield f"{where}.engines is empty; name at least one engine, or leave the key out to use all"


def _agreement(tables: Mapping[str, Any]) -> Iterator[str]:
    """Find values that several sections must share."""
    run, generators = tables.get("run", {}), _generators(tables)
    trainer = tables.get("trainer", MINE)
    for place, table in enumerate(generators, 1):
        where = "generator" if len(generators) == 1 else f"generator[{place}]"
        sizes = (table.get("group_size"), run.get("group_size"))
        if None not in sizes and sizes[0] != sizes[1]:
            yield f"{where}.group_size is {sizes[0]}, and run.group_size is {sizes[1]}; both must be the same"
        if isinstance(trainer, dict) and "command" not in trainer:
            modes = (table.get("on_publish", "in-flight"), trainer.get("on_publish", "in-flight"))
            if modes[0] != modes[1]:
                yield f"{where}.on_publish is {modes[0]}, and trainer.on_publish is {modes[1]}; both must be the same"
    seeds = {table.get("seed") for table in generators}
    if len(seeds) > 1:
        yield "generator: the entries have different seeds; all generators of a run need the same seed"
    for field in dataclasses.fields(PromptFilterOptions):
        values = {(table.get("adapter"), table.get(field.name, field.default)) for table in generators}
        if len(values) > len({adapter for adapter, _ in values}):
            yield f"generator: the entries have different {field.name}; a prompt index needs the same prompt in all"


def _adapter_problems(tables: Mapping[str, Any]) -> Iterator[str]:
    if "run" not in tables:
        return
    adapters = list(tables["run"].get("adapters", {}))
    for where, table in _engine_users(tables):
        adapter = table.get("adapter")
        if where.startswith("trainer") or (adapter is None and not adapters):
            continue
        if adapter is None:
            yield f"{where}.adapter is missing; run.adapters has {', '.join(adapters)}"
        elif adapter not in adapters:
            yield f"{where}.adapter is {adapter!r}; run.adapters has {', '.join(adapters) or 'none'}"


def _token_problems(tables: Mapping[str, Any], *, has_token: bool) -> Iterator[str]:
    """Find clients without a token of a service that asks for one."""
    if not has_token:
        yield "service.tokens_file is set, so give --token or REPLAYBUF_UP_TOKEN with the role operator"
    for where, table in _engine_users(tables):
        command, role = TOKEN_ROLES[where.partition("[")[0]]
        variable = f"REPLAYBUF_{command}_TOKEN"
        if "token" not in table and "command" not in table and variable not in {*os.environ, *table.get("env", {})}:
            yield f"{where}.token is missing: service.tokens_file is set. Set {variable} with the role {role}"

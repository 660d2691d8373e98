"""The commands `replaybuf runs ...`: list, show, create, change, pause, resume, finish, delete; accept a loss."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter
from rich.prompt import Prompt

from replaybuf.cli.look.status import fetch_runs
from replaybuf.cli.service import DEFAULT_SERVICE, RunName, Service, ServiceOptions, client, print_json, print_table
from replaybuf.errors import Conflict, DataLost, Invalid
from replaybuf.files import CONFIG_BYTES, read_bounded
from replaybuf.wire.answer.run_status import RunStatus


@dataclasses.dataclass(frozen=True, kw_only=True)
class CreateOptions(ServiceOptions):
    """Configuration of a new run."""

    from_: Annotated[Path, Parameter(name="--from")]
    """File with the configuration: JSON, or TOML if its name ends with .toml."""
    if_absent: bool = False
    """Leave a run of this name as it is, whatever its configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeleteOptions(ServiceOptions):
    """Whether to ask."""

    yes: bool = False
    """Do not ask for the name of the run again."""


def list_(options: Service = DEFAULT_SERVICE) -> None:
    """List the runs of a service."""
    runs = fetch_runs(options)
    if options.json:
        print_json(runs)
        return
    columns = ("run", "state", ">step", ">version", ">live", ">trained", "next batch")
    print_table(columns, ([*_counts(run), run.waiting.reason if run.waiting else "ready"] for run in runs))


def _counts(run: RunStatus) -> list[object]:
    return [run.run, run.state, run.step, run.published_version, run.groups.live, run.groups.in_batches]


def create(run: RunName, /, options: Annotated[CreateOptions, Parameter(name="*")]) -> None:
    """Create a run. The same configuration again changes nothing."""
    config = _read(options.from_)
    with client(run, options) as service:
        _print_state(service.put_run(config, options.if_absent), options)


def set_(
    run: RunName,
    changes: Annotated[list[str], Parameter(negative=(), help="Changes as KEY=VALUE.")],
    /,
    options: Service = DEFAULT_SERVICE,
) -> None:
    """Change the configuration of a live run: `batch.groups_per_batch=64 strategy.options.max_staleness=4`.

    Values are JSON, or else text. Prints each value before and after.
    """
    patch = _parse_changes(changes)
    with client(run, options) as service:
        before = dict(_flat(service.get_run().config))
        status = service.patch_run(patch)
    if options.json:
        print_json(status)
        return
    after = dict(_flat(status.config))
    names = [name for name in before | after if before.get(name) != after.get(name)]
    print_table(("key", "before", "after"), ([name, _text(before, name), _text(after, name)] for name in names))


def pause(run: RunName, /, options: Service = DEFAULT_SERVICE) -> None:
    """Pause a run: no batch is made until it is resumed."""
    _change_state(run, "paused", options)


def resume(run: RunName, /, options: Service = DEFAULT_SERVICE) -> None:
    """Go on with a paused run."""
    _change_state(run, "running", options)


def finish(run: RunName, /, options: Service = DEFAULT_SERVICE) -> None:
    """Finish a run for good: producers and trainer end."""
    _change_state(run, "finished", options)


def delete(run: RunName, /, options: Annotated[DeleteOptions, Parameter(name="*")] = DeleteOptions()) -> None:
    """Delete a finished run with all its groups; its name is refused for a day."""
    if not options.yes:
        _confirm(run, f"All groups of {run} will be gone", "delete it")
    with client(run, options) as service:
        service.delete_run()
    if options.json:
        print_json({"run": run, "deleted": True})
    else:
        print(f"{run} is deleted")


def accept_loss(run: RunName, /, options: Annotated[DeleteOptions, Parameter(name="*")] = DeleteOptions()) -> None:
    """Let a run go on without what Redis lost. It says first what that is, and fences every trainer."""
    with client(run, options) as service:
        try:
            service.get_run()
        except DataLost as error:
            if error.entries is None or error.groups is None:
                raise
            entries, groups = error.entries, error.groups
            if not options.yes:
                print(error.detail)
                _confirm(run, "What is missing will be gone for good", "go on without it")
        else:
            raise Conflict(f"Redis lacks nothing of run {run}; there is no loss to accept", name="run", value=run)
        accepted = service.accept_loss(entries, groups)
    if options.json:
        print_json(accepted)
    else:
        print(f"{run} goes on after ledger entry {accepted.last_entry} and group {accepted.last_group}")


def _confirm(run: str, effect: str, aim: str) -> None:
    if not sys.stdin.isatty():
        raise Invalid(f"{run} stays: there is no terminal to ask in; to {aim}, give --yes", name="yes", value=False)
    if Prompt.ask(f"{effect}. Type the name of the run to {aim}") != run:
        raise Invalid(f"{run} stays: another name was typed", name="run", value=run)


def _change_state(run: str, state: Literal["running", "paused", "finished"], options: ServiceOptions) -> None:
    with client(run, options) as service:
        _print_state(service.patch_run({"state": state}), options)


def _print_state(status: RunStatus, options: ServiceOptions) -> None:
    if options.json:
        print_json(status)
    else:
        print(f"{status.run} is {status.state}, next unacked step {status.step}")


def _read(path: Path) -> dict[str, Any]:
    """Read a configuration. Raises `Invalid`; the service checks what is in it."""
    try:
        raw = read_bounded(path, CONFIG_BYTES)
        config = tomllib.loads(raw.decode()) if path.suffix == ".toml" else msgspec.json.decode(raw)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise Invalid(f"{path} cannot be read: {error}", name="from", value=str(path)) from error
    if not isinstance(config, dict):
        raise Invalid(
            f"{path} holds {type(config).__name__}; a configuration is an object", name="from", value=str(path)
        )
    return config


def _parse_changes(changes: list[str]) -> dict[str, Any]:
    """Turn `a.b=1` into `{"a": {"b": 1}}`. Raises `Invalid`."""
    patch: dict[str, Any] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        *parents, last = key.split(".")
        if not equals or not all([*parents, last]):
            raise Invalid(f"{change!r} has no value to set; write KEY=VALUE", name="changes", value=change)
        part = patch
        for parent in parents:
            part = part.setdefault(parent, {})
            if not isinstance(part, dict):
                raise Invalid(f"{change!r} changes a part of a value that is set too", name="changes", value=change)
        part[last] = _parse_value(value)
    return patch


def _parse_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested objects with its dotted name."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _flat(part, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, value


def _text(values: dict[str, Any], name: str) -> str:
    return msgspec.json.encode(values[name]).decode() if name in values else "-"

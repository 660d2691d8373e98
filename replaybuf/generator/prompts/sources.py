"""Sources of prompts: JSON lines, Parquet, `datasets` folders, reasoning-gym, verifiers, any importable iterable.

A finite source is read and checked once, at start. An endless one makes rows by number; a wrong row costs the ticket
that asked for it. Code of the user that makes rows must be quick.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from replaybuf.client.producers.failures import redact
from replaybuf.errors import Invalid, PromptFault, ReplaybufError
from replaybuf.generator.prompts.filters import PromptFilter, PromptFilterOptions, nothing_left
from replaybuf.generator.prompts.gym_tasks import gym_row
from replaybuf.generator.prompts.prompt import Encoder, Prompt, PromptLine, duplicate_id, invalid_row, new_prompt
from replaybuf.generator.prompts.rows import Row, file_rows, json_rows, object_rows, object_rows_by_number
from replaybuf.generator.prompts.tasksets import TASKSET, open_taskset
from replaybuf.plugins.entry_points import is_object_path
from replaybuf.wire.decoding import prepared

GYM = "reasoning-gym:"
TRIED_ROWS = 16
"""Rows of an endless source that are checked at start."""


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One source of prompts, as a curriculum file or `--prompts` names it.

    - `prompts`: FILE.jsonl, FILE.parquet, a folder, reasoning-gym:DATASET, verifiers:TASKSET or MODULE:FUNCTION
    - `columns`: the column of each field of a prompt, with dots into nested ones
    - `options`: of the dataset, the taskset or the function
    - `chat`: a text `prompt` becomes the message of a user, after `system` if that is set
    """

    prompts: str
    name: str = ""
    columns: dict[str, str] = {}
    options: dict[str, Any] = {}
    endless: bool = False
    chat: bool = False
    system: str | None = None


class Endless:
    """Prompts made on demand. The prompt at a place is always the same."""

    def __init__(self, source: Source, row_at: Callable[[int], dict[str, Any]], encoder: Encoder) -> None:
        self._source = source
        self._row_at = row_at
        self._encoder = encoder
        self._check: Callable[[Prompt], None] = lambda prompt: None

    def first_prompts(self) -> list[Prompt]:
        """Make the first `TRIED_ROWS` prompts. Raises `Invalid` naming the row that cannot become a prompt."""
        try:
            return [self._make(place) for place in range(TRIED_ROWS)]
        except ReplaybufError:
            raise
        except Exception as error:  # a source of the user may raise anything
            raise Invalid(f"prompts {self._source.prompts} raised {error!r}", name="prompts") from error

    def checked_by(self, check: Callable[[Prompt], None]) -> Endless:
        """Check every further prompt with `check`, which raises `Invalid`."""
        self._check = check
        return self

    def at(self, prompt_index: int) -> Prompt:
        """Return the prompt at a place. Raises `PromptFault` if the row raises or cannot become a prompt."""
        try:
            prompt = self._make(prompt_index)
            self._check(prompt)
        except Invalid as error:
            raise PromptFault("prompt_invalid", error.detail, name=error.name, value=error.value) from error
        except Exception as error:  # a source of the user may raise anything
            detail = redact(f"prompts {self._source.prompts} raised {error!r}")
            raise PromptFault("prompt_raised", detail) from error
        return prompt

    def _make(self, place: int) -> Prompt:
        where = f"prompts {self._source.prompts}, row {place + 1}"
        return new_prompt(self._source.name, where, _to_line(self._source, where, self._row_at(place)), self._encoder)


def open_source(
    source: Source, encoder: Encoder, folder: Path = Path(), prompt_filter: PromptFilter | None = None
) -> list[Prompt] | Endless:
    """Read a finite source, or prepare an endless one. Files are relative to `folder`.

    Raises `Invalid` naming the row that cannot become a prompt, and for filters that keep none or have no finite
    source; `MissingExtra`.
    """
    spec, path = source.prompts, folder / source.prompts
    rows: Iterator[Row]
    row_at: Callable[[int], dict[str, Any]] | None = None
    strict = False
    if spec.startswith(TASKSET):
        taskset = open_taskset(spec.removeprefix(TASKSET), source.options, encoder.folder)
        rows, row_at = taskset.rows(), taskset.row if taskset.infinite else None
    elif spec.startswith(GYM):
        rows = _gym_rows(spec, source.options)
        if source.endless or "size" not in source.options:
            row_at = functools.partial(gym_row, spec.removeprefix(GYM), source.options)
    elif is_object_path(spec) and (source.endless or not path.exists()):
        rows = object_rows(spec, source.options)
        row_at = object_rows_by_number(spec, source.options) if source.endless else None
    else:
        rows, strict = file_rows(path), path.suffix != ".parquet" and not path.is_dir() and not source.columns
    prompt_filter = prompt_filter or PromptFilter(PromptFilterOptions())
    if row_at is not None:
        if prompt_filter.active:
            detail = (
                f"prompts {spec} never end, and filters need finite prompts; give the source a size, or filter in "
                "the function that makes them"
            )
            raise Invalid(detail, name="prompts", value=spec, bound="a finite source")
        return Endless(source, row_at, encoder)
    if source.endless:
        raise Invalid(f"prompts {spec} is finite; endless needs {GYM}DATASET or MODULE:FUNCTION", name="endless")
    return _read(source, rows, encoder, f"prompts {spec}", prompt_filter, strict=strict)


def read_prompts(file: Path, encoder: Encoder) -> list[Prompt]:
    """Read a JSON-lines file. Raises `Invalid` naming file and line that cannot become a prompt."""
    source = Source(prompts=str(file), name=file.stem)
    return _read(
        source, json_rows(file), encoder, f"prompts file {file}", PromptFilter(PromptFilterOptions()), strict=True
    )


def _read(
    source: Source, rows: Iterator[Row], encoder: Encoder, described: str, prompt_filter: PromptFilter, *, strict: bool
) -> list[Prompt]:
    """Make the prompts of a finite source. Raises `Invalid` as `open_source`, and for two rows with one `prompt_id`."""
    prompts: dict[str, Prompt] = {}
    dropped = prompt_filter.dropped.copy()
    for where, row in rows:
        line = _to_line(source, where, row, strict=strict)
        prompt = new_prompt(source.name, where, line, encoder)
        if not prompt_filter.keeps(prompt):
            continue
        if (first := prompts.setdefault(prompt.prompt_id, prompt)) is not prompt:
            raise duplicate_id(prompt, first, generated=not line.prompt_id)
    if not prompts and prompt_filter.dropped != dropped:
        raise nothing_left(described, prompt_filter.dropped - dropped)
    if not prompts:
        raise Invalid(f"{described} holds no prompt", name="prompts", value=described, bound="at least 1 row")
    return list(prompts.values())


def _to_line(source: Source, where: str, row: Any, *, strict: bool = False) -> PromptLine:
    """Convert one row. Columns that are not fields of a prompt become metadata; with `strict` they are errors.

    Raises `Invalid` naming the row.
    """
    if not isinstance(row, dict):
        raise invalid_row(where, f"is of type {type(row).__name__}; a row must be a dict")
    fields = {field: _at_path(where, row, path) for field, path in source.columns.items()}
    used = {path.partition(".")[0] for path in source.columns.values()}
    rest = {name: value for name, value in row.items() if name not in used and name not in fields}
    fields |= {name: rest.pop(name) for name in PromptLine.__struct_fields__ if name in rest}
    if rest and not strict:
        fields["metadata"], rest = {**rest, **(fields.get("metadata") or {})}, {}
    try:
        line = msgspec.convert({**fields, **rest}, prepared(PromptLine))
    except msgspec.ValidationError as error:
        raise invalid_row(where, str(error)) from None
    if line.prompt and line.prompt.strip() and (source.chat or source.system is not None):
        system = [] if source.system is None else [{"role": "system", "content": source.system}]
        messages = [*system, {"role": "user", "content": line.prompt}]
        line = msgspec.structs.replace(line, prompt=None, messages=messages)
    return line


def _at_path(where: str, row: dict[str, Any], path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise invalid_row(where, f"has no column {path!r}; it has {', '.join(sorted(map(str, row)))}")
        value = value[name]
    return value


def _gym_rows(spec: str, options: dict[str, Any]) -> Iterator[Row]:
    size = options["size"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        detail = f"prompts {spec}: size is {size!r}; it must be a whole number, at least 1"
        raise Invalid(detail, name="size", value=size)
    for number in range(size):
        yield f"prompts {spec}, row {number + 1}", gym_row(spec.removeprefix(GYM), options, number)

"""Where prompts come from: JSON lines, Parquet, `datasets` folders, reasoning-gym, verifiers, any importable iterable.

A finite source is read once, at start, and every row of it is checked then. An endless one makes rows by number; what
is wrong with a row costs the ticket that asked for it. Code of the user's that makes rows is trusted to be quick.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from replaybuf.errors import Invalid, MissingExtra, PromptFault, ReplaybufError
from replaybuf.generator.environments.contract import METADATA_KEY, TASKSET, reasoning_gym
from replaybuf.generator.prompts.prompt import Encoder, Prompt, PromptLine, new_prompt, new_prompts, raw_lines, refused
from replaybuf.generator.tasksets.environment import Tasks
from replaybuf.kernel.plugins import is_object_path, load_object

EXTRA = "prompts"
GYM = "reasoning-gym:"
TRIED_ROWS = 16
"""So many rows of an endless source are made and checked at start."""
LARGEST_SOURCE_ROWS = 50_000_000
_GYM_BLOCK = 1000
_WINDOW = 4096
"""Rows of an endless iterator that are kept for tickets which come again."""

Row: TypeAlias = tuple[str, dict[str, Any]]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One source of prompts, as a curriculum file or `--prompts` names it.

    `prompts`: FILE.jsonl, FILE.parquet, a folder, reasoning-gym:DATASET, verifiers:TASKSET or MODULE:FUNCTION.
    `columns`: field of a prompt to the column it comes from, with dots into nested ones. `options` are the dataset's,
    the taskset's or the function's.
    `chat`: a text `prompt` becomes a user's message, after `system` where that is given.
    """

    prompts: str
    name: str = ""
    columns: dict[str, str] = {}
    options: dict[str, Any] = {}
    endless: bool = False
    chat: bool = False
    system: str | None = None


class Endless:
    """Prompts made on demand, by place: the prompt at a place is the same whenever it is asked for."""

    def __init__(self, source: Source, row_at: Callable[[int], dict[str, Any]], encoder: Encoder) -> None:
        self._source = source
        self._row_at = row_at
        self._encoder = encoder
        self._check: Callable[[Prompt], None] = lambda prompt: None

    def tried(self) -> list[Prompt]:
        """Make the first rows. Raises `Invalid` naming the row that is no prompt."""
        try:
            return [self._made(place) for place in range(TRIED_ROWS)]
        except ReplaybufError:
            raise
        except Exception as error:  # whatever a user's source raises is its author's to read
            raise Invalid(f"prompts {self._source.prompts} raised {error!r}", name="prompts") from error

    def checked_by(self, check: Callable[[Prompt], None]) -> Endless:
        """Check every prompt by `check`, which raises `Invalid`, before it is given out."""
        self._check = check
        return self

    def at(self, prompt_index: int) -> Prompt:
        """Return the prompt at a place. Raises `PromptFault` where the row raises or is no prompt."""
        try:
            prompt = self._made(prompt_index)
            self._check(prompt)
        except Invalid as error:
            raise PromptFault("prompt_invalid", error.detail, name=error.name, value=error.value) from error
        except Exception as error:  # whatever a user's source raises is its author's to read
            raise PromptFault("prompt_raised", f"prompts {self._source.prompts} raised {error!r}") from error
        return prompt

    def _made(self, place: int) -> Prompt:
        where = f"prompts {self._source.prompts}, row {place + 1}"
        return new_prompt(self._source.name, where, to_line(self._source, where, self._row_at(place)), self._encoder)


def open_source(source: Source, encoder: Encoder, folder: Path = Path()) -> list[Prompt] | Endless:
    """Read a finite source, or prepare an endless one. Files are found relative to `folder`.

    Raises `Invalid` naming the row for whatever could not become a prompt; `MissingExtra`.
    """
    spec = source.prompts
    if spec.startswith(TASKSET):
        return _open_taskset(source, encoder)
    if source.endless or (spec.startswith(GYM) and "size" not in source.options):
        if spec.startswith(GYM):
            return Endless(source, functools.partial(_gym_row, spec.removeprefix(GYM), source.options), encoder)
        if not is_object_path(spec):
            raise _finite(spec)
        return Endless(source, _rows_by_number(spec, source.options), encoder)
    rows, strict = _rows(source, folder / spec)
    lines = ((where, to_line(source, where, row, strict=strict)) for where, row in rows)
    return new_prompts(source.name, lines, encoder, f"prompts {spec}")


def _open_taskset(source: Source, encoder: Encoder) -> list[Prompt] | Endless:
    tasks = Tasks(source.prompts.removeprefix(TASKSET), source.options, encoder.folder)
    if tasks.infinite:
        return Endless(source, tasks.row, encoder)
    if source.endless:
        raise _finite(source.prompts)
    lines = ((where, to_line(source, where, row)) for where, row in tasks.rows())
    return new_prompts(source.name, lines, encoder, f"prompts {source.prompts}")


def _finite(spec: str) -> Invalid:
    return Invalid(f"prompts {spec} is finite; endless is for {GYM}DATASET and MODULE:FUNCTION", name="endless")


def read_prompts(file: Path, encoder: Encoder) -> list[Prompt]:
    """Read a JSON-lines file. Raises `Invalid` naming file and line for whatever could not become a prompt."""
    source = Source(prompts=str(file), name=file.stem)
    lines = ((where, to_line(source, where, row, strict=True)) for where, row in _json_rows(file))
    return new_prompts(source.name, lines, encoder, f"prompts file {file}")


def to_line(source: Source, where: str, row: Any, *, strict: bool = False) -> PromptLine:
    """Read one row. Columns that are no field of a prompt become metadata; with `strict` they are refused.

    Raises `Invalid` naming the row.
    """
    if not isinstance(row, dict):
        raise refused(where, f"is {type(row).__name__}; a row is a dict")
    fields = {field: _at_path(where, row, path) for field, path in source.columns.items()}
    taken = {path.partition(".")[0] for path in source.columns.values()}
    rest = {name: value for name, value in row.items() if name not in taken and name not in fields}
    fields |= {name: rest.pop(name) for name in PromptLine.__struct_fields__ if name in rest}
    if rest and not strict:
        fields["metadata"], rest = {**rest, **(fields.get("metadata") or {})}, {}
    try:
        line = msgspec.convert({**fields, **rest}, PromptLine)
    except msgspec.ValidationError as error:
        raise refused(where, str(error)) from None
    if line.prompt and line.prompt.strip() and (source.chat or source.system is not None):
        system = [] if source.system is None else [{"role": "system", "content": source.system}]
        messages = [*system, {"role": "user", "content": line.prompt}]
        line = msgspec.structs.replace(line, prompt=None, messages=messages)
    return line


def _at_path(where: str, row: dict[str, Any], path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise refused(where, f"has no column {path!r}; it has {', '.join(sorted(map(str, row)))}")
        value = value[name]
    return value


def _rows(source: Source, path: Path) -> tuple[Iterator[Row], bool]:
    """Return the rows, and whether a column that is no field of a prompt is taken for a slip of the pen."""
    spec = source.prompts
    if spec.startswith(GYM):
        return _gym_rows(spec, source.options), False
    if is_object_path(spec) and not path.exists():
        return _iterated(spec, source.options), False
    if path.suffix == ".parquet" or path.is_dir():
        return _arrow_rows(_files_of(path) if path.is_dir() else [path]), False
    return _json_rows(path), not source.columns


def _json_rows(file: Path) -> Iterator[Row]:
    for where, line in raw_lines(file):
        try:
            yield where, msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise refused(where, str(error)) from error


def _files_of(folder: Path) -> list[Path]:
    """List the files of a `datasets` folder: what `save_to_disk` wrote, else Parquet files below it, by name."""
    state, listed = folder / "state.json", folder / "dataset_dict.json"
    if state.is_file():
        return [folder / entry.filename for entry in _described(state, _DatasetState).data_files]
    if listed.is_file():
        splits = _described(listed, _DatasetDict).splits
        raise Invalid(
            f"prompts folder {folder} holds the splits {', '.join(splits)}; name one: {folder / splits[0]}",
            name="prompts",
            value=str(folder),
        )
    found = sorted(folder.rglob("*.parquet"))
    if not found:
        raise Invalid(
            f"prompts folder {folder} holds neither state.json of datasets.save_to_disk nor a .parquet file",
            name="prompts",
            value=str(folder),
        )
    return found


class _DataFile(msgspec.Struct):
    filename: str


class _DatasetState(msgspec.Struct):
    data_files: list[_DataFile] = msgspec.field(name="_data_files")


class _DatasetDict(msgspec.Struct):
    splits: Annotated[list[str], msgspec.Meta(min_length=1)]


_Described = TypeVar("_Described")


def _described(file: Path, kind: type[_Described]) -> _Described:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Invalid(f"prompts file {file}: {error}", name="prompts", value=str(file)) from None


def _arrow_rows(files: Iterable[Path]) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("reading prompts from Parquet or a datasets folder", EXTRA) from None
    for file in files:
        number = 0
        try:
            with file.open("rb") as stream:
                if file.suffix == ".parquet":
                    batches = pyarrow.parquet.ParquetFile(stream).iter_batches()
                else:
                    batches = pyarrow.ipc.open_stream(stream)
                for batch in batches:
                    for row in batch.to_pylist():
                        number += 1
                        yield f"prompts file {file}, row {number}", row
        except OSError as error:
            raise Invalid(f"prompts file {file}: {error.strerror or error}", name="prompts", value=str(file)) from error
        except pyarrow.ArrowException as error:
            raise Invalid(f"prompts file {file}: {error}", name="prompts", value=str(file)) from error


def _iterated(path: str, options: dict[str, Any]) -> Iterator[Row]:
    for number, row in enumerate(_raising_ours(path, iter(_called(path, options))), start=1):
        if number > LARGEST_SOURCE_ROWS:
            raise Invalid(
                f"prompts {path} gave more than {LARGEST_SOURCE_ROWS} rows; set endless = true in a curriculum file",
                name="prompts",
                value=path,
                bound=LARGEST_SOURCE_ROWS,
            )
        yield f"prompts {path}, row {number}", row


def _raising_ours(path: str, rows: Iterator[Any]) -> Iterator[Any]:
    """Go through rows of the user's. Raises `Invalid` naming the row that could not be made."""
    for number in itertools.count(1):
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # whatever a user's iterator raises is its author's to read
            raise Invalid(f"prompts {path}, row {number}, raised {error!r}", name="prompts", value=path) from error
        yield row


def _called(path: str, options: dict[str, Any]) -> Iterable[Any]:
    """Call the user's function, which returns an iterable. Raises `Invalid` where it does not."""
    try:
        made: Iterable[Any] = load_object(path)(**options)
    except Invalid:
        raise
    except Exception as error:  # whatever a user's function raises is its author's to read
        raise Invalid(f"prompts {path} raised {error!r}", name="prompts", value=path) from error
    if not isinstance(made, Iterable) and not hasattr(made, "__getitem__"):
        raise Invalid(f"prompts {path} returned {type(made).__name__}; needed: an iterable", name="prompts", value=path)
    return made


def _rows_by_number(path: str, options: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    made = _called(path, options)
    if isinstance(made, Sequence) or hasattr(made, "__getitem__"):
        by_number: Callable[[int], dict[str, Any]] = made.__getitem__
        return by_number
    return _Iterated(lambda: iter(_called(path, options))).at


class _Iterated:
    """Rows of an endless iterator by number. It goes forward only, so a row before the kept ones starts it anew."""

    def __init__(self, start: Callable[[], Iterator[dict[str, Any]]]) -> None:
        self._start = start
        self._restart()

    def _restart(self) -> None:
        self._rows, self._next = self._start(), 0
        self._kept: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def at(self, number: int) -> dict[str, Any]:
        if number < self._next and number not in self._kept:
            self._restart()
        while self._next <= number:
            try:
                self._kept[self._next] = next(self._rows)
            except StopIteration:
                raise Invalid(f"ended after {self._next} rows, and is said to be endless", name="endless") from None
            self._next += 1
            if len(self._kept) > _WINDOW:
                self._kept.popitem(last=False)
        return self._kept[number]


def _gym_rows(spec: str, options: dict[str, Any]) -> Iterator[Row]:
    size = options["size"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise Invalid(f"prompts {spec}: size is {size!r}; it must be a whole number from 1 on", name="size", value=size)
    for number in range(size):
        yield f"prompts {spec}, row {number + 1}", _gym_row(spec.removeprefix(GYM), options, number)


def _gym_row(name: str, options: dict[str, Any], number: int) -> dict[str, Any]:
    """Make one task of a procedural dataset, with what the environment reasoning-gym scores it by."""
    block, place = divmod(number, _GYM_BLOCK)
    key = json.dumps(options, sort_keys=True)
    entry = _gym_dataset(name, key, block)[place]
    config = {option: value for option, value in options.items() if option not in ("seed", "size")}
    task = {"dataset": name, "entry": entry, "config": config}
    return {"prompt": entry["question"], "answer": entry["answer"], "metadata": {METADATA_KEY: task}}


@functools.lru_cache(maxsize=8)
def _gym_dataset(name: str, options: str, block: int) -> Any:
    # In blocks, since some datasets make all they hold at once; most draw row i by seed + i, so blocks do not overlap.
    config = json.loads(options)
    seed = config.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise Invalid(f"prompts {GYM}{name}: seed is {seed!r}; it must be a whole number", name="seed", value=seed)
    config |= {"size": _GYM_BLOCK, "seed": seed + block * _GYM_BLOCK}
    library = reasoning_gym()
    try:
        return library.create_dataset(name, **config)
    except Exception as error:  # the library raises what its configuration classes raise, asserts too
        raise Invalid(f"reasoning-gym dataset {name!r} cannot be made: {error}", name="dataset") from error

"""Rows of files and of Python iterables, each with the words that say where it is.

A finite iterable yields rows in order. An endless one returns rows by number, so that a ticket that is issued again
gets the same prompt.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from replaybuf.errors import Invalid, MissingExtra, counted
from replaybuf.files import CONFIG_BYTES, PROMPT_LINE_BYTES, read_bounded
from replaybuf.generator.prompts.prompt import invalid_row
from replaybuf.plugins.entry_points import load_object
from replaybuf.wire.decoding import prepared

EXTRA = "prompts"
MAX_ROWS = 50_000_000
_CACHED_ROWS = 4096

Row: TypeAlias = tuple[str, dict[str, Any]]
_Described = TypeVar("_Described")


def file_rows(path: Path) -> Iterator[Row]:
    """Read JSON lines, Parquet or a `datasets` folder. Raises `Invalid` naming file and row, `MissingExtra`."""
    if path.is_dir():
        return _arrow_rows(_files_of(path))
    return _arrow_rows([path]) if path.suffix == ".parquet" else json_rows(path)


def json_rows(file: Path) -> Iterator[Row]:
    """Read the lines of a JSON-lines file that are not blank. Raises `Invalid` naming file and line."""
    try:
        with file.open("rb") as stream:
            lines = iter(functools.partial(stream.readline, PROMPT_LINE_BYTES + 1), b"")
            for number, line in enumerate(lines, start=1):
                if len(line) > PROMPT_LINE_BYTES:
                    detail = f"prompts file {file}, line {number} has more than {PROMPT_LINE_BYTES} bytes"
                    raise Invalid(f"{detail}; end each row with a line break", name="prompts", value=str(file))
                if line.strip():
                    where = f"prompts file {file}, line {number}"
                    try:
                        yield where, msgspec.json.decode(line)
                    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                        raise invalid_row(where, str(error)) from error
    except OSError as error:
        raise _bad_file(file, error.strerror) from error


def object_rows(path: str, options: dict[str, Any]) -> Iterator[Row]:
    """Call the function MODULE:NAME and yield the rows of its iterable. Raises `Invalid`."""
    rows = iter(_call(path, options))
    for number in itertools.count(1):
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # an iterator of the user may raise anything
            raise Invalid(f"prompts {path}, row {number}, raised {error!r}", name="prompts", value=path) from error
        if number > MAX_ROWS:
            detail = f"prompts {path} has more than {MAX_ROWS} rows; set endless = true in a curriculum file"
            raise Invalid(detail, name="prompts", value=path, bound=MAX_ROWS)
        yield f"prompts {path}, row {number}", row


def object_rows_by_number(path: str, options: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    """Call the function MODULE:NAME; return access to the rows of its endless iterable by number."""
    rows = _call(path, options)
    if hasattr(rows, "__getitem__"):
        by_number: Callable[[int], dict[str, Any]] = rows.__getitem__
        return by_number
    return _Replay(lambda: iter(_call(path, options))).at


class _Replay:
    """Rows of an iterator by number. The iterator restarts for a row before the cached ones."""

    def __init__(self, start: Callable[[], Iterator[dict[str, Any]]]) -> None:
        self._start = start
        self._restart()

    def _restart(self) -> None:
        self._rows, self._next = self._start(), 0
        self._cache: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def at(self, number: int) -> dict[str, Any]:
        if number < self._next and number not in self._cache:
            self._restart()
        while self._next <= number:
            try:
                self._cache[self._next] = next(self._rows)
            except StopIteration:
                raise Invalid(
                    f"endless is true, but the rows ended after {counted(self._next, 'row')}", name="endless"
                ) from None
            self._next += 1
            if len(self._cache) > _CACHED_ROWS:
                self._cache.popitem(last=False)
        return self._cache[number]


def _call(path: str, options: dict[str, Any]) -> Iterable[Any]:
    try:
        rows: Iterable[Any] = load_object(path)(**options)
    except Invalid:
        raise
    except Exception as error:  # a function of the user may raise anything
        raise Invalid(f"prompts {path} raised {error!r}", name="prompts", value=path) from error
    if not isinstance(rows, Iterable) and not hasattr(rows, "__getitem__"):
        detail = f"prompts {path} returned {type(rows).__name__}; it must return an iterable"
        raise Invalid(detail, name="prompts", value=path)
    return rows


class _DataFile(msgspec.Struct):
    filename: str


class _DatasetState(msgspec.Struct):
    data_files: list[_DataFile] = msgspec.field(name="_data_files")


class _DatasetDict(msgspec.Struct):
    splits: Annotated[list[str], msgspec.Meta(min_length=1)]


def _files_of(folder: Path) -> list[Path]:
    """List the files of a `datasets` folder: those of `save_to_disk`, else all Parquet files below it by name."""
    if state := _described(folder / "state.json", _DatasetState):
        return [folder / file.filename for file in state.data_files]
    if described := _described(folder / "dataset_dict.json", _DatasetDict):
        splits = described.splits
        detail = f"prompts folder {folder} holds the splits {', '.join(splits)}; name one: {folder / splits[0]}"
        raise Invalid(detail, name="prompts", value=str(folder))
    files = sorted(folder.rglob("*.parquet"))
    if not files:
        detail = f"prompts folder {folder} holds neither state.json of datasets.save_to_disk nor a .parquet file"
        raise Invalid(detail, name="prompts", value=str(folder))
    return files


def _described(file: Path, kind: type[_Described]) -> _Described | None:
    try:
        return msgspec.json.decode(read_bounded(file, CONFIG_BYTES), type=prepared(kind)) if file.is_file() else None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_file(file, error) from None


def _arrow_rows(files: Iterable[Path]) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("reading prompts from Parquet or a datasets folder", EXTRA) from None
    for file in files:
        try:
            with file.open("rb") as stream:
                if file.suffix == ".parquet":
                    batches = pyarrow.parquet.ParquetFile(stream).iter_batches()
                else:
                    batches = pyarrow.ipc.open_stream(stream)
                rows = (row for batch in batches for row in batch.to_pylist())
                for number, row in enumerate(rows, start=1):
                    yield f"prompts file {file}, row {number}", row
        except OSError as error:
            raise _bad_file(file, error.strerror or error) from error
        except pyarrow.ArrowException as error:
            raise _bad_file(file, error) from error


def _bad_file(file: Path, why: object) -> Invalid:
    return Invalid(f"prompts file {file}: {why}", name="prompts", value=str(file))

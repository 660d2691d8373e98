"""Reader of an export. The folder may come from somebody else, so names, sizes, columns and values are checked.

A Parquet file is decoded after its checksum, its columns and its number of values are right. Each error names the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from replaybuf.client.exports.folder import FORMAT, MANIFEST, NO_STEP, FileEntry, Manifest, checksum
from replaybuf.client.exports.tables import LATER_COLUMNS, READ_COLUMNS, TABLES, group_of_rows, pyarrow, schema_of
from replaybuf.errors import Invalid, ReplaybufError
from replaybuf.files import RECORDING_BYTES, read_bounded
from replaybuf.wire.config import check_run_name
from replaybuf.wire.decoding import prepared
from replaybuf.wire.group import Group, GroupJson, group_from_json
from replaybuf.wire.group_check import GroupLimits, check_group

T = TypeVar("T")

MOST_VALUES = 2**29
"""Values of a file. A page of a cursor has 4 MiB and one group, whose frame has at most 512 MiB."""

_FILE = re.compile(rf"({'|'.join(TABLES)})/step=({NO_STEP}|\d{{1,16}})/part-\d{{6,12}}\.parquet", re.ASCII)

_Rows = tuple[dict[str, Any], list[dict[str, Any]]]
"""The row of a group and those of its rollouts."""


class ExportReader:
    """Reads an export, each file once its checksum is right."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / MANIFEST
        try:
            self._check_place(path)
            self.manifest = msgspec.json.decode(read_bounded(path, RECORDING_BYTES), type=prepared(Manifest))
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Invalid(f"{folder} is not an export: {error}", name="from", value=str(folder)) from error
        if self.manifest.format != FORMAT:
            raise Invalid(
                f"{folder} has format {self.manifest.format}; this release reads format {FORMAT}",
                name="format",
                value=self.manifest.format,
                bound=FORMAT,
            )
        self._check_manifest()

    def error(self, name: str, why: str) -> Invalid:
        """Return the error of a file that is not as `replaybuf export` writes it."""
        detail = f"{self._folder / name}: {why}; export the run again"
        return Invalid(detail, name="from", value=str(self._folder / name))

    def config(self, shape: type[T]) -> T:
        """Return the configuration of the run as a struct. Raises `Invalid`."""
        try:
            return msgspec.convert(self.manifest.config, prepared(shape))
        except msgspec.ValidationError as error:
            raise self.error(MANIFEST, f"config: {error}") from error

    def parts(self) -> Iterator[list[str]]:
        """Yield the names of the group files of each page, in the order of storing."""
        by_part: dict[str, list[str]] = {}
        for name in self.manifest.files:
            if name.startswith("groups/"):
                by_part.setdefault(Path(name).name, []).append(name)
        for part in sorted(by_part):
            yield sorted(by_part[part])

    def read(self, name: str) -> list[dict[str, Any]]:
        """Read the rows of a file of the manifest. Raises `Invalid` for a missing, changed or damaged file."""
        path = self._folder / name
        entry = self.manifest.files[name]
        self._check_place(path)
        digest = checksum(path) if path.is_file() else "no such file"
        if digest != entry.sha256:
            raise Invalid(f"{path} does not match the manifest: {digest}", name="from", value=name)
        arrow = pyarrow()
        try:
            with path.open("rb") as stream:
                return self._read_rows(stream, name, entry)
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise self.error(name, f"not readable as Parquet: {error}") from error

    def groups(self) -> Iterator[_Rows]:
        """Yield the row of each group with those of its rollouts, in the order of storing."""
        for names in self.parts():
            groups = [rows for name in names for rows in self.read_groups(name).values()]
            yield from sorted(groups, key=lambda rows: int(rows[0]["number"]))

    def places(self) -> dict[str, str]:
        """Return the name of the file of each group, by its id."""
        return {row["group_id"]: name for names in self.parts() for name in names for row in self.read(name)}

    def read_groups(self, name: str) -> dict[str, _Rows]:
        """Read a file of groups with the file of their rollouts: both rows by group id."""
        rollouts: dict[str, list[dict[str, Any]]] = {}
        beside = name.replace("groups/", "rollouts/", 1)
        for row in self.read(beside) if beside in self.manifest.files else ():
            rollouts.setdefault(row["group_id"], []).append(row)
        groups = {row["group_id"]: (row, rollouts.get(row["group_id"], [])) for row in self.read(name)}
        for group_id, (row, several) in groups.items():
            if bool(several) != row["has_rollouts"]:
                why = f"has_rollouts of group {group_id!r} is {row['has_rollouts']}, and {beside} has {len(several)}"
                raise self.error(name, why)
        return groups

    def group_json(self, row: dict[str, Any], rollouts: list[dict[str, Any]]) -> GroupJson:
        """Return the group of its rows. Raises `Invalid` for values of another type."""
        try:
            return group_of_rows(row, rollouts)
        except ReplaybufError as error:
            raise self._group_error(row["group_id"], error.detail) from error

    def group(self, wire: GroupJson) -> Group:
        """Return a group as columns. Raises `Invalid` for a group that no run could have stored."""
        try:
            group = group_from_json(wire)
        except ReplaybufError as error:
            raise self._group_error(wire.group_id, error.detail) from error
        if rejection := check_group(group, GroupLimits(adapters=frozenset({group.adapter}))):
            raise self._group_error(wire.group_id, rejection.detail)
        return group

    def _group_error(self, group_id: str | None, why: str) -> Invalid:
        return self.error("", f"group {group_id!r} could not be stored by a run: {why}")

    def _check_manifest(self) -> None:
        """Raise `Invalid` for names of files that the writer does not write, and for counts that contradict them."""
        check_run_name(self.manifest.run)
        rows: Counter[str] = Counter(dict.fromkeys(TABLES, 0))
        for name, entry in self.manifest.files.items():
            match = _FILE.fullmatch(name)
            if match is None:
                raise self.error(MANIFEST, f"files has the name {name!r}; an export has no such file")
            rows[match[1]] += entry.rows
        if self.manifest.rows != rows:
            raise self.error(MANIFEST, f"rows is {self.manifest.rows}; the files have {dict(rows)}")

    def _check_place(self, path: Path) -> None:
        """Raise `Invalid` for a link that leads out of the folder."""
        if not path.resolve().is_relative_to(self._folder.resolve()):
            raise self.error(str(path.relative_to(self._folder)), "a link leads out of the folder of the export")

    def _read_rows(self, stream: IO[bytes], name: str, entry: FileEntry) -> list[dict[str, Any]]:
        """Decode a file once its columns and numbers of rows and values are right."""
        table = name.partition("/")[0]
        # `ParquetFile`, because `read_table` adds a column for the step in the path.
        file = pyarrow().parquet.ParquetFile(stream)
        facts, types = file.metadata, {field.name: field.type for field in file.schema_arrow}
        for field in schema_of(table):
            kind = types.get(field.name)
            if kind != field.type and (kind is not None or field.name not in LATER_COLUMNS):
                raise self.error(name, f"column {field.name} is {kind}; {field.type} is needed")
        if facts.num_rows != entry.rows:
            raise self.error(name, f"it has {facts.num_rows} rows; the manifest says {entry.rows}")
        groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
        values = sum(group.column(place).num_values for group in groups for place in range(group.num_columns))
        if values > MOST_VALUES:
            raise self.error(name, f"it has {values} values; the maximum is {MOST_VALUES}")
        columns = file.read([column for column in READ_COLUMNS[table] if column in types])
        for column, required in READ_COLUMNS[table].items():
            if required and columns.column(column).null_count:
                raise self.error(name, f"column {column} has an empty value")
        rows: list[dict[str, Any]] = columns.to_pylist()
        return rows

"""Exports that somebody else wrote: what `replaybuf export` does not write is one error that names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from replaybuf import Client
from replaybuf.client.exports import reader as reading
from replaybuf.client.exports.folder import FORMAT, MANIFEST, ExportWriter, FileEntry, Manifest, checksum
from replaybuf.client.exports.import_run import import_run
from replaybuf.client.exports.reader import ExportReader
from replaybuf.client.exports.steps import RecordedSteps, stored_groups
from replaybuf.errors import Invalid
from replaybuf.wire.config import RunConfig
from tests.conftest import RunClient, ServeProcess

GROUPS = "groups/step=0/part-000000.parquet"
ROLLOUTS = "rollouts/step=0/part-000000.parquet"
LEDGER = "ledger/step=0/part-000000.parquet"
CONFIG = {"batch": {"groups_per_batch": 1, "seq_len": 64}}
GROUP: dict[str, Any] = {
    "group_id": "g",
    "number": 1,
    "state": "live",
    "prompt_id": "p",
    "adapter": "",
    "policy_version": 0,
    "batches": [0],
    "has_rollouts": True,
    "metadata": "{}",
}
ROLLOUT: dict[str, Any] = {
    "group_id": "g",
    "number": 1,
    "rollout": 0,
    "prompt_ids": [1],
    "completion_ids": [2, 3],
    "inference_logprobs": [-1.0, -2.0],
    "reward": 1.0,
    "rewards": "{}",
    "temperature": 1.0,
}
BATCH: dict[str, Any] = {
    "type": "BATCH",
    "step": 0,
    "generation": 0,
    "batch_id": "b",
    "digest": "d",
    "version": 0,
    "strategy": "replay",
    "options": {},
    "seed": [],
    "tokens": 3,
    "rollouts": 1,
    "groups": [[1, "g", "p", None, "", 0, 0, 1, 3, ""]],
}


def write_export(folder: Path, *, record: dict[str, Any] | str = BATCH, **columns: Any) -> Path:
    """An export of one group with one rollout and one step; `columns` replace values in its rows."""
    text = record if isinstance(record, str) else msgspec.json.encode(record).decode()
    ledger = {"entry": 1, "type": "BATCH", "at_s": 0.0, "record": text}
    with ExportWriter(folder, "r") as writer:
        for table, row in (("groups", GROUP), ("rollouts", ROLLOUT), ("ledger", ledger)):
            writer.write(table, 0, {0: [row | {name: columns[name] for name in row.keys() & columns}]})
        manifest = Manifest(
            format=FORMAT,
            run="r",
            generation=0,
            step=1,
            config=CONFIG,
            rows=writer.rows,
            without_rollouts=0,
            trimmed_groups=0,
            trimmed_entries=0,
            steps={0: ["g"]},
            files=writer.files,
        )
        writer.finish(manifest)
    return folder


def rewrite(folder: Path, change: Callable[[Manifest], Manifest]) -> Path:
    """Change the manifest of an export, with the checksums of its files as they are now."""
    path = folder / MANIFEST
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    files = {name: FileEntry(entry.rows, checksum(folder / name)) for name, entry in manifest.files.items()}
    path.write_bytes(msgspec.json.encode(change(msgspec.structs.replace(manifest, files=files))))
    return folder


def read_all(folder: Path) -> None:
    reader = ExportReader(folder)
    list(stored_groups(reader))
    RecordedSteps(reader).body(0)


@pytest.mark.parametrize("name", ["../secret.parquet", "/etc/passwd", "groups/../../secret.parquet", GROUPS + "\n"])
def test_names_that_an_export_does_not_write_are_refused(tmp_path: Path, name: str) -> None:
    """The file is outside of the folder, with a right checksum: it must not be read."""
    folder = write_export(tmp_path / "out")
    outside = tmp_path / "secret.parquet"
    outside.write_bytes((folder / GROUPS).read_bytes())
    entry = FileEntry(1, checksum(outside))
    rewrite(folder, lambda manifest: msgspec.structs.replace(manifest, files=manifest.files | {name: entry}))
    with pytest.raises(Invalid, match="no such file"):
        read_all(folder)


@pytest.mark.parametrize("linked", [GROUPS, "groups/step=0", "groups", MANIFEST])
def test_links_that_lead_out_of_the_folder_are_refused(tmp_path: Path, linked: str) -> None:
    folder = write_export(tmp_path / "out")
    (folder / linked).rename(tmp_path / "elsewhere")
    (folder / linked).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Invalid, match="a link leads out of the folder"):
        read_all(folder)


def test_a_folder_reached_by_a_link_is_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(write_export(tmp_path / "out"))
    read_all(tmp_path / "link")


def other_type(table: pa.Table) -> pa.Table:
    return table.set_column(table.column_names.index("prompt_id"), "prompt_id", pa.array([7]))


def null_id(table: pa.Table) -> pa.Table:
    return table.set_column(table.column_names.index("group_id"), "group_id", pa.array([None], pa.string()))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda table: table.drop_columns(["has_rollouts"]), "column has_rollouts is None"),
        (other_type, "column prompt_id is int64; string is needed"),
        (null_id, "column group_id has an empty value"),
        (lambda table: pa.concat_tables([table, table]), "it has 2 rows; the manifest says 1"),
    ],
    ids=["missing", "type", "empty", "rows"],
)
def test_columns_that_do_not_fit_the_schema_are_named(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table], why: str
) -> None:
    folder = write_export(tmp_path / "out")
    table = pyarrow.parquet.ParquetFile(folder / GROUPS).read()
    pyarrow.parquet.write_table(change(table), folder / GROUPS)
    rewrite(folder, lambda manifest: manifest)
    with pytest.raises(Invalid, match=why) as refused:
        read_all(folder)
    assert GROUPS in refused.value.detail


def flip_in_the_middle(content: bytes) -> bytes:
    return content[:20] + bytes(byte ^ 0xFF for byte in content[20:200]) + content[200:]


@pytest.mark.parametrize(
    "damage", [lambda content: b"PAR1", lambda content: content[:-9] + b"\xff" * 9, flip_in_the_middle]
)
def test_damaged_parquet_with_a_right_checksum_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    folder = write_export(tmp_path / "out")
    (folder / ROLLOUTS).write_bytes(damage((folder / ROLLOUTS).read_bytes()))
    rewrite(folder, lambda manifest: manifest)
    with pytest.raises(Invalid) as refused:
        read_all(folder)
    assert ROLLOUTS in refused.value.detail


def test_a_file_with_too_many_values_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal values compress by a factor of 100,000, so the size of a file bounds nothing."""
    monkeypatch.setattr(reading, "MOST_VALUES", 1000)
    tokens: dict[str, Any] = {"completion_ids": [2] * 500, "inference_logprobs": [-1.0] * 500}
    with pytest.raises(Invalid, match="values; the maximum is 1000"):
        ExportReader(write_export(tmp_path / "out", **tokens)).read(ROLLOUTS)


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt_ids": [-1]},
        {"prompt_ids": [None]},
        {"inference_logprobs": [-1.0]},
        {"inference_logprobs": None},
        {"rewards": "{"},
        {"rewards": '{"x": "y"}'},
        {"reward": float("nan")},
        {"metadata": "[" * 100_000},
        {"metadata": "[]"},
        {"temperature": None},
        {"has_rollouts": False},
        {"policy_version": -3},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_groups_that_no_run_could_have_stored_are_named(tmp_path: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="group 'g'"):
        list(stored_groups(ExportReader(write_export(tmp_path / "out", **changed))))


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ("{", "a ledger record is damaged"),
        ("[" * 100_000, "a ledger record is damaged"),
        (BATCH | {"step": "zero"}, "a ledger record is damaged"),
        (BATCH | {"groups": [[1, "other", "p", None, "", 0, 0, 1, 3, ""]]}, "the batch has group 'other'"),
        (BATCH | {"groups": []}, "the record of the batch does not fit its groups"),
    ],
    ids=["json", "deep", "type", "group", "no groups"],
)
def test_damaged_ledger_records_are_named(tmp_path: Path, record: Any, why: str) -> None:
    with pytest.raises(Invalid, match=why) as refused:
        read_all(write_export(tmp_path / "out", record=record))
    assert "ledger/step=0" in refused.value.detail


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: msgspec.structs.replace(manifest, rows={}),
        lambda manifest: msgspec.structs.replace(manifest, rows=manifest.rows | {"groups": 7}),
        lambda manifest: msgspec.structs.replace(manifest, run="../other"),
        lambda manifest: msgspec.structs.replace(manifest, config={"batch": 7}),
    ],
    ids=["no rows", "other rows", "run", "config"],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, change: Callable[[Manifest], Manifest]) -> None:
    folder = rewrite(write_export(tmp_path / "out"), change)
    with pytest.raises(Invalid):
        ExportReader(folder).config(RunConfig)


def test_the_run_of_an_import_writes_to_no_folder_of_the_export(
    service: ServeProcess, run: RunClient, tmp_path: Path
) -> None:
    chosen = tmp_path / "chosen by the export"
    chosen.mkdir()
    limits = {"max_bytes_in_memory": 1 << 20, "max_group_bytes": 1 << 20}
    config = CONFIG | {"spill": {"url": f"file://{chosen}"}, "limits": limits}
    folder = write_export(tmp_path / "out")
    rewrite(folder, lambda manifest: msgspec.structs.replace(manifest, config=config))
    with Client(service.url, run.run) as client:
        outcomes = import_run(client, ExportReader(folder), replay_order=False, report=lambda done, total: None)
        assert outcomes == {"stored": 1}
        assert client.get_run().config["spill"] is None
    assert list(chosen.iterdir()) == []

"""docs/frames.md: its code reads a frame; it names every column, field and limit of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from replaybuf.wire.column.columns import COMPRESSED_FROM_BYTES, KINDS
from replaybuf.wire.frame import LARGEST_HEADER_BYTES, FrameHeader, encode_frame
from replaybuf.wire.group import LARGEST_REWARD_PARTS, LARGEST_ROLLOUTS
from tests.builders import group_of_lengths

PAGE = (Path(__file__).parents[2] / "docs" / "frames.md").read_text()


def test_the_code_on_the_page_reads_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = group_of_lengths([3, 5, 4])
    Path("group.frame").write_bytes(encode_frame(made))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    columns: dict[str, Any] = {}
    exec(code, columns)
    assert [ids.tolist() for ids in columns["completions"]] == [[2] * 2, [2] * 4, [2] * 3]
    assert columns["columns"]["prompt_ids"].tolist() == made.prompt_ids.tolist()


def test_every_column_field_and_limit_is_on_the_page() -> None:
    for name, kind in KINDS.items():
        (row,) = [line for line in PAGE.splitlines() if line.startswith("|") and f"`{name}`" in line]
        assert f"`{kind.dtype}`" in row.replace("\\|", "|")
        assert row.endswith("| raw, zstd |") == kind.per.endswith("token")
    assert " ".join(FrameHeader.__struct_fields__) in PAGE
    for number in (COMPRESSED_FROM_BYTES, LARGEST_ROLLOUTS, LARGEST_REWARD_PARTS):
        assert f"{number:,}" in PAGE
    assert f"| header, with metadata and finish reasons | {LARGEST_HEADER_BYTES >> 10} KiB |" in PAGE

"""Files that readers see whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from replaybuf.files import write_whole


def test_a_written_file_replaces_the_one_before_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for content in (b"one", b"two"):
        write_whole(tmp_path / "state.json", content)
        assert (tmp_path / "state.json").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_write_that_fails_leaves_the_file_before(tmp_path: Path) -> None:
    write_whole(tmp_path / "state.json", b"one")
    (tmp_path / ".state.json.part").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "state.json", b"two")
    assert (tmp_path / "state.json").read_bytes() == b"one"

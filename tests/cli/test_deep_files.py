"""Files nested too deeply for a decoder: one error that names the file, as for any other damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from replaybuf.errors import Invalid
from replaybuf.generator.prompts.rows import json_rows
from replaybuf.lab.simulate.recording import read_file as read_recording
from replaybuf.launch.file import read_file as read_run_file
from replaybuf.service.http.guard.token_file import read_tokens
from replaybuf.wire.model.checkpoints import STATE_FILE, read_state

DEEP = '{"x": ' + "[" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("prompts.jsonl", DEEP, lambda path: list(json_rows(path))),
        ("tokens", DEEP, read_tokens),
        ("recording.json", DEEP, read_recording),
        ("run.toml", "x = " + "[" * 100_000, read_run_file),
        (STATE_FILE, DEEP, lambda path: read_state(path.parent)),
    ],
    ids=["prompts", "tokens", "recording", "run file", "checkpoint"],
)
def test_a_file_that_is_nested_too_deeply_is_named(
    tmp_path: Path, name: str, content: str, read: Callable[[Path], object]
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(Invalid, match=str(tmp_path)):
        read(tmp_path / name)

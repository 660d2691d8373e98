"""Files that somebody else may have written are read with a bound, which is checked before they are read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from cyclopts import App

from replaybuf.cli import configuration
from replaybuf.cli.operate import runs
from replaybuf.client.exports.reader import ExportReader
from replaybuf.errors import Invalid
from replaybuf.files import (
    CONFIG_BYTES,
    MODEL_FILE_BYTES,
    PROMPT_LINE_BYTES,
    RECORDING_BYTES,
    STATE_BYTES,
    TOKENS_BYTES,
    read_bounded,
)
from replaybuf.generator.prompts.curriculum import read_plan
from replaybuf.generator.prompts.rows import file_rows
from replaybuf.lab.demo.folder import DemoOptions, open_folder
from replaybuf.lab.simulate.command import SimulateOptions, simulate
from replaybuf.lab.simulate.recording import read_file as read_recording
from replaybuf.launch.file import read_file as read_run_file
from replaybuf.launch.progress import LONGEST_LINE_BYTES, LineReader
from replaybuf.service.http.guard.token_file import read_tokens
from replaybuf.wire.model.checkpoints import read_state
from replaybuf.wire.text.model_tokenizer import Tokenizer
from replaybuf_trainer.engine.lora import read_lora
from replaybuf_trainer.feeds.fake import with_vocabulary
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.option_groups import FakeShapes


class Line(msgspec.Struct):
    """A line of a state file."""

    live: int


READERS: dict[str, tuple[str, int, Callable[[Path], object]]] = {
    "configuration of a command": ("a.toml", CONFIG_BYTES, lambda path: configuration.sources(App(), path)),
    "run to create": ("a.json", CONFIG_BYTES, lambda path: runs.create("r", runs.CreateOptions(from_=path))),
    "run to simulate": ("a.json", CONFIG_BYTES, lambda path: simulate(SimulateOptions(config_run=path))),
    "file of up": ("run.toml", CONFIG_BYTES, read_run_file),
    "demo": ("demo.json", CONFIG_BYTES, lambda path: open_folder(DemoOptions(data_dir=path.parent, resume=True))),
    "curriculum": ("a.toml", CONFIG_BYTES, read_plan),
    "prompts": ("a.jsonl", PROMPT_LINE_BYTES, lambda path: list(file_rows(path))),
    "prompts folder": ("state.json", CONFIG_BYTES, lambda path: list(file_rows(path.parent))),
    "tokens": ("tokens", TOKENS_BYTES, read_tokens),
    "recording": ("a.json", RECORDING_BYTES, read_recording),
    "export": ("manifest.json", RECORDING_BYTES, lambda path: ExportReader(path.parent)),
    "tokenizer": ("tokenizer.json", MODEL_FILE_BYTES, lambda path: Tokenizer(path.parent)),
    "model": ("config.json", MODEL_FILE_BYTES, lambda path: load_model(path.parent)),
    "made-up batches": ("config.json", MODEL_FILE_BYTES, lambda path: with_vocabulary(FakeShapes(), path.parent)),
    "adapter": ("adapter_config.json", CONFIG_BYTES, lambda path: read_lora(None, path.parent)),
    "checkpoint": ("state.json", STATE_BYTES, lambda path: read_state(path.parent)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_above_its_bound_is_an_error_with_file_and_bound(name: str, tmp_path: Path) -> None:
    file, most_bytes, read = READERS[name]
    with (tmp_path / file).open("wb") as stream:
        stream.truncate(most_bytes + 1)
    with pytest.raises(Invalid) as raised:
        read(tmp_path / file)
    assert str(tmp_path) in str(raised.value) and str(most_bytes) in str(raised.value)


def test_the_index_of_weights_is_bounded(tmp_path: Path) -> None:
    """The library that loads a model reads it whole."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with (tmp_path / "model.safetensors.index.json").open("wb") as stream:
        stream.truncate(MODEL_FILE_BYTES + 1)
    with pytest.raises(Invalid, match=rf"maximum is {MODEL_FILE_BYTES}.*index\.json"):
        load_model(tmp_path)


def test_a_file_of_the_maximum_size_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert read_bounded(path, 3) == b"abc"
    with pytest.raises(OSError, match=r"it has 3 bytes; the maximum is 2; .*/file"):
        read_bounded(path, 2)


def test_a_pipe_that_never_ends_is_bounded(tmp_path: Path) -> None:
    """A pipe has no size. It is closed as soon as the bound is exceeded."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    closed = threading.Event()

    def write() -> None:
        try:
            with path.open("wb", buffering=0) as pipe:
                while True:
                    pipe.write(bytes(1 << 16))
        except BrokenPipeError:
            closed.set()

    threading.Thread(target=write, daemon=True).start()
    with pytest.raises(OSError, match="the maximum is 100000"):
        read_bounded(path, 100_000)
    assert closed.wait(30.0)


def test_a_prompts_file_may_have_any_size(tmp_path: Path) -> None:
    """Only its lines are bounded."""
    line = b'{"prompt": "%s"}\n' % (b"x" * (PROMPT_LINE_BYTES // 2))
    (tmp_path / "a.jsonl").write_bytes(3 * line)
    assert len(list(file_rows(tmp_path / "a.jsonl"))) == 3


def test_a_line_of_a_state_file_is_bounded(tmp_path: Path) -> None:
    """What is longer counts as broken lines; the lines after it are read, and a line without its end is kept."""
    path, line = tmp_path / "lines.jsonl", b'{"live": 3}'
    reader = LineReader(path, Line)
    with path.open("ab", buffering=0) as file:
        file.write(b"x" * (2 * LONGEST_LINE_BYTES + 7))
        assert reader.new_lines() == []
        file.write(b"\n" + line + b"\n" + line)
        assert [record.live for record in reader.new_lines()] == [3]
        file.write(b"\n")
        assert [record.live for record in reader.new_lines()] == [3]

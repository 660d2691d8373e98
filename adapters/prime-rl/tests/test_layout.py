"""A prime-rl whose trainer would read the files as something else is refused before the first one is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from prime_source import PACKAGE, SOURCE

from replaybuf.errors import Invalid
from replaybuf_prime_rl.command import main
from replaybuf_prime_rl.layout import TYPES, check_layout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout with the files that are read, to be changed."""
    for name in (Path("pyproject.toml"), PACKAGE / TYPES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCE.checkout() / name, tmp_path / name)
    return tmp_path


def replaced(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def another_order(copy: Path) -> None:
    old = "    loss_mask: list[bool]\n    advantages: list[float]\n"
    replaced(copy / PACKAGE / TYPES, old, "".join(reversed(old.splitlines(keepends=True))))


def another_type(copy: Path) -> None:
    replaced(copy / PACKAGE / TYPES, "    seq_lens: list[int]\n", "    seq_lens: bytes\n")


def one_more(copy: Path) -> None:
    replaced(copy / PACKAGE / TYPES, "    seq_lens: list[int]\n", "    seq_lens: list[int]\n    uses: list[int]\n")


def another_release(copy: Path) -> None:
    replaced(copy / "pyproject.toml", 'version = "0.8.0"', 'version = "0.9.0"')


def another_installed_release(copy: Path) -> None:
    folder = (copy / PACKAGE).parent / "prime_rl-0.9.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: prime_rl\nVersion: 0.9.0\n")


def maps(copy: Path) -> None:
    replaced(
        copy / PACKAGE / TYPES, "class MicroBatch(msgspec.Struct, array_like=True,", "class MicroBatch(msgspec.Struct,"
    )


def without_types(copy: Path) -> None:
    (copy / PACKAGE / TYPES).unlink()


def test_the_tested_source_is_taken(copy: Path) -> None:
    check_layout(copy / PACKAGE)
    (copy / "pyproject.toml").unlink()
    check_layout(copy / PACKAGE)  # of no known release, with the same fields


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_order, "has micro-batches of input_ids: list\\[int\\], advantages: .*; written here: input_ids"),
        (another_type, "seq_lens: bytes, .*; written here: .* seq_lens: list"),
        (one_more, "has micro-batches of .* uses: list"),
        (another_release, "is release 0.9.0; tested: 0.8; install prime-rl 0.8.0"),
        (another_installed_release, "is release 0.9.0; tested: 0.8"),
        (maps, "has micro-batches that are not arrays: class MicroBatch"),
        (without_types, "has no readable transports/rollouts/types.py"),
    ],
)
def test_another_layout_is_refused(copy: Path, change: Callable[[Path], None], message: str) -> None:
    change(copy)
    with pytest.raises(Invalid, match=message):
        check_layout(copy / PACKAGE)


def test_the_process_ends_before_it_asks_the_service(copy: Path) -> None:
    another_order(copy)
    arguments = ["--url", "http://127.0.0.1:9", "--run", "main", "--output-dir", str(copy)]
    with pytest.raises(SystemExit, match="has micro-batches of"):
        main([*arguments, "--prime-rl", str(copy / PACKAGE)])

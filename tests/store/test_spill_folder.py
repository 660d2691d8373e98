"""One contract of all spill folders: a local one, and fsspec's store in memory in place of an object store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import SpillAway
from replaybuf.store import spill_folder
from replaybuf.store.spill_folder import MARK, LocalFolder, ObjectFolder, SpillFolder
from replaybuf.wire.spill import path_of

RUN = "r-0123456789abcdef"
_names = itertools.count()


@pytest.fixture(params=["file", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SpillFolder]:
    """An empty folder with a run's folder in it."""
    made: Any = LocalFolder(f"file://{tmp_path}/a/b") if request.param == "file" else None
    made = made or ObjectFolder(f"memory://spill-{next(_names)}")
    made.probe()
    made.create(RUN)
    yield made


def path(number: int) -> str:
    return path_of(RUN, number, f"key{number}")


def lose(folder: SpillFolder, name: str) -> None:
    """Delete a file behind the folder's back."""
    if isinstance(folder, ObjectFolder):
        folder._store.rm_file(f"{folder._root}/{name}")
    else:
        assert isinstance(folder, LocalFolder)
        (folder._root / name).unlink()


def test_what_is_written_is_read_and_deleted(folder: SpillFolder) -> None:
    paths = [path(1), path(2), path(1000)]
    for number, name in enumerate(paths):
        folder.write(name, b"%d" % number)
    folder.sync(paths)
    assert [folder.read(name) for name in paths] == [b"0", b"1", b"2"]
    assert sorted(name for part in folder.list_paths(RUN) for name in part) == sorted(paths)
    folder.delete([path(1), path(7)])
    assert [folder.read(name) for name in paths] == [None, b"1", b"2"]


def test_a_file_that_is_written_again_is_replaced(folder: SpillFolder) -> None:
    folder.write(path(1), b"first")
    folder.write(path(1), b"again")
    assert folder.read(path(1)) == b"again"


def test_without_the_mark_nothing_is_missing_but_the_folder_is_away(folder: SpillFolder) -> None:
    """A disk that is not mounted must not look like a folder whose files are lost."""
    folder.write(path(1), b"1")
    assert folder.read(path(2)) is None
    lose(folder, f"{RUN}/{MARK}")
    for call in (lambda: folder.read(path(2)), lambda: folder.check(RUN), lambda: list(folder.list_paths(RUN))):
        with pytest.raises(SpillAway, match="not mounted or was deleted"):
            call()
    folder.create(RUN)
    assert folder.read(path(1)) == b"1" and folder.read(path(2)) is None


def test_removing_takes_the_frames_and_may_be_repeated(folder: SpillFolder) -> None:
    for number in (1, 2, 5000):
        folder.write(path(number), b"x")
    for _ in range(2):
        folder.remove(RUN)
        with pytest.raises(SpillAway):
            folder.check(RUN)
    folder.probe()


def test_a_file_of_somebody_else_survives_the_removal(tmp_path: Path) -> None:
    folder = LocalFolder(f"file://{tmp_path}")
    folder.create(RUN)
    folder.write(path(1), b"x")
    (tmp_path / RUN / "0" / "notes.txt").write_text("mine")
    folder.remove(RUN)
    assert [entry.name for entry in (tmp_path / RUN / "0").iterdir()] == ["notes.txt"]


def test_a_folder_that_vanished_gets_no_second_copy(tmp_path: Path) -> None:
    """A write into an empty mount point fails, and leaves the mount point empty."""
    folder = LocalFolder(f"file://{tmp_path}/a")
    folder.create(RUN)
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(SpillAway):
        folder.write(path(1), b"x")
    (tmp_path / "a").mkdir()
    with pytest.raises(SpillAway):
        folder.write(path(1), b"x")
    assert not list((tmp_path / "a").iterdir())


def test_a_subfolder_goes_with_its_last_file(tmp_path: Path) -> None:
    """A run that goes on for months leaves no folder per 1,000 groups."""
    folder = LocalFolder(f"file://{tmp_path}")
    folder.create(RUN)
    for number in (1, 2, 1000):
        folder.write(path(number), b"x")
    folder.delete([path(1), path(1000)])
    assert sorted(entry.name for entry in (tmp_path / RUN).iterdir() if entry.is_dir()) == ["0"]
    folder.delete([path(2)])
    assert [entry.name for entry in (tmp_path / RUN).iterdir()] == [MARK]
    folder.sync([path(2)])


def test_a_write_goes_on_when_a_deletion_removes_its_empty_subfolder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the creation of the subfolder and that of the file."""
    folder, write, removed = LocalFolder(f"file://{tmp_path}"), spill_folder._write_synced, list[Path]()
    folder.create(RUN)

    def write_late(target: Path, data: bytes) -> None:
        if not removed:
            removed.append(target.parent)
            target.parent.rmdir()
        write(target, data)

    monkeypatch.setattr(spill_folder, "_write_synced", write_late)
    folder.write(path(1), b"x")
    assert removed and folder.read(path(1)) == b"x"

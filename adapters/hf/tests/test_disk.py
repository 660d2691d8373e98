"""A checkpoint is on the disk of its node before it is reported: the run then frees what an older one needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import STEPS, Settings, fill, train_hf, train_lightning

from replaybuf_hf.checkpoints import Mark, is_marked, mark_complete, unmark
from replaybuf_hf.feed import Feed
from tests.conftest import RunClient

Train = Callable[[Settings], None]
NAMES: dict[Train, str] = {train_hf: "checkpoint-{}", train_lightning: "step={}.ckpt"}


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Inode and time of each file and folder that was written through to the disk; folders have no time."""
    states: set[tuple[int, int]] = set()
    really_sync = os.fsync

    def record(descriptor: int) -> None:
        really_sync(descriptor)
        states.add(state_of(Path(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", record)
    return states


def state_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, 0 if path.is_dir() else status.st_mtime_ns


@pytest.mark.parametrize("train", [train_hf, train_lightning])
def test_every_file_of_a_checkpoint_is_on_disk_before_the_checkpoint_is_reported(
    train: Train,
    run: RunClient,
    tmp_path: Path,
    synced: set[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported, report = list[int](), Feed.save

    def save(feed: Feed, step: int) -> None:
        checkpoint = tmp_path / NAMES[train].format(step)
        for path in (checkpoint, *checkpoint.rglob("*"), tmp_path):
            assert state_of(path) in synced, path
        reported.append(step)
        report(feed, step)

    monkeypatch.setattr(Feed, "save", save)
    fill(run)
    train({"folder": str(tmp_path), "options": {"url": str(run.http.base_url), "run": run.run}, "ranks": 1})
    assert reported == [2, 4, STEPS]


def test_a_mark_is_on_disk_when_it_is_set_and_off_the_disk_when_it_is_removed(
    tmp_path: Path, synced: set[tuple[int, int]]
) -> None:
    """A mark that a power loss brings back would complete a checkpoint of old and new files."""
    mark_complete(tmp_path, Mark("r", 2, 1))
    assert is_marked(tmp_path) and {state_of(tmp_path), state_of(tmp_path / "replaybuf.json")} <= synced
    synced.clear()
    unmark(tmp_path)
    assert not is_marked(tmp_path) and synced == {state_of(tmp_path)}
    unmark(tmp_path / "not there yet")

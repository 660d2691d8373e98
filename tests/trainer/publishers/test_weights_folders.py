"""Folders of published weights on the disk."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from replaybuf_trainer.faults import TrainingFault
from replaybuf_trainer.publishers.weights_folders import WeightsFolders


class Empty:
    """Weights that are an empty folder."""

    adapter = ""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return none."""
        return {}

    def save_weights(self, folder: Path) -> None:
        """Create the folder."""
        folder.mkdir(parents=True)


class Full(Empty):
    """Weights that no disk takes."""

    def save_weights(self, folder: Path) -> None:
        """Raise the error of a full disk."""
        raise OSError(errno.ENOSPC, "No space left on device")


def published(root: Path, *versions: int) -> list[str]:
    """Publish these versions in turn; return the folders that are left."""
    folders = WeightsFolders(root)
    for version in versions:
        folders.write(version, Empty())
        folders.complete(version, lambda: None)
        folders.prune(version, lambda: None)
    return sorted(path.name for path in root.iterdir())


def test_the_newest_three_versions_stay(tmp_path: Path) -> None:
    assert published(tmp_path, 8, 9, 10, 11) == ["v000009", "v000010", "v000011"]


def test_a_resumed_trainer_keeps_what_it_publishes_and_deletes_the_lost_versions(tmp_path: Path) -> None:
    """Versions 8 to 10 came before the rewind to 5. Only version 5 is what the engines must have."""
    published(tmp_path, 8, 9, 10)
    assert published(tmp_path, 5) == ["v000005"]
    assert published(tmp_path, 6) == ["v000005", "v000006"]


def test_a_version_that_was_staged_never_gets_another_name(tmp_path: Path) -> None:
    folders = WeightsFolders(tmp_path)
    folders.write(2, Empty())
    folders.complete(1, lambda: None)
    assert not folders.has(1)
    folders.complete(2, lambda: None)
    assert folders.has(2)


def test_a_full_disk_is_named_and_older_versions_stay(tmp_path: Path) -> None:
    published(tmp_path, 1)
    with pytest.raises(TrainingFault, match=r"version 2 cannot be written to .*v000002: .*No space left.*weights-dir"):
        WeightsFolders(tmp_path).write(2, Full())
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]

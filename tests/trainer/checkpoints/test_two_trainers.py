"""Two trainers in one folder: one that another fenced deletes and replaces nothing of its successor."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from replaybuf import Client
from replaybuf.errors import Fenced, ServiceUnavailable
from replaybuf.files import sync
from replaybuf.wire.config import Cost
from replaybuf.wire.model.checkpoints import TrainerState, read_state
from replaybuf_trainer.checkpoints import folders as module
from replaybuf_trainer.checkpoints.folders import complete, new_scratch
from replaybuf_trainer.feeds.service import ServiceFeed
from replaybuf_trainer.folders import whole_folder
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.ownership import Confirm
from replaybuf_trainer.publishers.folder import FolderPublisher
from replaybuf_trainer.publishers.publisher import PublisherSetup
from replaybuf_trainer.publishers.weights_folders import KEPT, STAGED, WeightsFolders
from tests.conftest import RunClient, ServeProcess
from tests.trainer.checkpoints.test_checkpoints import Saved, policy_of
from tests.trainer.scripted import put_run


@pytest.fixture
def feeds(service: ServeProcess, run: RunClient, models: Path, tmp_path: Path) -> Iterator[list[ServiceFeed]]:
    """The feeds of two trainers on one run; none is attached."""
    put_run(run)
    options = TrainOptions(url=service.url, run=run.run, model=models / "a", checkpoint_dir=tmp_path)
    with Client(service.url, run.run) as old, Client(service.url, run.run) as new:
        yield [ServiceFeed(options, client) for client in (old, new)]


def attach(feed: ServiceFeed) -> None:
    feed.facts()
    feed.attach(0, Cost(1.0, 0.0))


def away() -> None:
    raise ServiceUnavailable("the service does not answer")


def overtaken(feeds: list[ServiceFeed], *written: Path) -> Confirm:
    """Return the question of the first trainer; right after its first answer the second attaches and writes folders."""

    def confirm() -> None:
        feeds[0].confirm()
        attach(feeds[1])
        for path in written:
            path.mkdir()

    return confirm


def write_checkpoint(folder: Path, step: int, confirm: Confirm) -> None:
    """Write a checkpoint without tensors and keep one."""
    complete(new_scratch(folder, step, confirm), TrainerState(run="r", step=step, version=step), 1, confirm)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fenced_trainer_that_ends_its_write_late_leaves_the_checkpoint_of_its_successor(
    feeds: list[ServiceFeed], models: Path, tmp_path: Path
) -> None:
    """It was suspended during the write, and both have a checkpoint of step 2."""
    attach(feeds[0])
    asked, awake = threading.Semaphore(0), threading.Semaphore(0)

    def confirm() -> None:
        asked.release()
        assert awake.acquire(timeout=60.0)
        feeds[0].confirm()

    old = Saved(tmp_path, keep=1, confirm=confirm)
    old.checkpoints.save(policy_of(models / "a"), TrainerState(run="r", step=2, version=2))
    assert asked.acquire(timeout=60.0)  # it is about to complete the checkpoint
    attach(feeds[1])
    new = Saved(tmp_path, keep=3, confirm=lambda: None)
    for step in (1, 2):
        new.save(policy_of(models / "b"), step)
    unfinished = tmp_path / ".step-000003.1" / "state"
    unfinished.mkdir(parents=True)
    written = contents(tmp_path)
    awake.release()
    with pytest.raises(Fenced):
        old.checkpoints.wait()
    assert contents(tmp_path) == written and unfinished.is_dir() and old.steps == []
    assert read_state(tmp_path / "step-000002").step == 2


def test_a_fenced_trainer_that_starts_a_checkpoint_deletes_nothing(
    feeds: list[ServiceFeed], models: Path, tmp_path: Path
) -> None:
    for feed in feeds:
        attach(feed)
    unfinished = tmp_path / ".step-000003.1" / "state"
    unfinished.mkdir(parents=True)
    with pytest.raises(Fenced):
        Saved(tmp_path, confirm=feeds[0].confirm).save(policy_of(models / "a"), 2)
    assert unfinished.is_dir()
    Saved(tmp_path, confirm=feeds[1].confirm).save(policy_of(models / "a"), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_a_trainer_that_is_fenced_after_it_named_its_checkpoint_leaves_those_of_its_successor(
    feeds: list[ServiceFeed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hung while a network disk took the new name, and meanwhile the successor went back to an older step."""
    attach(feeds[0])
    new: list[Path] = []

    def hang(path: Path) -> None:
        sync(path)
        if path == tmp_path and not new:
            attach(feeds[1])
            new.append(tmp_path / "step-000001")
            write_checkpoint(tmp_path, 1, feeds[1].confirm)

    monkeypatch.setattr(module, "sync", hang)
    with pytest.raises(Fenced):
        write_checkpoint(tmp_path, 2, feeds[0].confirm)
    assert [read_state(path).step for path in new] == [1]


def test_a_trainer_that_is_fenced_after_an_answer_deletes_only_what_was_there_before(
    feeds: list[ServiceFeed], tmp_path: Path
) -> None:
    attach(feeds[0])
    half = tmp_path / ".step-000001.1"
    (tmp_path / ".step-000003.1").mkdir()
    new_scratch(tmp_path, 2, overtaken(feeds, half))
    assert half.is_dir() and not (tmp_path / ".step-000003.1").exists()


def test_a_fenced_trainer_deletes_no_weights(feeds: list[ServiceFeed], tmp_path: Path) -> None:
    """Its version may be older, and then all versions of its successor are above it."""
    for feed in feeds:
        attach(feed)
    folders = WeightsFolders(tmp_path)
    for version in range(KEPT + 2):
        folders.path(version).mkdir()
    with pytest.raises(Fenced):
        folders.prune(0, feeds[0].confirm)
    assert all(folders.has(version) for version in range(KEPT + 2))
    folders.prune(KEPT, feeds[1].confirm)
    assert [version for version in range(KEPT + 2) if folders.has(version)] == list(range(1, KEPT + 1))


def test_a_trainer_that_is_fenced_while_it_deletes_weights_deletes_no_more(
    feeds: list[ServiceFeed], tmp_path: Path
) -> None:
    """Each deletion may take minutes, so the successor publishes meanwhile, and keeps what it still needs."""
    attach(feeds[0])
    folders = WeightsFolders(tmp_path)
    for version in range(KEPT + 2):
        folders.path(version).mkdir()
    published = [folders.path(KEPT + 2), folders.path(KEPT + 3), tmp_path / f"{STAGED}1"]
    with pytest.raises(Fenced):
        folders.prune(KEPT + 1, overtaken(feeds, *published))
    assert [version for version in range(KEPT + 2) if folders.has(version)] == list(range(1, KEPT + 2))
    assert all(path.is_dir() for path in published)


@dataclasses.dataclass
class Files:
    """Weights that are one file."""

    content: bytes
    adapter: str = ""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return none."""
        return {}

    def save_weights(self, folder: Path) -> None:
        """Write the file."""
        with whole_folder(folder) as scratch:
            (scratch / "weights").write_bytes(self.content)


def test_a_fenced_trainer_that_ends_its_write_late_leaves_the_weights_of_its_successor(
    feeds: list[ServiceFeed], tmp_path: Path
) -> None:
    """Both have a version 1, with other weights after the rewind."""
    attach(feeds[0])
    old, new = (FolderPublisher(PublisherSetup(weights_dir=tmp_path), None) for _ in feeds)
    for version in (1, 2):
        old.prepare(version, Files(b"old"))
        if version == 1:
            attach(feeds[1])
            new.prepare(1, Files(b"new"))
            new.commit(1, feeds[1].confirm)
            written = contents(tmp_path / "v000001")
        with pytest.raises(Fenced):
            old.commit(version, feeds[0].confirm)
    assert contents(tmp_path / "v000001") == written and not new.restore(2, feeds[1].confirm)
    new.prepare(2, Files(b"new"))
    new.commit(2, feeds[1].confirm)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001", "v000002"]


def test_weights_that_are_published_again_stay_where_they_are(feeds: list[ServiceFeed], tmp_path: Path) -> None:
    """Engines may be reading them. Other weights of that version replace them, once the service can be asked."""
    attach(feeds[0])
    publisher, file = FolderPublisher(PublisherSetup(weights_dir=tmp_path), None), tmp_path / "v000001" / "weights"
    publisher.prepare(1, Files(b"old"))
    publisher.commit(1, feeds[0].confirm)
    inode = file.stat().st_ino
    publisher.prepare(1, Files(b"old"))
    publisher.commit(1, feeds[0].confirm)
    assert file.stat().st_ino == inode
    publisher.prepare(1, Files(b"new"))
    with pytest.raises(ServiceUnavailable):
        publisher.commit(1, away)
    assert file.stat().st_ino == inode
    publisher.commit(1, feeds[0].confirm)
    assert file.read_bytes() == b"new" and [path.name for path in tmp_path.iterdir()] == ["v000001"]


def test_while_the_service_is_away_a_checkpoint_is_written_and_nothing_is_deleted(models: Path, tmp_path: Path) -> None:
    saved = Saved(tmp_path, keep=1, confirm=away)
    for step in (1, 2):
        saved.save(policy_of(models / "a"), step)
    assert saved.steps == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]

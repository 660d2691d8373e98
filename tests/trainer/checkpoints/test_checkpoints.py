"""Checkpoints: a checkpoint is complete or absent, and training continues from it bit for bit."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from replaybuf.errors import Invalid
from replaybuf.wire.model.checkpoints import TrainerState, latest_checkpoint, read_state
from replaybuf_trainer.checkpoints import checkpoints as module
from replaybuf_trainer.checkpoints.checkpoints import Checkpoints
from replaybuf_trainer.checkpoints.folders import complete, new_scratch
from replaybuf_trainer.faults import TrainingFault
from replaybuf_trainer.losses import BatchTotals, Tally, load_objective
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.models.policy import Policy
from replaybuf_trainer.ownership import Confirm
from replaybuf_trainer.parallel.ranks import Ranks
from tests.trainer.batches import packed, rollouts


def policy_of(folder: Path) -> Policy:
    return Policy(load_model(folder), 1e-3, folder)


def train(policy: Policy, steps: Sequence[int]) -> None:
    """Take one optimizer step per number, on a batch drawn from it."""
    for step in steps:
        batch = packed(rollouts(4, seed=step), [[0, 1], [2, 3]])
        totals = BatchTotals(batch.meta.batch_loss_tokens, batch.meta.batch_rollouts)
        tokens = policy.forward(batch.micro_batches)
        torch.autograd.backward(load_objective("grpo").value(tokens, totals, Tally()))
        policy.step(1e-3, 1.0, has_loss=True)


class Saved:
    """Checkpoints of a run `r` that publishes after every step; `steps`: those that were reported as on disk."""

    def __init__(self, folder: Path, keep: int = 2, confirm: Confirm = lambda: None) -> None:
        self.folder = folder
        self.steps: list[int] = []
        self.checkpoints = Checkpoints(folder, keep, Ranks(), self.steps.append, confirm)

    def save(self, policy: Policy, step: int) -> Path:
        self.checkpoints.save(policy, TrainerState(run="r", step=step, version=step))
        self.checkpoints.wait()
        return self.folder / f"step-{step:06d}"

    def load(self, checkpoint: Path, policy: Policy) -> None:
        self.checkpoints.load(checkpoint, self.checkpoints.read_state(checkpoint), policy)


def same_weights(policy: Policy, other: Policy) -> None:
    for (name, first), (_, second) in zip(policy.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert torch.equal(first, second), name


def test_training_continues_from_a_checkpoint_bit_for_bit(models: Path, tmp_path: Path) -> None:
    """Four steps at once, and two, a checkpoint and two more, end in the same weights."""
    whole, first, resumed = (policy_of(models / "a") for _ in range(3))
    train(whole, range(4))
    train(first, range(2))
    checkpoint = Saved(tmp_path).save(first, 2)
    Saved(tmp_path).load(checkpoint, resumed)
    train(resumed, range(2, 4))
    same_weights(whole, resumed)
    same_weights(first, policy_of(checkpoint / "model"))


def test_steps_taken_during_the_write_are_not_in_the_checkpoint(models: Path, tmp_path: Path) -> None:
    """The service hears of it only when it is on disk."""
    policy, resumed = policy_of(models / "a"), policy_of(models / "b")
    train(policy, [0])
    saved = Saved(tmp_path)
    saved.checkpoints.save(policy, TrainerState(run="r", step=1, version=1))
    assert saved.steps == []
    train(policy, [1])
    saved.checkpoints.wait()
    assert saved.steps == [1]
    expected = policy_of(models / "a")
    train(expected, [0])
    saved.load(tmp_path / "step-000001", resumed)
    same_weights(expected, resumed)
    train(expected, [1])
    train(resumed, [1])
    same_weights(expected, resumed)


def test_random_numbers_continue_from_a_checkpoint(models: Path, tmp_path: Path) -> None:
    """As dropout draws them."""
    policy = policy_of(models / "a")
    torch.manual_seed(7)
    checkpoint = Saved(tmp_path).save(policy, 1)
    expected = torch.rand(3)
    Saved(tmp_path).load(checkpoint, policy)
    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_holds_no_pickle(models: Path, tmp_path: Path) -> None:
    """Tensors are safetensors, the rest is JSON; state.json has size and digest of every other file."""
    policy = policy_of(models / "a")
    train(policy, [0])
    checkpoint = Saved(tmp_path).save(policy, 1)
    paths = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert {Path(path).suffix for path in paths} == {".safetensors", ".json"}
    state = read_state(checkpoint)
    assert (state.run, state.step, state.version, state.ranks) == ("r", 1, 1, 1)
    assert state.files.keys() == state.digests.keys() == paths - {"state.json"}


def test_the_newest_checkpoint_is_picked_by_its_number(tmp_path: Path) -> None:
    """Not by its name or age; folders that are no checkpoints do not count."""
    for name in ("step-1000000", "step-000999", ".step-2000000.17", "step-9", "steps", "step-3000000.old"):
        (tmp_path / name).mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1000000"


def test_without_a_checkpoint_none_is_picked(tmp_path: Path) -> None:
    """An empty folder, and one that does not exist."""
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_a_full_disk_leaves_the_older_checkpoint_and_raises_one_error(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes with the next call, because a thread writes. Half a checkpoint does not stay."""
    policy, saved = policy_of(models / "a"), Saved(tmp_path)
    saved.save(policy, 1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "complete", full)
    saved.checkpoints.save(policy, TrainerState(run="r", step=2, version=2))
    with pytest.raises(TrainingFault, match=r"of step 2 cannot be written.*No space left.*newest is .*step-000001"):
        saved.checkpoints.wait()
    assert saved.steps == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize(
    ("before", "step", "kept"),
    [
        (["step-000060", "step-000080", "step-000120.old", "step-000140.old"], 100, ["step-000080", "step-000100"]),
        (["step-000060", "step-000080", "step-000100-good", "step-best"], 100, ["step-000080", "step-000100"]),
        (["step-999960", "step-999980"], 1_000_000, ["step-999980", "step-1000000"]),
        (["step-000060", "step-000080", "step-000140"], 100, ["step-000080", "step-000100", "step-000140"]),
    ],
)
def test_old_checkpoints_are_chosen_by_number_among_those_up_to_the_new_one(
    tmp_path: Path, before: list[str], step: int, kept: list[str]
) -> None:
    """Folders that were moved aside stay, and neither they nor steps of a lost history count as newer ones."""
    for name in before:
        (tmp_path / name).mkdir()
    state = TrainerState(run="r", step=step, version=step)
    new = complete(new_scratch(tmp_path, step, lambda: None), state, 2, lambda: None)
    assert read_state(new).step == step
    aside = [name for name in before if not name[5:].isdigit()]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, *aside])


def test_only_the_newest_checkpoints_are_kept(models: Path, tmp_path: Path) -> None:
    """The number to keep is an argument; what a killed trainer left goes too."""
    policy, saved = policy_of(models / "a"), Saved(tmp_path)
    (tmp_path / ".step-000003.17" / "state").mkdir(parents=True)
    for step in (5, 10, 15):
        saved.save(policy, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000015"]


@pytest.mark.parametrize("content", [None, b"{", b'{"step": 3}', b'{"run": "\xff"}'])
def test_the_error_for_a_broken_state_names_its_folder(tmp_path: Path, content: bytes | None) -> None:
    """Missing, cut short, of another shape or not UTF-8."""
    if content is not None:
        (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(Invalid, match=str(tmp_path)):
        read_state(tmp_path)


def test_a_missing_or_broken_file_is_one_error(models: Path, tmp_path: Path) -> None:
    """A missing or shorter file is found by the list of files, other bytes by their digest."""
    whole = Saved(tmp_path).save(policy_of(models / "a"), 1)
    (name,) = (path.name for path in (whole / "state").iterdir())
    damages: list[tuple[Callable[[Path], object], str]] = [
        (lambda path: path.unlink(), f"state/{name} is missing"),
        (lambda path: path.write_bytes(b"short"), f"state/{name} has 5 bytes instead of"),
        (lambda path: path.write_bytes(b"\xff" * path.stat().st_size), f"crc32c of state/{name} is"),
    ]
    for damage, error in damages:
        broken = tmp_path / "broken" / "step-000001"
        shutil.copytree(whole, broken)
        damage(broken / "state" / name)
        with pytest.raises(Invalid, match=f"{broken} is broken: .*{error}.*; delete it to resume from the one before"):
            Saved(tmp_path).load(broken, policy_of(models / "a"))
        shutil.rmtree(broken)


def spoil(path: Path) -> None:
    """Set eight numbers of a file to 1e30; it stays valid, and as long as it was."""
    with path.open("r+b") as file:
        file.seek(-32, os.SEEK_END)
        file.write(struct.pack("<8f", *[1e30] * 8))


@pytest.mark.parametrize("folder", ["state", "model"])
def test_changed_weights_of_the_same_size_are_found_before_they_are_loaded(
    folder: str, models: Path, tmp_path: Path
) -> None:
    """They would train on in silence, and a later error would blame the batch."""
    checkpoint = Saved(tmp_path).save(policy_of(models / "a"), 1)
    (path,) = (checkpoint / folder).glob("*.safetensors")
    written = read_state(checkpoint).digests[f"{folder}/{path.name}"]
    spoil(path)
    with pytest.raises(Invalid, match=f"crc32c of {folder}/{path.name} is [0-9a-f]{{8}}; {written} .*; delete it"):
        Saved(tmp_path).checkpoints.read_state(checkpoint)


@pytest.mark.parametrize("name", ["state/model-00002-of-00002.safetensors", "model/pytorch_model.bin"])
def test_a_file_that_the_checkpoint_does_not_list_is_refused(name: str, models: Path, tmp_path: Path) -> None:
    """Its loader reads all files of the folder, so a file without a digest would change what is loaded."""
    checkpoint = Saved(tmp_path).save(policy_of(models / "a"), 1)
    save_file({"model.lm_head.weight": torch.zeros(3)}, checkpoint / name)
    with pytest.raises(Invalid, match=f"{name} is not one of its files"):
        Saved(tmp_path).checkpoints.read_state(checkpoint)


def test_a_checkpoint_with_sizes_alone_is_loaded_with_a_warning(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier releases wrote no digests."""
    first, resumed = policy_of(models / "a"), policy_of(models / "b")
    checkpoint = Saved(tmp_path).save(first, 1)
    state = msgspec.json.decode((checkpoint / "state.json").read_bytes())
    del state["digests"]
    (checkpoint / "state.json").write_bytes(msgspec.json.encode(state))
    Saved(tmp_path).load(checkpoint, resumed)
    same_weights(first, resumed)
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert str(checkpoint) in warning.message


def test_a_state_names_files_inside_its_checkpoint_alone(models: Path, tmp_path: Path) -> None:
    checkpoint = Saved(tmp_path).save(policy_of(models / "a"), 1)
    state = msgspec.json.decode((checkpoint / "state.json").read_bytes())
    (tmp_path / "other").write_bytes(b"1")
    for name in ("../other", str(tmp_path / "other")):
        (checkpoint / "state.json").write_bytes(msgspec.json.encode(state | {"files": {name: 1}}))
        with pytest.raises(Invalid, match="outside the checkpoint"):
            read_state(checkpoint)


def test_a_checkpoint_with_other_shapes_is_one_error(models: Path, tmp_path: Path) -> None:
    checkpoint = Saved(tmp_path).save(policy_of(models / "a"), 1)
    (path,) = (checkpoint / "state").iterdir()
    save_file({"model.lm_head.weight": torch.zeros(3)}, path)
    (checkpoint / "state.json").write_bytes(b'{"run":"r","step":1,"version":1}')
    with pytest.raises(Invalid, match="is broken"):
        Saved(tmp_path).load(checkpoint, policy_of(models / "a"))


def test_versions_are_needed_while_a_checkpoint_is_written_and_as_long_as_it_stays(
    models: Path, tmp_path: Path
) -> None:
    """A broken checkpoint needs none."""
    permits = threading.Semaphore(0)

    def confirm() -> None:
        assert permits.acquire(timeout=60.0)

    saved = Saved(tmp_path, keep=1, confirm=confirm).checkpoints
    saved.save(policy_of(models / "a"), TrainerState(run="r", step=5, version=2, needed_versions={"": 2, "math": 1}))
    assert (saved.needed_versions(""), saved.needed_versions("math")) == ({2}, {1})
    permits.release(2)
    saved.save(policy_of(models / "a"), TrainerState(run="r", step=7, version=3, needed_versions={"": 3}))
    assert saved.needed_versions("") == {2, 3}
    permits.release()
    saved.wait()
    assert (saved.needed_versions(""), saved.needed_versions("math")) == ({3}, set())
    (tmp_path / "step-000007" / "state.json").write_text("{")
    assert saved.needed_versions("") == set()

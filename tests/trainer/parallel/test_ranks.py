"""Two ranks: the curve of one, kill -9, another number of ranks, and clear errors."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pkgutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from replaybuf.errors import Fenced, Invalid, ReplaybufError
from replaybuf.wire.model.checkpoints import latest_checkpoint, read_state
from replaybuf_trainer.faults import TrainingFault
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.option_groups import ReaderOptions
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.parallel.launch import open_ranks
from tests.conftest import RunClient, ServeProcess
from tests.trainer.parallel.processes import TIMEOUT_S, exit_codes, start, train
from tests.trainer.scripted import STEPS, fill
from tests.waiting import eventually

CURVE = ("loss", "grad_norm", "entropy", "ratio_mean", "learning_rate", "reward_mean", "tokens", "loss_tokens")
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Reference:
    """Options of two trainings that ran to their end without a fault."""

    one_rank: TrainOptions
    two_ranks: TrainOptions


def new_run(
    service: ServeProcess, models: Path, folder: Path, *, fsdp: bool = True, groups: bool = True
) -> TrainOptions:
    """Create a run, with the groups of `STEPS` batches or without any; return the options of its trainer."""
    run = RunClient(service.url, f"ranks-{os.getpid()}-{next(_numbers)}")
    if groups:
        fill(run)
    else:
        run.put(batch={"groups_per_batch": 1, "seq_len": 64})
    run.http.close()
    folder.mkdir()
    return TrainOptions(
        url=service.url,
        run=run.run,
        model=models / "a",
        checkpoint_dir=folder / "checkpoints",
        weights_dir=folder / "weights",
        metrics_file=folder / "train.jsonl",
        checkpoint_every_steps=2,
        warm_up_steps=1,
        rows_per_forward=1,
        reader_options=ReaderOptions(wait_ms=500),
        fsdp=fsdp,
    )


def curve(options: TrainOptions) -> list[list[float]]:
    """The figures of each step, from its last line in the metrics file."""
    assert options.metrics_file is not None
    lines = [msgspec.json.decode(line) for line in options.metrics_file.read_bytes().splitlines()]
    steps = {line["step"]: [line[name] for name in CURVE] for line in lines}
    return [steps[step] for step in sorted(steps)]


def weights(options: TrainOptions) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint."""
    trained: dict[str, torch.Tensor] = load_model(options.checkpoint_dir / f"step-{STEPS:06d}" / "model").state_dict()
    return trained


def train_ranks(ranks: int, options: TrainOptions) -> None:
    """Train to the end of the options and expect success on every rank."""
    log = options.checkpoint_dir.with_name("log")
    codes = exit_codes(start(ranks, train, options, log=log))
    assert codes == [0] * ranks, "".join(path.read_text() for path in log.parent.glob("log.*"))


def die_at(function: str, number: int, ranks: tuple[int, ...], options: TrainOptions) -> None:
    """Train; kill this process at the n-th call of a function if it has one of these ranks."""
    called, calls = pkgutil.resolve_name(function), itertools.count(1)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number and int(os.environ["RANK"]) in ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        return called(*args, **kwargs)

    with mock.patch(function, deadly):
        train_or_explain(options)


def train_or_explain(options: TrainOptions) -> None:
    """Train; print an error as the command does."""
    try:
        train(options)
    except ReplaybufError as error:
        print(f"{type(error).__name__}: {error.detail}", flush=True)
        sys.exit(1)


@pytest.fixture(scope="module")
def reference(service: ServeProcess, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The curves of one process and of two ranks, each on a run of its own, and the checkpoints of both."""
    root = tmp_path_factory.mktemp("reference")
    one_rank, two_ranks = (new_run(service, models, root / name, fsdp=name == "two") for name in ("one", "two"))
    train(one_rank)
    train_ranks(2, two_ranks)
    return Reference(one_rank, two_ranks)


def test_two_ranks_train_like_one(reference: Reference) -> None:
    """Each has a part of every weight, moment and batch. Rounding differs: sums are in another order."""
    expected, sharded = curve(reference.one_rank), curve(reference.two_ranks)
    assert len(expected) == STEPS
    for line, other in zip(expected, sharded, strict=True):
        assert other == pytest.approx(line, rel=1e-5, abs=1e-6)
    begun, ended, others = (
        load_model(reference.one_rank.model).state_dict(),
        weights(reference.one_rank),
        weights(reference.two_ranks),
    )
    for name, value in ended.items():
        # Adam's step is about the sign of a gradient. Near zero rounding decides the sign, and a weight then differs by
        # whole steps; if 0.25 % of a tensor's weights did, this would be 0.1 of its way.
        assert float((others[name] - value).norm()) <= 0.1 * float((value - begun[name]).norm()), name
    state = read_state(reference.two_ranks.checkpoint_dir / f"step-{STEPS:06d}")
    assert state.ranks == 2
    assert {name for name in state.files if name.startswith("state/")} == {
        f"state/shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)
    }


def test_after_kill_9_of_one_rank_and_of_all_the_curve_is_the_same_digit_for_digit(
    reference: Reference, service: ServeProcess, models: Path, tmp_path: Path
) -> None:
    """The rank that is left names the lost one and ends at once."""
    options = new_run(service, models, tmp_path / "killed")
    log = tmp_path / "killed" / "log"
    forward = "replaybuf_trainer.models.sharding.packed_logprobs"
    assert exit_codes(start(2, die_at, forward, 3, (1,), options, log=log)) == [1, -signal.SIGKILL]
    assert "TrainingFault: rank 0 of 2 cannot go on: rank 1 does not answer" in log.with_name("log.0").read_text()
    complete = "replaybuf_trainer.parallel.ranks.TorchRanks.sum"
    assert exit_codes(start(2, die_at, complete, 2, (0, 1), options, log=log)) == [-signal.SIGKILL] * 2
    train_ranks(2, options)
    assert curve(options) == curve(reference.two_ranks)
    expected = weights(reference.two_ranks)
    assert all(torch.equal(value, expected[name]) for name, value in weights(options).items())


def test_another_number_of_ranks_continues_the_curve(
    reference: Reference, service: ServeProcess, models: Path, tmp_path: Path
) -> None:
    """One process, then two ranks, three, and two: moments and weights are sharded anew, and so is each batch."""
    options = new_run(service, models, tmp_path / "ranks")
    train(dataclasses.replace(options, steps=1, fsdp=False))
    for ranks, steps in ((2, 2), (3, 3)):
        train_ranks(ranks, dataclasses.replace(options, steps=steps))
    train(dataclasses.replace(options, fsdp=False))
    for line, other in zip(curve(reference.one_rank), curve(options), strict=True):
        assert other == pytest.approx(line, rel=1e-5, abs=1e-6)


def test_sigterm_ends_all_ranks_after_the_step_with_a_checkpoint(
    service: ServeProcess, models: Path, tmp_path: Path
) -> None:
    options, log = new_run(service, models, tmp_path / "stopped", groups=False), tmp_path / "log"
    started = start(2, train_or_explain, options, log=log)
    eventually(lambda: all("reason=" in log.with_name(f"log.{rank}").read_text() for rank in range(2)), TIMEOUT_S)
    for process in started:
        process.terminate()
    assert exit_codes(started) == [0, 0]
    assert latest_checkpoint(options.checkpoint_dir) == options.checkpoint_dir / "step-000000"


def talk() -> None:
    """Print what the calls of `Ranks` return on this rank."""
    with open_ranks(True, TIMEOUT_S) as ranks:
        print(ranks.exchange({"rank": ranks.rank}))
        print(ranks.gather(torch.arange(ranks.rank + 1.0)).tolist(), ranks.sum(torch.ones(2)).tolist())
        print(ranks.first(lambda: ranks.rank), ranks.together(lambda: ranks.rank))
        print(list(ranks.in_step(iter(range(ranks.rank + 1)))))
        for error in (Fenced("a newer epoch"), OSError("full"), TrainingFault("broken")):
            for call in (ranks.first, ranks.together):
                try:
                    call(functools.partial(fail_at, ranks.rank, error))
                except Exception as found:  # noqa: BLE001  (any may come)
                    print(type(found).__name__, found)


def fail_at(rank: int, error: Exception) -> None:
    if rank == 0:
        raise error


def test_ranks_agree_on_values_ends_and_errors(tmp_path: Path) -> None:
    """An error of the first rank is raised by all, in its own class where that is one of ours."""
    assert exit_codes(start(2, talk, log=tmp_path / "log")) == [0, 0]
    first, second = (tmp_path.joinpath(f"log.{rank}").read_text().splitlines() for rank in range(2))
    assert first[:4] == ["[{'rank': 0}, {'rank': 1}]", "[0.0, 0.0, 1.0] [2.0, 2.0]", "0 0", "[0]"]
    assert second[:4] == ["[{'rank': 0}, {'rank': 1}]", "[0.0, 0.0, 1.0] [2.0, 2.0]", "0 1", "[0]"]
    assert first[4:] == ["Fenced a newer epoch"] * 2 + ["OSError full"] * 2 + ["TrainingFault broken"] * 2
    translated = "TrainingFault another rank failed with OSError: full"
    assert second[4:] == ["Fenced a newer epoch"] * 2 + [translated] * 2 + ["TrainingFault broken"] * 2


def test_fsdp_and_torchrun_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(Invalid, match="--fsdp needs torchrun: torchrun --nproc-per-node"), open_ranks(True, 1.0):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Invalid, match="torchrun started 2 processes; give --fsdp"), open_ranks(False, 1.0):
        pass

"""The training loop: order of calls, unreachable services, and a real run."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from replaybuf.client.client import Client
from replaybuf.errors import Fenced, Invalid, RunFinished, ServiceUnavailable, WrongStep
from replaybuf.launch.progress import LineReader, TrainerLine
from replaybuf.wire.contract import Amount, WaitingAnswer
from replaybuf.wire.model.checkpoints import latest_checkpoint, read_state
from replaybuf_trainer import trainer as trainer_module
from replaybuf_trainer.faults import TrainingFault
from replaybuf_trainer.feeds.service import ServiceFeed
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.models.policy import Policy
from replaybuf_trainer.option_groups import ReaderOptions
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.proximal import with_proximal_logprobs
from replaybuf_trainer.publishers.publisher import NeededVersions, PublisherSetup
from replaybuf_trainer.trainer import Trainer
from tests.conftest import RunClient
from tests.forked import ForkedProcess
from tests.trainer import scripted as scripted_module
from tests.trainer.batches import logprobs_alone, packed, packed_body, rollouts
from tests.trainer.scripted import STEPS, ScriptedEngines, ScriptedService, fill
from tests.trainer.served import ServedEngine, oracle
from tests.waiting import eventually, patience

WAIT = WaitingAnswer(
    reason="too_few_groups", have=Amount(groups=1), need=Amount(groups=2), blocked_on="producers", retry_after_s=0.5
)
TIMEOUT_S = 60.0


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedService:
    """A scripted service, and engines that write into the same events."""
    made = ScriptedService(tmp_path / "checkpoints")

    def opened(options: TrainOptions, _: NeededVersions) -> ScriptedEngines:
        return ScriptedEngines(made, PublisherSetup(weights_dir=options.weights_dir))

    monkeypatch.setattr(trainer_module, "open_publisher", opened)
    return made


def options(tmp_path: Path, models: Path, **fields: Any) -> TrainOptions:
    """Options of a trainer whose folders lie in `tmp_path`."""
    filled: dict[str, Any] = {
        "url": "http://127.0.0.1:1",
        "run": "r",
        "model": models / "a",
        "engines": (),
        "checkpoint_dir": tmp_path / "checkpoints",
        "weights_dir": tmp_path / "weights",
        "metrics_file": tmp_path / "train.jsonl",
        "reader_options": ReaderOptions(poll_s=0.01, prefetch=False),
        "service_timeout_s": 5.0,
    }
    return TrainOptions(**filled | fields)


def test_options_show_no_token(tmp_path: Path) -> None:
    shown = repr(options(tmp_path, tmp_path, token="SECRET", seed=7))
    assert "SECRET" not in shown and shown.startswith("TrainOptions(url=") and "seed=7" in shown


def trainer_of(service: ScriptedService, made: TrainOptions) -> Trainer:
    """A trainer on the scripted service."""
    return Trainer(made, ServiceFeed(made, cast(Client, service)))


Make = Callable[..., Trainer]


@pytest.fixture
def make(scripted: ScriptedService, tmp_path: Path, models: Path) -> Make:
    """Make the trainer on the scripted service, with these options in place of the usual ones."""
    return lambda **fields: trainer_of(scripted, options(tmp_path, models, **fields))


def lines(path: Path) -> list[TrainerLine]:
    """Read a metrics file as the demo does."""
    return LineReader(path, TrainerLine).new_lines()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters of a model folder by name."""
    weights_by_name: dict[str, torch.Tensor] = load_model(folder).state_dict()
    return weights_by_name


# ---------------------------------------------------------------------- the order of a step


def test_a_step_fetches_trains_acks_loads_and_publishes_in_order(scripted: ScriptedService, make: Make) -> None:
    """The run starts with the initial weights and ends with a checkpoint. A thread writes the one of step 3."""
    assert make(checkpoint_every_steps=3).train() == STEPS
    expected = ["get_run", "get_run", "attach 0", "load 0", "publish 0"]
    for step in range(STEPS):
        expected += [f"fetch {step}", f"ack {step}", f"load {step + 1}", f"publish {step + 1}"]
    expected += [f"fetch {STEPS}", f"checkpoint {STEPS}"]
    assert scripted.events.index("publish 3") < scripted.events.index("checkpoint 3")
    assert [event for event in scripted.events if event != "checkpoint 3"] == expected


def test_without_engines_weights_are_announced_and_a_warning_is_logged(
    tmp_path: Path, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = ScriptedService(tmp_path / "checkpoints")
    made = trainer_of(service, options(tmp_path, models))
    assert made.train() == STEPS
    published = [event for event in service.events if event.startswith(("load", "publish"))]
    assert published == [f"publish {version}" for version in range(STEPS + 1)]
    assert weights(tmp_path / "weights" / f"v{STEPS:06d}").keys() == weights(models / "a").keys()
    assert "your engines must load them" in caplog.text


def test_weights_are_published_once_per_version(scripted: ScriptedService, tmp_path: Path, make: Make) -> None:
    """With two steps per publication, the trainer publishes after every second step."""
    scripted.steps_per_publish = 2
    make().train()
    published = [event for event in scripted.events if event.startswith("publish")]
    assert published == ["publish 0", "publish 1", "publish 2"]
    assert scripted.events.index("publish 1") == scripted.events.index("ack 1") + 2
    assert [line.version for line in lines(tmp_path / "train.jsonl")] == list(range(STEPS))


def test_the_next_batch_is_requested_while_this_one_trains(
    scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    """With prefetch, the trainer requests step 1 before it trains step 0."""
    made = make(reader_options=ReaderOptions(poll_s=0.01))
    train_step = made._train_step
    seen: list[str] = []

    def trained(batch: Any) -> Any:
        if batch.meta.step == 0:
            scripted.fetching.clear()
            if "fetch 1" not in scripted.events:
                assert scripted.fetching.wait(TIMEOUT_S)
            seen.extend(scripted.events)
        return train_step(batch)

    monkeypatch.setattr(made, "_train_step", trained)
    made.train()
    assert "fetch 1" in seen
    assert "ack 0" not in seen
    assert [event for event in scripted.events if event.startswith("ack")] == [f"ack {step}" for step in range(STEPS)]


@pytest.mark.parametrize("early", [WAIT, WrongStep("not yet"), ServiceUnavailable("away")])
def test_a_prefetch_that_is_too_early_is_repeated(
    scripted: ScriptedService, early: WaitingAnswer | Exception, make: Make
) -> None:
    scripted.answers[1] = [early]
    assert make(reader_options=ReaderOptions(poll_s=0.01)).train() == STEPS
    assert scripted.events.count("fetch 1") == 2


def test_training_changes_the_weights_and_records_metrics(tmp_path: Path, models: Path, make: Make) -> None:
    """Each step writes one metrics line that the demo can read. The new weights differ and are finite."""
    make().train()
    recorded = lines(tmp_path / "train.jsonl")
    assert [line.step for line in recorded] == list(range(STEPS))
    for line in recorded:
        assert line.tokens == sum(
            len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts(4, seed=line.step)
        )
        assert line.reward_mean == pytest.approx(0.5)
        assert line.grad_norm > 0
        assert (line.staleness_mean, line.staleness_max) == (1.0, 1)
        assert line.train_s > 0 and line.publish_s > 0 and line.time > 0
    checkpoint = latest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    before, after = weights(models / "a"), weights(checkpoint / "model")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())


# ---------------------------------------------------------------------- epochs over a batch


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2}], ids=["whole", "lora"])
def test_several_epochs_take_a_step_each_and_are_acked_and_published_once(
    scripted: ScriptedService, tmp_path: Path, models: Path, lora: dict[str, Any], make: Make
) -> None:
    """Three optimizer steps on a batch change the weights as three batches of the same bytes do."""
    make(epochs_per_batch=3, steps=1, warm_up_steps=0, **lora).train()
    assert [event for event in scripted.events if event.startswith(("fetch", "ack", "publish"))] == [
        *("publish 0", "fetch 0", "ack 0", "publish 1")
    ]
    apart = tmp_path / "apart"
    again = ScriptedService(apart / "checkpoints")
    again.fetch_batch = lambda step, *_, **__: body_of(0, step)  # type: ignore[method-assign]
    trainer_of(again, options(apart, models, steps=3, warm_up_steps=0, **lora)).train()
    published, expected = weights(tmp_path / "weights" / "v000001"), weights(apart / "weights" / "v000003")
    assert all(torch.equal(published[name], expected[name]) for name in expected)


def body_of(number: int, step: int) -> bytes:
    """The rollouts of one step, as the batch of another."""
    return packed_body(rollouts(4, seed=number), [[0, 1], [2, 3]], step=step)


def test_statistics_by_epoch_show_how_the_policy_moves_on_a_batch(
    scripted: ScriptedService, tmp_path: Path, models: Path
) -> None:
    """The step has the figures of its last epoch; the batch counts once in tokens and loss tokens."""
    made = options(tmp_path, models, epochs_per_batch=3, learning_rate=1e-3, warm_up_steps=0)
    trainer_of(scripted, made).train()
    plain = tmp_path / "plain"
    trainer_of(ScriptedService(plain / "checkpoints"), options(plain, models, warm_up_steps=0)).train()
    line, alone = (raw_lines(folder / "train.jsonl")[0] for folder in (tmp_path, plain))
    first, second, last = (line["by_epoch"][epoch] for epoch in "012")
    assert line["epochs"] == 3 and "by_epoch" not in alone
    statistics = ("loss", "ratio_mean", "clip_fraction", "kl", "entropy", "mismatch", "loss_tokens")
    assert [first[name] for name in statistics] == [alone[name] for name in statistics]
    assert [last[name] for name in statistics] == [line[name] for name in statistics]
    assert first["loss"] > second["loss"] > last["loss"]
    assert (line["tokens"], line["loss_tokens"]) == (alone["tokens"], alone["loss_tokens"])


def test_proximal_logprobs_are_those_of_the_weights_before_the_first_epoch(
    scripted: ScriptedService, tmp_path: Path, models: Path
) -> None:
    """The first epoch has the ratio 1. Computed again in the second, they would give 1 there too."""
    made = options(
        tmp_path, models, loss="decoupled-ppo", epochs_per_batch=2, steps=2, learning_rate=1e-3, warm_up_steps=0
    )
    trainer_of(scripted, made).train()
    for line in raw_lines(tmp_path / "train.jsonl"):
        first, second = (line["by_epoch"][epoch]["ratio_mean"] for epoch in "01")
        assert first == pytest.approx(1.0, abs=1e-6) and abs(second - 1.0) > 1e-5


def test_proximal_logprobs_are_at_the_loss_tokens_of_each_row(models: Path) -> None:
    """As a forward pass of each rollout alone computes them; a row without rollouts and masked tokens have 0."""
    members = rollouts(4, seed=1)
    policy = Policy(load_model(models / "a"), 1e-3, models / "a")
    batch = with_proximal_logprobs(packed(members, [[0, 1], [], [2, 3]]), policy, 2)
    for row, numbers in zip(batch.micro_batches, [[0, 1], [], [2, 3]], strict=True):
        expected = [
            float(alone[place, token])
            for member in (members[number] for number in numbers)
            for alone in (logprobs_alone(policy.model, member).detach(),)
            for place, (token, counts) in enumerate(zip(member.completion_ids, member.completion_mask, strict=True))
            if counts
        ]
        assert row["old_logprobs"][row["loss_mask"]].tolist() == pytest.approx(expected, abs=1e-5)
        assert not row["old_logprobs"][~row["loss_mask"]].any()


@pytest.mark.usefixtures("broken_step_one")
def test_an_epoch_that_is_not_finite_is_the_last_of_its_batch(tmp_path: Path, make: Make) -> None:
    """The weights stay, so another epoch would be the same. The next batch has all its epochs."""
    make(on_non_finite="skip", epochs_per_batch=2).train()
    recorded = raw_lines(tmp_path / "train.jsonl")
    assert [(line["epochs"], line["skipped"]) for line in recorded] == [(2, False), (1, True), (2, False), (2, False)]


@pytest.mark.usefixtures("broken_step_one")
def test_an_epoch_that_is_not_finite_ends_the_training_before_the_ack(
    scripted: ScriptedService, tmp_path: Path, make: Make
) -> None:
    with pytest.raises(TrainingFault, match="step 1: batch"):
        make(epochs_per_batch=2).train()
    assert scripted.events[-1] == "fetch 1" and latest_checkpoint(tmp_path / "checkpoints") is None


def test_several_epochs_with_adapters_of_a_run_are_rejected_before_the_trainer_attaches(
    scripted: ScriptedService, make: Make
) -> None:
    """An own step of an adapter may span several batches, of which only the newest is there."""
    scripted.adapters = {"a": {}}
    with pytest.raises(Invalid, match="--epochs-per-batch is 2; run r has adapters"):
        make(lora_rank=2, epochs_per_batch=2).train()
    assert scripted.events == ["get_run"]


# ---------------------------------------------------------------------- phases, schedules and non-finite losses


def test_the_time_of_each_phase_is_recorded_and_printed_as_shares(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Make
) -> None:
    """The phases add up to the time of the step; a checkpoint counts for the step after it."""
    with caplog.at_level("INFO"):
        make(checkpoint_every_steps=2).train()
    first, _, third, _ = raw_lines(tmp_path / "train.jsonl")
    assert first["phase_s"].keys() == {"wait", "forward", "backward", "optimizer", "ack", "weights", "publish"}
    assert third["phase_s"].keys() == first["phase_s"].keys() | {"checkpoint"}
    for line in (first, third):
        assert sum(line["phase_s"].values()) == pytest.approx(line["step_s"])
        assert line["train_s"] == pytest.approx(sum(line["phase_s"][p] for p in ("forward", "backward", "optimizer")))
    assert re.search(r"step=0 .*\(\w+ \d+ %, ", caplog.text)


def raw_lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def test_the_learning_rate_follows_the_schedule_to_the_last_step_of_the_run(
    scripted: ScriptedService, tmp_path: Path, make: Make
) -> None:
    scripted.max_steps = STEPS
    make(schedule="linear", warm_up_steps=1, learning_rate=1e-3).train()
    rates = [line["learning_rate"] for line in raw_lines(tmp_path / "train.jsonl")]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-3 * 2 / 3, 1e-3 / 3])


def test_a_schedule_without_a_number_of_steps_is_rejected_before_the_trainer_attaches(
    scripted: ScriptedService, make: Make
) -> None:
    with pytest.raises(Invalid, match="run r has no max_steps; give --steps"):
        make(schedule="cosine").train()
    assert scripted.events == ["get_run"]


def test_the_training_ends_after_the_given_steps(scripted: ScriptedService, tmp_path: Path, models: Path) -> None:
    """With a checkpoint; a trainer that starts after the last step leaves a run that went on alone."""
    made = options(tmp_path, models, steps=2)
    assert trainer_of(scripted, made).train() == 2
    assert scripted.events[-1] == "checkpoint 2" and "fetch 2" not in scripted.events
    later = ScriptedService(tmp_path / "checkpoints", step=3)
    assert trainer_of(later, made).train() == 2
    assert later.events == ["get_run"]


@pytest.fixture
def broken_step_one(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The advantages of step 1 are so large that the loss overflows. The list has the broken steps."""
    broken = [1]
    read = scripted_module.body

    def body(step: int) -> bytes:
        if step not in broken:
            return read(step)
        members = [dataclasses.replace(rollout, advantage=3e38) for rollout in rollouts(4, seed=step)]
        return packed_body(members, [[0, 1], [2, 3]], step=step)

    monkeypatch.setattr(scripted_module, "body", body)
    return broken


@pytest.mark.usefixtures("broken_step_one")
def test_a_loss_that_is_not_finite_stops_the_training_and_names_the_batch(
    scripted: ScriptedService, tmp_path: Path, make: Make
) -> None:
    """Before the ack, so a corrected trainer gets the batch again. No weights of the step are written."""
    with pytest.raises(TrainingFault, match=r"step 1: batch \S+ has loss -?(inf|nan) and gradient norm"):
        make().train()
    assert scripted.events[-1] == "fetch 1"
    assert not (tmp_path / "weights" / "v000002").exists()


@pytest.mark.usefixtures("broken_step_one")
def test_a_loss_that_is_not_finite_is_skipped_by_option(
    scripted: ScriptedService, tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Make
) -> None:
    """The step is acked and published with the weights of the step before it; the next step changes them."""
    make(on_non_finite="skip").train()
    recorded = raw_lines(tmp_path / "train.jsonl")
    assert [line["skipped"] for line in recorded] == [False, True, False, False]
    assert [line.grad_norm > 0 for line in lines(tmp_path / "train.jsonl")] == [True, False, True, True]
    assert "step 1: batch" in caplog.text
    assert "ack 1" in scripted.events
    kept = [weights(tmp_path / "weights" / f"v{version:06d}") for version in (2, 3, 4)]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in kept[0].values())
    assert any(not torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2}], ids=["whole", "lora"])
def test_a_batch_without_loss_tokens_changes_no_weight(
    scripted: ScriptedService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lora: dict[str, Any],
    make: Make,
) -> None:
    """The moments of the steps before would move them. The step is acked and published, as later steps need."""
    read = scripted_module.body

    def body(step: int) -> bytes:
        if step != 2:
            return read(step)
        members = rollouts(4, seed=step)
        masked = [dataclasses.replace(member, completion_mask=[0] * len(member.completion_mask)) for member in members]
        return packed_body(masked, [[0, 1], [2, 3]], step=step)

    monkeypatch.setattr(scripted_module, "body", body)
    make(**lora).train()
    assert [line["skipped"] for line in raw_lines(tmp_path / "train.jsonl")] == [False, False, True, False]
    assert "ack 2" in scripted.events and "has no loss tokens" in caplog.text
    before, empty, after = (weights(tmp_path / "weights" / f"v{version:06d}") for version in (2, 3, 4))
    assert all(torch.equal(before[name], empty[name]) for name in before)
    assert any(not torch.equal(empty[name], after[name]) for name in before)


def test_too_many_steps_in_a_row_that_are_not_finite_end_the_training(
    scripted: ScriptedService, broken_step_one: list[int], monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    broken_step_one[:] = [0, 1, 2]
    monkeypatch.setattr(trainer_module, "MOST_SKIPPED", 2)
    with pytest.raises(TrainingFault, match="3 steps in a row are not finite, the maximum is 2"):
        make(on_non_finite="skip").train()
    assert scripted.events[-1] == "fetch 2"


# ---------------------------------------------------------------------- what does not fit together


def test_a_column_that_the_loss_needs_is_missed_before_the_first_step(scripted: ScriptedService, make: Make) -> None:
    with pytest.raises(Invalid, match="the batch has no old_logprobs, which the loss needs"):
        make(loss="decoupled-ppo").train()
    assert "ack 0" not in scripted.events


def test_a_run_with_a_larger_vocabulary_is_rejected_before_the_trainer_attaches(
    scripted: ScriptedService, make: Make
) -> None:
    scripted.vocab_size = 99
    with pytest.raises(Invalid, match="token ids up to vocab_size 99; the model has 98"):
        make().train()
    assert scripted.events == ["get_run"]


def test_a_token_outside_the_vocabulary_names_the_batch(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """Without a vocab_size in the run, the batch is the first to show it."""
    members = [dataclasses.replace(rollout, prompt_ids=[3, 98]) for rollout in rollouts(4, seed=0)]
    monkeypatch.setattr(scripted_module, "body", lambda step: packed_body(members, [[0, 1], [2, 3]], step=step))
    with pytest.raises(Invalid, match=r"batch \S+ has the token id 98; the vocabulary of the model has 98"):
        make().train()


def test_a_checkpoint_of_another_run_or_model_is_rejected_before_the_trainer_attaches(
    scripted: ScriptedService, tmp_path: Path, models: Path, make: Make
) -> None:
    make().train()
    scripted.events.clear()
    with pytest.raises(Invalid, match=r"step-000004 is of run r, not other; use another --checkpoint-dir"):
        make(run="other").train()
    larger = tmp_path / "larger"
    shutil.copytree(models / "a", larger)
    config = msgspec.json.decode((larger / "config.json").read_bytes())
    (larger / "config.json").write_bytes(msgspec.json.encode(config | {"hidden_size": 256}))
    with pytest.raises(Invalid, match=r"hidden_size 128.*hidden_size 256"):
        make(model=larger).train()
    assert scripted.events == []


def test_a_full_disk_ends_the_training_with_one_error_and_keeps_the_older_checkpoint(
    scripted: ScriptedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    scripted.when["checkpoint 2"] = lambda: monkeypatch.setattr("replaybuf_trainer.checkpoints.shards.save_file", full)
    with pytest.raises(TrainingFault, match=r"of step 4 cannot be written.*No space left.*newest is .*step-000002"):
        make(checkpoint_every_steps=2).train()
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None and read_state(newest).step == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


# ---------------------------------------------------------------------- waiting


def test_waiting_time_is_recorded_by_reason(
    scripted: ScriptedService, tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Make
) -> None:
    """The metrics line of the step has the time per reason. The log has one message, not one per request."""
    scripted.answers[1] = [WAIT] * 5
    with caplog.at_level("INFO"):
        make().train()
    first, second, *_ = lines(tmp_path / "train.jsonl")
    assert first.wait_reasons == {}
    assert second.wait_reasons.keys() == {"too_few_groups"}
    assert 5 * 0.01 <= second.wait_reasons["too_few_groups"] <= second.wait_s
    messages = [record.getMessage() for record in caplog.records if "too_few_groups" in record.getMessage()]
    assert len(messages) == 1
    assert "producers" in messages[0]


def test_the_trainer_waits_for_a_service_that_returns_in_time(scripted: ScriptedService, make: Make) -> None:
    """Each kind of request is repeated. Each step is acked exactly once."""
    scripted.answers[2] = [ServiceUnavailable("away")]
    for call in ("get_run", "attach", "ack", "publish", "checkpoint"):
        scripted.faults[call] = [ServiceUnavailable("away")]
    assert make().train() == STEPS
    acks = [event for event in scripted.events if event.startswith("ack")]
    assert acks == [f"ack {step}" for step in range(STEPS)]
    assert scripted.events.count("fetch 2") == 2


def test_the_trainer_waits_for_engines_that_return_in_time(scripted: ScriptedService, make: Make) -> None:
    """The trainer repeats a publication that no engine accepted, and announces it once."""
    scripted.faults["load"] = [ServiceUnavailable("engine http://e does not answer /pause")] * 2
    assert make().train() == STEPS
    loaded = [event for event in scripted.events if event.startswith(("load", "publish"))]
    assert loaded == [f"{what} {version}" for version in range(STEPS + 1) for what in ("load", "publish")]


def test_a_service_that_stays_unreachable_ends_the_training(
    scripted: ScriptedService, tmp_path: Path, make: Make
) -> None:
    """After `service_timeout_s` the trainer raises the client's error."""
    scripted.faults["ack"] = [ServiceUnavailable("service http://x is away")] * 1000
    with pytest.raises(ServiceUnavailable, match="http://x is away"):
        make(service_timeout_s=0.2).train()
    assert latest_checkpoint(tmp_path / "checkpoints") is None


def test_a_fenced_trainer_stops_without_a_checkpoint(scripted: ScriptedService, tmp_path: Path, make: Make) -> None:
    """Another trainer owns the run, so a checkpoint of this trainer must not be resumed."""
    scripted.faults["ack"] = [Fenced("epoch 8 has the run")]
    with pytest.raises(Fenced):
        make().train()
    assert not any(event.startswith("checkpoint") for event in scripted.events)
    assert latest_checkpoint(tmp_path / "checkpoints") is None


def test_a_stop_while_waiting_writes_a_checkpoint(scripted: ScriptedService, tmp_path: Path, make: Make) -> None:
    """The trainer waits for a batch; the checkpoint has the steps so far, and the service records it."""
    made = make(reader_options=ReaderOptions(poll_s=2 * TIMEOUT_S, prefetch=False))
    scripted.answers[2] = [WAIT] * 1000
    scripted.when["fetch 2"] = made.stop
    assert made.train() == 2
    assert scripted.events[-1] == "checkpoint 2"
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None and read_state(newest).step == 2


def test_a_stop_while_the_service_is_unreachable_writes_a_checkpoint(
    scripted: ScriptedService, tmp_path: Path, make: Make
) -> None:
    """The checkpoint on disk can be resumed even if the service did not record it."""
    made = make()
    scripted.answers[2] = [ServiceUnavailable("away")] * 1000
    scripted.faults["checkpoint"] = [ServiceUnavailable("away")] * 1000
    scripted.when["fetch 2"] = made.stop
    assert made.train() == 2
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None and read_state(newest).step == 2


def test_a_stop_between_ack_and_publication_keeps_the_metrics_line(
    scripted: ScriptedService, tmp_path: Path, make: Make
) -> None:
    """The checkpoint includes the acked step, so the metrics file must include it too."""
    made = make()
    scripted.when["ack 1"] = made.stop
    scripted.when["load 1"] = lambda: scripted.faults["load"].extend([ServiceUnavailable("engine died")] * 1000)
    assert made.train() == 2
    assert scripted.events[-1] == "checkpoint 2"
    assert [line.step for line in lines(tmp_path / "train.jsonl")] == [0, 1]


# ---------------------------------------------------------------------- resuming


def test_a_resumed_training_ends_with_the_same_weights_bit_for_bit(
    scripted: ScriptedService, tmp_path: Path, models: Path
) -> None:
    """Two steps, a restart and two more steps equal four steps without a restart."""
    trainer_of(scripted, options(tmp_path / "whole", models, checkpoint_dir=tmp_path / "checkpoints")).train()
    whole = weights(tmp_path / "checkpoints" / f"step-{STEPS:06d}" / "model")

    folder = tmp_path / "parts"
    first = ScriptedService(folder / "checkpoints")
    first.answers[2] = [RunFinished("pretend")]
    trainer_of(first, options(folder, models)).train()
    second = ScriptedService(folder / "checkpoints", step=2)
    assert trainer_of(second, options(folder, models)).train() == STEPS
    assert second.events[:6] == ["get_run", "get_run", "attach 2", "checkpoint 2", "publish 2", "fetch 2"]
    resumed = weights(folder / "checkpoints" / f"step-{STEPS:06d}" / "model")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


# ---------------------------------------------------------------------- a real run


@pytest.fixture
def filled_run(run: RunClient) -> RunClient:
    """A run on a real service that holds the groups of `STEPS` batches."""
    fill(run)
    return run


def test_a_real_run_is_trained_to_its_end(
    filled_run: RunClient, engine: ServedEngine, tmp_path: Path, models: Path
) -> None:
    """Service and engine end at the last version. The engine samples with the weights of the last checkpoint."""
    reading = ReaderOptions(wait_ms=500)
    made = options(tmp_path, models, engines=(engine.url,), reader_options=reading, checkpoint_every_steps=2)
    url = str(filled_run.http.base_url)
    with Client(url, filled_run.run) as client:
        assert Trainer(made, ServiceFeed(made, client)).train() == STEPS
    state = filled_run.state()
    assert (state["state"], state["step"], state["published_version"]) == ("finished", STEPS, STEPS)
    assert engine.version() == str(STEPS)
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None and read_state(newest).step == STEPS
    choice = engine.complete([70, 88, 33], max_tokens=8)[0]
    expected = oracle(load_model(newest / "model"), [70, 88, 33], choice["token_ids"])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    recorded = lines(tmp_path / "train.jsonl")
    assert [line.step for line in recorded] == list(range(STEPS))
    metrics = filled_run.get("history").json()["metrics"]
    assert metrics["grad_norm"] == [line.grad_norm for line in recorded]
    assert metrics.keys() >= {"loss", "entropy", "learning_rate", "skipped"}


def test_a_run_with_adapters_is_rejected_before_the_trainer_attaches(
    run: RunClient, engine: ServedEngine, tmp_path: Path, models: Path
) -> None:
    """The message names the adapters. The epoch of the run does not change."""
    adapters = {name: {"groups_per_batch": 1} for name in ("math", "code")}
    assert run.put(batch={"tokens_per_batch": 512, "seq_len": 64}, adapters=adapters).status_code == 201
    made = options(tmp_path, models, engines=(engine.url,))
    with (
        Client(str(run.http.base_url), run.run) as client,
        pytest.raises(Invalid, match=r"has adapters \['code', 'math'\]; give --lora-rank"),
    ):
        Trainer(made, ServiceFeed(made, client)).train()
    assert run.state()["epoch"] == 0
    assert latest_checkpoint(tmp_path / "checkpoints") is None


@contextlib.contextmanager
def trainer_process(run: RunClient, engine: ServedEngine, tmp_path: Path, models: Path) -> Iterator[ForkedProcess]:
    """Run `replaybuf train` on a run without groups, wait until it logs that it waits, and kill it at the end."""
    run.put(batch={"groups_per_batch": 1, "seq_len": 64})
    options = {
        "--url": str(run.http.base_url),
        "--run": run.run,
        "--model": str(models / "a"),
        "--engine": engine.url,
        "--checkpoint-dir": str(tmp_path / "checkpoints"),
        "--weights-dir": str(tmp_path / "weights"),
    }
    words = ["train", *(word for pair in options.items() for word in pair)]
    log = tmp_path / "train.log"
    with log.open("w") as errors, ForkedProcess("replaybuf", words, os.environ, errors, trainer=True) as process:
        try:
            eventually(lambda: "reason=" in log.read_text() or process.poll() is not None, TIMEOUT_S)
            assert process.poll() is None, log.read_text()
            yield process
        finally:
            process.kill()


def test_the_command_ends_with_exit_code_3_when_another_trainer_takes_the_run(
    run: RunClient, engine: ServedEngine, tmp_path: Path, models: Path
) -> None:
    """The log names the cause, and there is no checkpoint."""
    with trainer_process(run, engine, tmp_path, models) as process:
        run.attach()
        assert process.wait(TIMEOUT_S * patience()) == 3
    assert "another trainer" in (tmp_path / "train.log").read_text()
    assert latest_checkpoint(tmp_path / "checkpoints") is None


def test_the_command_writes_a_checkpoint_and_ends_with_code_0_on_sigterm(
    run: RunClient, engine: ServedEngine, tmp_path: Path, models: Path
) -> None:
    """The process ends by itself, and the engine is not left paused."""
    with trainer_process(run, engine, tmp_path, models) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S * patience()) == 0
    assert latest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-000000"
    assert not engine.http.get("/is_paused").json()["is_paused"]

"""The training loop: in which order it calls whom, what it does when somebody is away, and the same on a real run."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from replaybuf.calls import Amount, Attached, Waiting
from replaybuf.client import Client
from replaybuf.demo.progress import LineReader, TrainerLine
from replaybuf.errors import Fenced, RunFinished, ServiceUnavailable, WrongStep
from replaybuf.group import GroupJson, group_from_json, group_to_json
from replaybuf_trainer import trainer as trainer_module
from replaybuf_trainer.checkpoint import latest_checkpoint, read_state
from replaybuf_trainer.model import load_model
from replaybuf_trainer.trainer import Trainer, TrainOptions
from tests.conftest import RunClient
from tests.trainer.batches import group_of, packed, rollouts
from tests.trainer.served import ServedEngine, oracle

WAIT = Waiting(reason="too_few_groups", have=Amount(groups=1), need=Amount(groups=2), blocked_on="producers")
STEPS = 4
TIMEOUT_S = 30.0
LEAVE_S = 4.0
"""How long a trainer may take to leave after SIGTERM."""


def body(step: int) -> bytes:
    """The batch of a step: four rollouts drawn from its number."""
    batch = packed(rollouts(4, seed=step), [[0, 1], [2, 3]], step=step)
    memory = batch.micro_batches[0].input_ids.base
    while getattr(memory, "base", None) is not None:
        memory = memory.base
    return bytes(cast(memoryview, memory).obj)


class ScriptedService:
    """A service that answers as scripted and writes every call into `events`, which the engines share.

    `answers[step]` come first when that step is asked for; then its batch, or `RunFinished` from step `STEPS` on.
    `faults[call]` are raised first when that call is made.
    """

    def __init__(self, checkpoints: Path) -> None:
        self.events: list[str] = []
        self.answers: defaultdict[int, list[Waiting | Exception]] = defaultdict(list)
        self.faults: defaultdict[str, list[Exception]] = defaultdict(list)
        self.steps_per_publish = 1
        self.fetching = threading.Event()
        self.look_ahead = True
        self._checkpoints = checkpoints
        self._acked = 0

    def get_run(self) -> dict[str, Any]:
        """Tell the configuration."""
        self._called("get_run")
        return {"config": {"steps_per_publish": self.steps_per_publish}}

    def attach(self, *, resume_step: int, **_: Any) -> Attached:
        """Attach where asked for."""
        self._called("attach", f"attach {resume_step}")
        self._acked = resume_step
        return Attached(epoch=7, step=resume_step)

    def fetch_batch(self, step: int, epoch: int, dp_rank: int = 0, wait_ms: int = 0) -> bytes | Waiting:
        """Answer as scripted, then with the batch."""
        assert (epoch, dp_rank) == (7, 0)
        self.events.append(f"fetch {step}")
        self.fetching.set()
        if self.answers[step]:
            answer = self.answers[step].pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        if step >= STEPS:
            raise RunFinished("finished")
        return body(step)

    def ack(self, step: int, epoch: int, feedback: Any = None) -> None:
        """Take acks in order."""
        self._called("ack", f"ack {step}")
        assert (step, epoch) == (self._acked, 7)
        self._acked += 1

    def publish_policy(self, version: int, epoch: int, weights_uri: str | None = None) -> None:
        """Refuse what the service would refuse: a version above that of the next unacked step."""
        self._called("publish", f"publish {version}")
        assert version <= self._acked // self.steps_per_publish
        assert weights_uri is not None and weights_uri.startswith("file:///")

    def checkpoint(self, step: int, epoch: int, keep: int | None = None) -> None:
        """Take a checkpoint that is on disk by now."""
        self._called("checkpoint", f"checkpoint {step}")
        assert latest_checkpoint(self._checkpoints) == self._checkpoints / f"step-{step:06d}"

    def _called(self, call: str, event: str = "") -> None:
        if self.faults[call]:
            raise self.faults[call].pop(0)
        self.events.append(event or call)


class ScriptedEngines:
    """Stands where the publisher stands, and writes what is loaded into the service's events."""

    events: list[str]

    def __init__(self, *_: Any) -> None: ...

    def publish(self, folder: Path, version: int) -> None:
        """Load what is there."""
        load_model(folder)
        self.events.append(f"load {version}")

    def close(self) -> None:
        """End."""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedService:
    """A scripted service, and engines that write into the same events."""
    made = ScriptedService(tmp_path / "checkpoints")
    engines = type("Engines", (ScriptedEngines,), {"events": made.events})
    monkeypatch.setattr(trainer_module, "EnginePublisher", engines)
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
        "poll_s": 0.01,
        "prefetch": False,
        "service_timeout_s": 5.0,
    }
    return TrainOptions(**filled | fields)


def trainer_of(service: ScriptedService, made: TrainOptions) -> Trainer:
    """A trainer on the scripted service."""
    return Trainer(made, cast(Client, service))


def lines(path: Path) -> list[TrainerLine]:
    """Read a metrics file as the demo does."""
    return LineReader(path, TrainerLine).new_lines()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters of a model folder by name."""
    found: dict[str, torch.Tensor] = load_model(folder).state_dict()
    return found


# ---------------------------------------------------------------------- the order of a step


def test_a_step_is_fetched_trained_acked_loaded_and_published(
    service: ScriptedService, tmp_path: Path, models: Path
) -> None:
    """From attaching with the initial weights to the checkpoint at the end of the run."""
    assert trainer_of(service, options(tmp_path, models, checkpoint_every_steps=3)).train() == STEPS
    expected = ["get_run", "attach 0", "load 0", "publish 0"]
    for step in range(STEPS):
        expected += [f"fetch {step}", f"ack {step}", f"load {step + 1}", f"publish {step + 1}"]
        expected += ["checkpoint 3"] if step == 2 else []
    assert service.events == [*expected, f"fetch {STEPS}", f"checkpoint {STEPS}"]


def test_weights_are_published_once_per_version(service: ScriptedService, tmp_path: Path, models: Path) -> None:
    """With two steps per publication, after every second step."""
    service.steps_per_publish = 2
    trainer_of(service, options(tmp_path, models)).train()
    published = [event for event in service.events if event.startswith("publish")]
    assert published == ["publish 0", "publish 1", "publish 2"]
    assert service.events.index("publish 1") == service.events.index("ack 1") + 2
    assert [line.version for line in lines(tmp_path / "train.jsonl")] == list(range(STEPS))


def test_the_next_batch_is_asked_for_while_this_one_trains(
    service: ScriptedService, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prefetch the question for step 1 is out before step 0 is trained."""
    made = trainer_of(service, options(tmp_path, models, prefetch=True))
    train_step = made._train_step
    seen: list[str] = []

    def trained(batch: Any) -> Any:
        if batch.meta.step == 0:
            service.fetching.clear()
            if "fetch 1" not in service.events:
                assert service.fetching.wait(TIMEOUT_S)
            seen.extend(service.events)
        return train_step(batch)

    monkeypatch.setattr(made, "_train_step", trained)
    made.train()
    assert "fetch 1" in seen
    assert "ack 0" not in seen
    assert [event for event in service.events if event.startswith("ack")] == [f"ack {step}" for step in range(STEPS)]


@pytest.mark.parametrize("early", [WAIT, WrongStep("not yet"), ServiceUnavailable("away")])
def test_a_prefetch_that_came_too_early_is_asked_again(
    service: ScriptedService, tmp_path: Path, models: Path, early: Waiting | Exception
) -> None:
    """Whatever it was answered, it costs nothing."""
    service.answers[1] = [early]
    assert trainer_of(service, options(tmp_path, models, prefetch=True)).train() == STEPS
    assert service.events.count("fetch 1") == 2


def test_training_moves_the_weights_and_says_how(service: ScriptedService, tmp_path: Path, models: Path) -> None:
    """One line of figures per step, as the demo reads them; finite weights that are not the old ones."""
    trainer_of(service, options(tmp_path, models)).train()
    told = lines(tmp_path / "train.jsonl")
    assert [line.step for line in told] == list(range(STEPS))
    for line in told:
        assert line.tokens == sum(len(one.prompt_ids) + len(one.completion_ids) for one in rollouts(4, seed=line.step))
        assert line.reward_mean == pytest.approx(0.5)
        assert line.grad_norm > 0
        assert (line.staleness_mean, line.staleness_max) == (1.0, 1)
        assert line.train_s > 0 and line.publish_s > 0 and line.time > 0
    checkpoint = latest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    before, after = weights(models / "a"), weights(checkpoint / "model")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())


# ---------------------------------------------------------------------- waiting


def test_waiting_is_counted_by_reason(
    service: ScriptedService, tmp_path: Path, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The line of the step that was waited for says how long and why; the log says it too, not at every question."""
    service.answers[1] = [WAIT] * 5
    with caplog.at_level("INFO"):
        trainer_of(service, options(tmp_path, models)).train()
    first, second, *_ = lines(tmp_path / "train.jsonl")
    assert first.wait_reasons == {}
    assert second.wait_reasons.keys() == {"too_few_groups"}
    assert 5 * 0.01 <= second.wait_reasons["too_few_groups"] <= second.wait_s
    told = [record.getMessage() for record in caplog.records if "too_few_groups" in record.getMessage()]
    assert len(told) == 1
    assert "producers" in told[0]


def test_a_service_that_comes_back_in_time_is_waited_for(service: ScriptedService, tmp_path: Path, models: Path) -> None:
    """At start, for a batch, an ack, a publication and a checkpoint; nothing is done twice or left out."""
    plain = ScriptedService(tmp_path / "checkpoints")
    service.answers[2] = [ServiceUnavailable("away")]
    for call in ("get_run", "attach", "ack", "publish", "checkpoint"):
        service.faults[call] = [ServiceUnavailable("away")]
    assert trainer_of(service, options(tmp_path, models)).train() == STEPS
    acks = [event for event in service.events if event.startswith("ack")]
    assert acks == [f"ack {step}" for step in range(STEPS)]
    assert service.events.count("fetch 2") == 2
    assert plain.events == []


def test_a_service_that_stays_away_ends_the_training(service: ScriptedService, tmp_path: Path, models: Path) -> None:
    """With the client's message, after `service_timeout_s`."""
    service.faults["ack"] = [ServiceUnavailable("service http://x is away")] * 1000
    with pytest.raises(ServiceUnavailable, match="http://x is away"):
        trainer_of(service, options(tmp_path, models, service_timeout_s=0.2)).train()
    assert latest_checkpoint(tmp_path / "checkpoints") is None


def test_a_fenced_trainer_stops_without_a_checkpoint(service: ScriptedService, tmp_path: Path, models: Path) -> None:
    """Another one has the run: nothing of this one's may be resumed from."""
    service.faults["ack"] = [Fenced("epoch 8 has the run")]
    with pytest.raises(Fenced):
        trainer_of(service, options(tmp_path, models)).train()
    assert not any(event.startswith("checkpoint") for event in service.events)
    assert latest_checkpoint(tmp_path / "checkpoints") is None


def test_a_stop_while_waiting_leaves_a_checkpoint(service: ScriptedService, tmp_path: Path, models: Path) -> None:
    """Asked to stop with no batch in sight: the steps done so far are kept and told."""
    made = trainer_of(service, options(tmp_path, models, poll_s=TIMEOUT_S))
    service.answers[2] = [WAIT] * 1000
    thread = threading.Thread(target=made.train)
    thread.start()
    ends_s = time.monotonic() + TIMEOUT_S
    while "fetch 2" not in service.events and time.monotonic() < ends_s:
        service.fetching.wait(0.1)
    made.stop.set()
    thread.join(LEAVE_S)
    assert not thread.is_alive()
    assert service.events[-1] == "checkpoint 2"
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None and read_state(newest).step == 2


# ---------------------------------------------------------------------- resuming


def test_a_resumed_training_ends_in_the_same_weights_bit_for_bit(
    service: ScriptedService, tmp_path: Path, models: Path
) -> None:
    """Stopped after two steps and started again, against four steps at once."""
    trainer_of(service, options(tmp_path / "whole", models, checkpoint_dir=tmp_path / "checkpoints")).train()
    whole = weights(tmp_path / "checkpoints" / f"step-{STEPS:06d}" / "model")

    folder = tmp_path / "parts"
    first = ScriptedService(folder / "checkpoints")
    first.answers[2] = [RunFinished("pretend")]
    trainer_of(first, options(folder, models)).train()
    second = ScriptedService(folder / "checkpoints")
    assert trainer_of(second, options(folder, models)).train() == STEPS
    assert second.events[:4] == ["get_run", "attach 2", "publish 2", "fetch 2"]
    resumed = weights(folder / "checkpoints" / f"step-{STEPS:06d}" / "model")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


# ---------------------------------------------------------------------- a real run


@pytest.fixture
def filled_run(run: RunClient) -> Iterator[RunClient]:
    """A run on a real service with the groups of `STEPS` on-policy-enough batches already in it."""
    run.put(
        batch={"groups_per_batch": 1, "seq_len": 64},
        strategy={"name": "one-step-off-policy", "options": {"max_staleness": 100}},
        max_steps=STEPS,
    )
    for number in range(STEPS):
        group = group_of(rollouts(4, seed=number), group_id=f"g{number}", prompt_id=f"p{number}")
        wire: GroupJson = group_to_json(group)
        group_from_json(wire)
        run.append(msgspec.to_builtins(wire))
    return (yield run)


def test_a_real_run_is_trained_to_its_end(
    filled_run: RunClient, engine: ServedEngine, tmp_path: Path, models: Path
) -> None:
    """Service and engine end at the last version; the engine samples from the weights of the last checkpoint."""
    made = options(tmp_path, models, engines=(engine.url,), prefetch=True, checkpoint_every_steps=2, wait_ms=500)
    url = str(filled_run.http.base_url)
    with Client(url, filled_run.run) as client:
        assert Trainer(made, client).train() == STEPS
    state = filled_run.state()
    assert (state["state"], state["step"], state["published_version"]) == ("finished", STEPS, STEPS)
    assert engine.version() == str(STEPS)
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None and read_state(newest).step == STEPS
    choice = engine.complete([70, 88, 33], max_tokens=8)[0]
    expected = oracle(load_model(newest / "model"), [70, 88, 33], choice["token_ids"])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert [line.step for line in lines(tmp_path / "train.jsonl")] == list(range(STEPS))


def command(filled_run: RunClient, engine: ServedEngine, tmp_path: Path, models: Path) -> list[str]:
    """The command line of a trainer on this run."""
    given = {
        "--url": str(filled_run.http.base_url),
        "--run": filled_run.run,
        "--model": str(models / "a"),
        "--engine": engine.url,
        "--checkpoint-dir": str(tmp_path / "checkpoints"),
        "--weights-dir": str(tmp_path / "weights"),
    }
    return [sys.executable, "-m", "replaybuf.cli", "train", *(word for pair in given.items() for word in pair)]


def log_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Read the log of a process until a line matches; return what was read."""
    assert process.stderr is not None
    read = ""
    for line in process.stderr:
        read += line
        if re.search(pattern, line):
            return read
    raise AssertionError(f"{pattern!r} was not logged: {read}")


def test_the_command_leaves_in_time_on_sigterm_and_ends_with_3_when_fenced(
    run: RunClient, engine: ServedEngine, tmp_path: Path, models: Path
) -> None:
    """Two trainers of one run that has nothing to train: the second fences the first, SIGTERM ends the second."""
    run.put(batch={"groups_per_batch": 1, "seq_len": 64})
    words = command(run, engine, tmp_path, models)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as first, subprocess.Popen(["true"]) as _:
        try:
            log_until(first, "waiting step=0")
            second = subprocess.Popen([*words, "--checkpoint-dir", str(tmp_path / "others")], **pipes)
            with second:
                try:
                    log_until(second, "waiting step=0")
                    assert first.wait(TIMEOUT_S) == 3
                    began = time.monotonic()
                    second.send_signal(signal.SIGTERM)
                    assert second.wait(TIMEOUT_S) == 0
                    assert time.monotonic() - began < LEAVE_S
                finally:
                    second.kill()
        finally:
            first.kill()
    assert latest_checkpoint(tmp_path / "others") == tmp_path / "others" / "step-000000"
    assert latest_checkpoint(tmp_path / "checkpoints") is None

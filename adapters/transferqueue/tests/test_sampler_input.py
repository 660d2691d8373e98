"""The sampler alone: what it refuses, what a group keeps of verl's fields, and what it does with the queue."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue
from omegaconf import OmegaConf
from test_sampler import config_of, queue
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl_training import PROMPTS, SAMPLES, trajectory_of
from verl_training import config_of as verl_config_of

from replaybuf.client import Client, attach_at
from replaybuf.errors import Fenced, GroupRejected, Invalid, NotFound, WrongStep
from replaybuf.wire.batch import read_batch
from replaybuf_transferqueue import sampler_settings
from replaybuf_transferqueue.sampler import CheckpointReport
from replaybuf_transferqueue.trajectories import Trajectory, group_of, trajectories_of
from tests.conftest import RunClient, connect, own_service, run, service

__all__ = ["connect", "own_service", "queue", "run", "service"]


def make(run: RunClient, mode: str = "colocate_async", refill: Any = None, **changes: Any) -> Any:
    """Make the sampler with verl's own code."""
    sampler = {"url": str(run.http.base_url), "run": run.run, "poll_s": 0.05} | changes.pop("sampler", {})
    config = verl_config_of({"folder": "/nowhere", "steps": 4, "mode": mode, "sampler": sampler} | changes)
    config.trainer.v1.separate_async.hybrid_rollout.enable_switch = changes.get("switch", False)
    trainer = SimpleNamespace(config=config, trainer_mode=mode, _add_prompts_to_generate=refill or (lambda count: None))
    return PPOTrainer._build_replay_buffer(trainer)


def trajectories(uid: str, index: int, version: int = 0, **fields: Any) -> list[Trajectory]:
    rollouts = []
    for session in range(SAMPLES):
        columns = trajectory_of(index, session).as_dict() | {"uid": uid, "index": index, "data_source": "numbers"}
        lengths = {"prompt_len": 2, "response_len": len(columns["responses"]), "seq_len": 2 + len(columns["responses"])}
        tag = lengths | {"status": "success", "global_steps": version + 1, "min_global_steps": version}
        tag["max_global_steps"] = version
        rollouts.append(Trajectory(f"{uid}_{session}_0", columns | fields, tag))
    return rollouts


def put(uid: str, rollouts: list[Trajectory], partition: str = "train", status: str = "finished") -> None:
    """Put a finished prompt, as verl's agent loops do."""
    for rollout in rollouts:
        data = list_of_dict_to_tensordict([rollout.fields])
        transfer_queue.kv_batch_put(keys=[rollout.key], partition_id=partition, fields=data, tags=[rollout.tag])
    tag = {"is_prompt": True, "status": status, "global_steps": 1}
    transfer_queue.kv_batch_put(keys=[uid], partition_id=partition, tags=[tag])


def clear() -> None:
    for partition, keys in (transfer_queue.kv_list() or {}).items():
        if keys:
            transfer_queue.kv_clear(keys=list(keys), partition_id=partition)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("trainer.v1.trainer_mode", {"mode": "sync"}),
        ("trainer.v1.separate_async.hybrid_rollout.enable_switch", {"mode": "separate_async", "switch": True}),
        ("trainer.v1.sampler.sampler_kwargs", {"sampler": {"rn": "r"}}),
        ("trainer.v1.sampler.sampler_kwargs", {"sampler": {"poll_s": 0}}),
        ("run", {"sampler": {"run": None}}),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    run: RunClient, monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, Any]
) -> None:
    monkeypatch.delenv("REPLAYBUF_RUN", raising=False)
    with pytest.raises(Invalid) as refused:
        make(run, **changes)
    assert refused.value.name == name


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("batch.groups_per_batch", config_of(PROMPTS + 1)),
        ("batch.tokens_per_batch", config_of() | {"batch": config_of()["batch"] | {"tokens_per_batch": 4096}}),
        ("batch.overlong", config_of() | {"batch": config_of()["batch"] | {"overlong": "truncate"}}),
        ("steps_per_publish", config_of(steps_per_publish=2)),
    ],
)
def test_a_run_that_does_not_fit_is_refused_before_it_has_a_trainer(
    run: RunClient, name: str, config: dict[str, Any]
) -> None:
    assert run.put(**config).status_code == 201
    with pytest.raises(Invalid, match=f"{name} is") as refused:
        make(run).sample(1, "train", PROMPTS)
    assert refused.value.name == f"run {run.run}: {name}"
    assert run.state()["trainer"] is None


@pytest.mark.parametrize("groups", [PROMPTS // 2, PROMPTS + 1])
def test_nobody_changes_the_batches_that_verl_trains(groups: int, run: RunClient, queue: str) -> None:
    """A live change is refused; a batch that was made before, or between the check and the attach, is an error."""
    clear()
    assert run.put(**config_of()).status_code == 201
    for number in range(PROMPTS + 1):
        put(f"u{number}", trajectories(f"u{number}", number))
    sampler = make(run)
    attach = sampler._client.attach

    def late(**arguments: Any) -> Any:
        assert run.http.patch(run.path, json={"batch": {"groups_per_batch": groups}}).status_code == 200
        return attach(**arguments)

    sampler._client.attach = late
    with pytest.raises(Invalid, match=f"groups is {groups}; needed: a multiple of {PROMPTS}; give its groups back"):
        sampler.sample(1, "train", PROMPTS)
    answer = run.http.patch(run.path, json={"batch": {"groups_per_batch": PROMPTS}})
    assert (answer.status_code, answer.json()["name"]) == (409, "fixed")


def test_an_unknown_run_is_refused(run: RunClient) -> None:
    with pytest.raises(NotFound):
        make(run).sample(1, "train", PROMPTS)


def test_a_checkpoint_of_another_run_is_refused(run: RunClient) -> None:
    assert run.put(**config_of()).status_code == 201
    with pytest.raises(WrongStep, match="another run"):
        make(run).sample(8, "train", PROMPTS)
    assert run.state()["trainer"] is None


@pytest.mark.parametrize("name", ["rollout_log_probs", "rm_scores"])
def test_a_missing_field_is_named_with_the_way_out(name: str) -> None:
    rollouts = trajectories("u", 1)
    for rollout in rollouts:
        del rollout.fields[name]
    with pytest.raises(Invalid, match=f"no field '{name}'; .*(set|use) ") as refused:
        group_of(rollouts, "u")
    assert refused.value.name == name


def test_a_field_that_is_too_large_for_a_group_is_named() -> None:
    rollouts = trajectories("u", 1, multi_modal_inputs={"pixel_values": torch.randn(400, 400)})
    with pytest.raises(Invalid, match="largest is 'multi_modal_inputs'"):
        group_of(rollouts, "u")


def test_the_checkpoint_callback_refuses_another_sampler() -> None:
    with pytest.raises(Invalid, match="custom_sampler"):
        CheckpointReport().on_save(SimpleNamespace(replay_buffer=object()), 1, "/nowhere")


def test_an_asynchronous_checkpoint_is_recorded_at_the_next_save(run: RunClient, queue: str) -> None:
    clear()
    assert run.put(**config_of()).status_code == 201
    for number in range(PROMPTS):
        put(f"u{number}", trajectories(f"u{number}", number))
    sampler, report = make(run), CheckpointReport()
    sampler.sample(1, "train", PROMPTS)
    trainer = SimpleNamespace(replay_buffer=sampler)
    report.on_save(trainer, 1, "/nowhere", async_save=True)
    assert (run.state()["step"], run.state()["checkpoints"]) == (1, [])
    report.on_save(trainer, 1, "/nowhere", async_save=True)
    assert run.state()["checkpoints"] == [1]


@pytest.mark.parametrize("lacks", ["ack", "checkpoint"])
def test_a_training_that_has_ended_sends_the_report_that_a_kill_prevented(
    run: RunClient, queue: str, tmp_path: Path, lacks: str
) -> None:
    """verl has nothing left to train, so it asks the sampler for no step."""
    clear()
    assert run.put(**config_of()).status_code == 201
    for number in range(PROMPTS):
        put(f"u{number}", trajectories(f"u{number}", number))
    sampler = make(run)
    sampler.sample(1, "train", PROMPTS)
    if lacks == "checkpoint":
        sampler._ack_before(1)
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    settings = {"url": str(run.http.base_url), "run": run.run}
    config = verl_config_of({"folder": str(tmp_path), "steps": 1, "sampler": settings})
    for name, value in {"trainer.val_only": True, "trainer.total_training_steps": 2}.items():
        unfinished = copy.deepcopy(config)
        OmegaConf.update(unfinished, name, value, force_add=True)
        CheckpointReport(unfinished)
        assert run.state()["checkpoints"] == []
    CheckpointReport(config)
    assert (run.state()["step"], run.state()["checkpoints"]) == (1, [1])
    epoch = run.state()["trainer"]["epoch"]
    CheckpointReport(config)
    assert run.state()["trainer"]["epoch"] == epoch  # it owes nothing now, so nobody is fenced


def test_a_group_keeps_every_field(run: RunClient) -> None:
    dense = torch.tensor([0.25, 0.0, 0.5])
    odd = {
        "position_ids": torch.arange(15).reshape(3, 5),
        "rm_scores": dense,
        "responses": torch.tensor([1, 2, 3]),
        "response_mask": torch.tensor([1, 0, 1]),
        "loss_mask": torch.tensor([1, 0, 0]),
        "rollout_log_probs": torch.tensor([-0.5, -0.25, -1.0]),
        "raw_prompt": [{"role": "user", "content": "ä"}],
        "routed_experts": torch.ones(5, 2, 2, dtype=torch.int16),
        "nothing": None,
    }
    before = trajectories("u", 1, **odd)
    config = config_of(1)
    assert run.put(**config).status_code == 201
    with Client(str(run.http.base_url), run.run) as client:
        assert client.append([group_of(before, "u")])[0].status == "stored"
        attached = attach_at(client, 0, lengths=True, metadata=True)
        body = client.fetch_batch(0, attached.epoch, wait_ms=5000)
        assert isinstance(body, bytes)
        after = trajectories_of(read_batch(body), "-step0")
    assert [rollout.key for rollout in after] == ["u-step0_0_0", "u-step0_1_0"]
    assert [rollout.tag for rollout in after] == [rollout.tag for rollout in before]
    for old, new in zip(before, after, strict=True):
        assert new.fields["uid"] == "u-step0"
        for name in old.fields.keys() - {"uid"}:
            value, new_value = old.fields[name], new.fields[name]
            assert torch.equal(new_value, value) if isinstance(value, torch.Tensor) else new_value == value, name


def test_groups_with_different_fields_keep_all_of_them(run: RunClient, queue: str) -> None:
    clear()
    assert run.put(**config_of()).status_code == 201
    for number in range(PROMPTS):
        fields = {"tool": "python"} if number == 1 else {}
        put(f"u{number}", trajectories(f"u{number}", number, **fields))
    keys = make(run).sample(1, "train", PROMPTS)[0].keys
    data = transfer_queue.kv_batch_get(keys=[key for key in keys if key.startswith("u1-")], partition_id="train")
    assert list(data["tool"]) == ["python"] * SAMPLES


def test_groups_that_the_run_rejects_are_generated_again_until_all_are(run: RunClient, queue: str) -> None:
    clear()
    assert run.put(**config_of(group_size=SAMPLES + 1)).status_code == 201
    asked: list[int] = []

    def refill(count: int) -> None:
        for _ in range(count):
            asked.append(len(asked))
            put(f"u{len(asked)}", trajectories(f"u{len(asked)}", 1))

    with pytest.raises(GroupRejected):
        make(run, refill=refill).sample(1, "train", PROMPTS)
    assert 16 <= len(asked) <= 32


def test_validation_is_verls_own_and_acks_the_steps_before(run: RunClient, queue: str) -> None:
    clear()
    assert run.put(**config_of()).status_code == 201
    for number in range(PROMPTS):
        put(f"u{number}", trajectories(f"u{number}", number))
    sampler = make(run)
    batch, metrics = sampler.sample(1, "train", PROMPTS)
    assert len(batch.keys) == PROMPTS * SAMPLES
    assert metrics["replaybuf/staleness/max"] == 0
    put("v", trajectories("v", 1), partition="val")
    checked, _ = sampler.sample(1, "val", 1)
    assert sorted(checked.keys) == ["v_0_0", "v_1_0"]
    assert run.state()["step"] == 1


def test_a_prompt_that_a_rewind_took_back_is_stored_again(run: RunClient, queue: str) -> None:
    clear()
    assert run.put(**config_of()).status_code == 201
    first = make(run)
    for number in range(PROMPTS):
        put(f"u{number}", trajectories(f"u{number}", number))
    first.sample(1, "train", PROMPTS)
    for number in range(10, 11 + PROMPTS):
        put(f"u{number}", trajectories(f"u{number}", number, version=1))
    first.sample(2, "train", PROMPTS)  # one group of version 1 stays live
    left = [entry["group_id"] for entry in run.http.get(f"/v1/runs/{run.run}/groups?state=live").json()["groups"]]
    clear()
    put(left[0], trajectories(left[0], 10))
    make(run).sample(1, "train", PROMPTS)
    with Client(str(run.http.base_url), run.run) as client:
        assert client.get_group(left[0]).reason == "lost_lineage"
        assert client.get_group(f"{left[0]}.1").state == "live"


def test_groups_that_the_run_has_no_room_for_stay_in_the_queue(run: RunClient, queue: str) -> None:
    clear()
    config = config_of(limits={"max_tokens_live": 64})
    assert run.put(**config).status_code == 201
    sampler = make(run)
    for number in range(3 * PROMPTS):
        put(f"u{number}", trajectories(f"u{number}", number))
    batches = [sampler.sample(step, "train", PROMPTS)[0].keys for step in (1, 2)]
    assert run.state()["groups"]["stored"] < 3 * PROMPTS
    batches.append(sampler.sample(3, "train", PROMPTS)[0].keys)
    assert len({key.split("-step")[0] for keys in batches for key in keys}) == 3 * PROMPTS


def test_a_second_training_fences_the_first(run: RunClient, queue: str) -> None:
    clear()
    assert run.put(**config_of()).status_code == 201
    for number in range(PROMPTS):
        put(f"u{number}", trajectories(f"u{number}", number))
    first = make(run)
    first.sample(1, "train", PROMPTS)
    make(run).sample(1, "train", PROMPTS)
    with pytest.raises(Fenced):
        first.sample(2, "train", PROMPTS)


def test_another_version_of_verl_is_a_warning(run: RunClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_settings, "TESTED", ("0.0.1", "0.0.2"))
    with pytest.warns(UserWarning, match=r"verl is 0\.9.*; the sampler is tested with 0\.0\.1 up to but not 0\.0\.2"):
        make(run)


def test_a_group_has_the_version_of_its_oldest_token() -> None:
    rollouts = [*trajectories("u", 1, version=5)[:1], *trajectories("u", 1, version=3)[1:]]
    assert group_of(rollouts, "u").policy_version == 3
    del rollouts[1].tag["min_global_steps"]  # submitted at global step 4, so by the weights of step 3 or newer
    assert group_of(rollouts, "u").policy_version == 3


def test_prompts_are_refilled_to_what_verl_generates_ahead(run: RunClient, queue: str) -> None:
    clear()
    assert run.put(**config_of()).status_code == 201
    asked: list[int] = []

    def refill(count: int) -> None:
        for number in range(count):
            put(f"r{len(asked)}-{number}", trajectories(f"r{len(asked)}-{number}", number))
        asked.append(count)

    for number in range(PROMPTS):
        put(f"u{number}", trajectories(f"u{number}", number), status="failure" if number == 1 else "finished")
    make(run, refill=refill).sample(1, "train", PROMPTS)
    assert asked == [PROMPTS + 1]  # a batch ahead, and one for the prompt that failed
    assert not {key for key in transfer_queue.kv_list("train")["train"] if key.startswith("u1")}

"""A training with verl's own trainer, queue and checkpoints, where verl trains on GPUs.

`fit`, `step`, `_save_checkpoint`, `_load_checkpoint` and all between them are verl's. What a GPU does is replaced: the
engines finish prompts in a thread, some after a while and some never. The model is the list of what trained it, step by
step. `die_at` in the arguments, such as "trained:2", kills this process with SIGKILL there.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
import verl
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

import replaybuf_transferqueue.sampler  # noqa: F401 - verl loads it by its path
from replaybuf.client import Client

PHASES = ("attached", "appended", "sampled", "trained", "model_saved", "recorded", "saved", "synced", "acked")
PROMPTS, SAMPLES = 4, 2
LATE_S = 0.3


def config_of(settings: dict[str, Any]) -> Any:
    """Return verl's default configuration with the lines of the page, and no GPU."""
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml")
    lines = {
        "trainer.v1.trainer_mode": settings.get("mode", "colocate_async"),
        "trainer.v1.sampler.custom_sampler.path": "pkg://replaybuf_transferqueue.sampler",
        "trainer.v1.sampler.custom_sampler.name": "ReplaybufSampler",
        "trainer.v1.sampler.sampler_kwargs": settings["sampler"],
        "trainer.checkpoint_callback_class": "replaybuf_transferqueue.sampler.CheckpointReport",
        "trainer.v1.separate_async.parameter_sync_step": settings.get("parameter_sync_step", 1),
        "trainer.default_local_dir": settings["folder"],
        "trainer.save_freq": settings.get("save_freq", 2),
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.total_training_steps": settings["steps"],
        "trainer.total_epochs": 100,
        "trainer.logger": ["console"],
        "data.train_batch_size": PROMPTS,
        "data.gen_batch_size": 1,
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": True,
        "critic.enable": False,
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.actor.use_kl_loss": False,
    }
    for name, value in lines.items():
        OmegaConf.update(config, name, value, force_add=True)
    return config


class Death:
    """Kills this process at one phase, the n-th time that it passes."""

    def __init__(self, at: str | None) -> None:
        self.phase, _, times = (at or "never:1").partition(":")
        self.left = int(times or 1)

    def passes(self, phase: str) -> None:
        """Die here, if it is the place."""
        self.left -= phase == self.phase
        if self.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, call: str, phase: str) -> None:
        """Die after a call of the client."""
        original = getattr(Client, call)

        def watched(client: Client, *args: Any, **kwargs: Any) -> Any:
            answer = original(client, *args, **kwargs)
            self.passes(phase)
            return answer

        setattr(Client, call, watched)


class Engines:
    """verl's agent loops, in a thread: of the prompts that are submitted every fifth is late, every seventh fails."""

    def __init__(self) -> None:
        self.version = 0
        self._submitted: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def generate_sequences(self, batch: Any) -> None:
        """Submit prompts."""
        step = batch["global_steps"]
        rows = zip(batch["uid"], batch["index"], strict=True)
        for uid, index in rows:
            self._submitted.put({"uid": uid, "index": int(index), "global_steps": step})

    def _work(self) -> None:
        while True:
            prompt = self._submitted.get()
            uid, version = prompt["uid"], self.version
            tq.kv_put(key=uid, partition_id="train", tag={"status": "running"})
            if prompt["index"] % 5 == 4:
                time.sleep(LATE_S)
            fails = is_failing(prompt["index"])
            self._put(prompt, version, 1 if fails else SAMPLES)
            tq.kv_put(key=uid, partition_id="train", tag={"status": "failure" if fails else "finished"})

    def _put(self, prompt: dict[str, Any], version: int, sessions: int) -> None:
        for session in range(sessions):
            output = trajectory_of(prompt["index"], session)
            fields = output.as_dict() | prompt | {"data_source": "numbers", "raw_prompt": [{"role": "user"}]}
            fields["loss_mask"] = fields["response_mask"]
            fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]])
            fields["position_ids"] = torch.arange(len(fields["input_ids"]))
            fields["multi_modal_inputs"] = {}
            lengths = len(fields["prompts"]), len(fields["responses"])
            tag = {
                "status": "success",
                "prompt_len": lengths[0],
                "response_len": lengths[1],
                "seq_len": sum(lengths),
                "global_steps": prompt["global_steps"],
                "min_global_steps": version,
                "max_global_steps": self.version,
            }
            put = list_of_dict_to_tensordict([fields])
            tq.kv_batch_put(keys=[f"{prompt['uid']}_{session}_0"], fields=put, tags=[tag], partition_id="train")


def tokens_of(index: int) -> list[list[int]]:
    """Return the tokens of a prompt's trajectories."""
    outputs = [trajectory_of(index, session) for session in range(SAMPLES)]
    return [[*output.prompt_ids, *output.response_ids] for output in outputs]


def is_failing(index: int) -> bool:
    """Return whether a trajectory of this prompt fails."""
    return index % 7 == 6


def trajectory_of(index: int, session: int) -> AgentLoopOutput:
    """Return a trajectory with a length, a turn of a tool and a reward of its own."""
    rng = random.Random(f"{index}/{session}")
    length = rng.randint(3, 9)
    return AgentLoopOutput(
        prompt_ids=[7, index + 100],
        response_ids=[rng.randrange(50) for _ in range(length)],
        response_mask=[1, 0, *[1] * (length - 2)],
        response_logprobs=[-rng.random() if token != 1 else 0.0 for token in range(length)],
        reward_score=float(session == index % 2),
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields={"reward_extra_info": {"acc": session}},
    )


class Prompts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Prompts by number."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"raw_prompt": [{"role": "user", "content": str(index)}], "index": index}


class Actor:
    """The model: what trained it. Its checkpoint is written as verl's workers write theirs."""

    def __init__(self, death: Death) -> None:
        self.trained: list[list[list[int]]] = []
        self._death = death

    def save_checkpoint(self, path: str, remote: Any, steps: int, max_ckpt_to_keep: Any = None) -> None:
        """Write it."""
        Path(path).mkdir(parents=True, exist_ok=True)
        Path(path, "model.json").write_text(json.dumps(self.trained))
        self._death.passes("model_saved")

    def load_checkpoint(self, local_path: str, del_local_after_load: bool) -> None:
        """Read it."""
        self.trained = json.loads(Path(local_path, "model.json").read_text())


class Training(PPOTrainer):  # type: ignore[misc]
    """verl's trainer without workers."""

    def __init__(self, config: Any, death: Death) -> None:
        self.death = death
        super().__init__(config)

    def _setup(self) -> None:
        self.engines, self.actor_rollout_wg = Engines(), Actor(self.death)
        self.train_dataloader = StatefulDataLoader(Prompts(), batch_size=1, collate_fn=collate_fn, drop_last=True)
        self.train_dataloader_it = None
        self.steps_per_epoch = self.total_training_steps = self.config.trainer.total_training_steps
        self.reward_loop_manager = type("Rewards", (), {"reward_loop_worker_handles": [None]})
        self.use_reference_policy = False
        self._dump_executor = None
        self._load_checkpoint()
        self.engines.version = self.global_steps

    def on_train_begin(self) -> None:
        """Generate ahead."""
        self._add_async_warmup_batches(self.config.trainer.v1[self.trainer_mode].num_warmup_batches)

    def on_sample_end(self) -> None:
        """Nothing sleeps here."""
        self.death.passes("sampled")

    def on_step_end(self) -> None:
        """Load the weights."""
        self.engines.version = self.global_steps
        self.death.passes("synced")

    def _balance_batch(self, batch: KVBatchMeta, metrics: Any, **kwargs: Any) -> KVBatchMeta:
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: Any) -> KVBatchMeta:
        fields = ["prompts", "responses", "advantages", "old_log_probs", "uid"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        tokens = [
            [*prompt.tolist(), *response.tolist()]
            for prompt, response in zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)
        ]
        self.actor_rollout_wg.trained.append(sorted(tokens))
        self.death.passes("trained")
        return batch

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        self.death.passes("saved")

    def _compute_metrics(self, batch: KVBatchMeta, metrics: Any, *args: Any, **kwargs: Any) -> None:
        assert all(isinstance(value, int | float) for name, value in metrics.items() if name.startswith("replaybuf"))

    def _start_profiling(self) -> None: ...

    def _stop_profiling(self) -> None: ...

    def _shutdown_dump_executor(self) -> None: ...


def train(settings: dict[str, Any]) -> None:
    """Run verl's loop to its end, from the newest checkpoint on, on the queue of a Ray that runs."""
    with Path(settings["folder"], "log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(settings.get("timeout_s", 60), exit=True)
    death = Death(settings.get("die_at"))
    for call, phase in {"attach": "attached", "append": "appended", "checkpoint": "recorded", "ack": "acked"}.items():
        death.watch(call, phase)
    ray.init(address=settings["ray"], log_to_driver=False, logging_level="error")
    tq.init()
    for partition, keys in (tq.kv_list() or {}).items():  # those of a training that was killed
        if keys:
            tq.kv_clear(keys=list(keys), partition_id=partition)
    training = Training(config_of(settings), death)
    training.init()
    training.fit(training.engines)
    Path(settings["folder"], "trained.json").write_text(json.dumps(training.actor_rollout_wg.trained))
    os._exit(0)  # the thread of the engines may be in a call

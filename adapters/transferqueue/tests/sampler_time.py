"""Seconds of verl's `sample` from a run, beside verl's own sampler on the same queue, in turns.

    PYTHONPATH=. .venv-adapters/transferqueue/bin/python adapters/transferqueue/tests/sampler_time.py --pairs 5

A step begins with its groups in the queue, and ends when the tensors of the batch are read. So the way to the run and
back, which verl overlaps with generation in part, is counted in full.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from starting_ray import start_ray
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl_training import config_of

from replaybuf.client import Client
from replaybuf.wire.group import Group
from tests.conftest import ServeProcess
from tests.measured_groups import CONFIG, GROUPS, PROMPT_TOKENS, SIZE, TOKENS, compare, large_group

STEPS, WARM_UP = 6, 2
READ = ["uid", "input_ids", "responses", "response_mask", "position_ids", "rollout_log_probs", "rm_scores"]


def put_group(uid: str, group: Group) -> None:
    """Put a finished prompt, as verl's agent loops do."""
    prompts = torch.tensor(group.prompt_ids, dtype=torch.int64)[:PROMPT_TOKENS]
    rows, tags = [], []
    for session in range(SIZE):
        own = slice(session * TOKENS, (session + 1) * TOKENS)
        responses, mask = torch.tensor(group.completion_ids[own], dtype=torch.int64), torch.ones(TOKENS).long()
        rm_scores = torch.zeros(TOKENS)
        rm_scores[-1] = float(group.rewards[session])
        length = PROMPT_TOKENS + TOKENS
        rows.append(
            {
                "prompts": prompts,
                "responses": responses,
                "response_mask": mask,
                "loss_mask": mask,
                "input_ids": torch.cat([prompts, responses]),
                "position_ids": torch.arange(length),
                "rollout_log_probs": torch.tensor(group.inference_logprobs[own]),
                "rm_scores": rm_scores,
                "uid": uid,
                "raw_prompt": [{"role": "user", "content": "What is the answer?"}],
                "multi_modal_inputs": {},
            }
        )
        sizes = {"prompt_len": PROMPT_TOKENS, "response_len": TOKENS, "seq_len": length}
        tags.append(sizes | {"status": "success", "global_steps": 1, "min_global_steps": 0, "max_global_steps": 0})
    keys = [f"{uid}_{session}_0" for session in range(SIZE)]
    transfer_queue.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags)
    tag = {"is_prompt": True, "status": "finished", "global_steps": 1}
    transfer_queue.kv_batch_put(keys=[uid], partition_id="train", tags=[tag])


def seconds_per_step(sampler: Any, name: str, groups: list[Group]) -> float:
    """Return the mean time from groups in the queue to the tensors of a batch."""
    taken_s = 0.0
    for step in range(STEPS):
        for number, group in enumerate(groups):
            put_group(f"{name}-{step}-{number}", group)
        began_s = time.perf_counter()
        batch, _ = sampler.sample(step + 1, "train", GROUPS)
        transfer_queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=READ)
        taken_s += (time.perf_counter() - began_s) * (step >= WARM_UP)
        transfer_queue.kv_clear(keys=batch.keys, partition_id="train")
    return taken_s / (STEPS - WARM_UP)


def main() -> None:
    """Start a service and a queue in memory, and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    start_ray(2)
    config = {"controller": {"polling_mode": True}, "backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
    transfer_queue.init(OmegaConf.create(config))
    groups = [large_group(number) for number in range(GROUPS)]
    with tempfile.TemporaryDirectory() as scratch:
        service = ServeProcess(Path(scratch, "data")).start()

        def made(pair: int, path: str | None) -> Any:
            settings = {"folder": scratch, "steps": STEPS, "sampler": {"url": service.url, "run": f"run-{pair}"}}
            verl = config_of(settings)
            verl.trainer.v1.sampler.custom_sampler.path = path
            with Client(service.url, f"run-{pair}") as client:
                client.put_run(CONFIG, if_absent=True)
            trainer = SimpleNamespace(
                config=verl, trainer_mode="colocate_async", _add_prompts_to_generate=lambda _: None
            )
            trainer._resolve_filter_groups_metric = lambda: None
            return PPOTrainer._build_replay_buffer(trainer)

        ours = "pkg://replaybuf_transferqueue.sampler"
        try:
            compare(
                pairs,
                {
                    "run": lambda pair: seconds_per_step(made(pair, ours), f"run{pair}", groups),
                    "verl's own sampler": lambda pair: seconds_per_step(made(pair, None), f"own{pair}", groups),
                },
            )
        finally:
            service.end()
            transfer_queue.close()
            ray.shutdown()


if __name__ == "__main__":
    main()

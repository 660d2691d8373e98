"""Train with TRL's AsyncGRPOTrainer on the groups of `replaybuf generate`; start it again and it resumes.

python examples/trl/train.py --model models/policy --engine http://127.0.0.1:8001
"""

from __future__ import annotations

import argparse
import os

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from replaybuf import Client
from replaybuf_trl import (
    ReplaybufCallback,
    ReplaybufRolloutWorker,
    ReplaybufWeightTransfer,
    allow_cpu,
    newest_checkpoint,
)

GROUPS, GROUP_SIZE = 16, 8


def main() -> None:
    """Create the run, unless it exists, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8900")
    parser.add_argument("--run", default="trl")
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", action="append", default=[])
    parser.add_argument("--output", default="trl-out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if options.cpu:
        allow_cpu()
    with Client(options.url, options.run) as client:
        batch = {"groups_per_batch": GROUPS, "tokens_per_batch": None, "seq_len": 128}
        client.put_run({"batch": batch, "group_size": GROUP_SIZE, "max_steps": options.steps}, if_absent=True)
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # of torchrun
    worker = ReplaybufRolloutWorker(options.url, options.run)
    trainer = AsyncGRPOTrainer(
        model=options.model,
        args=AsyncGRPOConfig(
            options.output,
            token_budget=0,  # a step of TRL is then a batch of the run: all rollouts of its groups
            per_device_train_batch_size=GROUPS * GROUP_SIZE // options.accumulation // processes,
            gradient_accumulation_steps=options.accumulation,
            max_steps=options.steps,
            save_steps=options.save_steps,
            save_total_limit=2,
            learning_rate=options.learning_rate,
            warmup_steps=10,  # without it and at 3e-4 the small model of the tests lost accuracy
            gradient_checkpointing=False,
            bf16=not options.cpu,
            use_cpu=options.cpu,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["not read: the prompts are those of the generator"]}),
        rollout_worker=worker,
        weight_transfer=ReplaybufWeightTransfer(
            worker, options.model, options.engine, weights_dir=f"{options.output}/weights"
        ),
        callbacks=[ReplaybufCallback(worker)],
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(options.output))
    end(trainer)


def end(trainer: AsyncGRPOTrainer) -> None:
    """End torch.distributed, whose threads may abort the process at its exit.

    A thread of TRL holds the trainer, and with it DDP and its process group, until the process ends.
    """
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()

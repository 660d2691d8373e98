"""Train with the Hugging Face Trainer on the groups of `replaybuf generate`; start it again and it resumes.

torchrun --nproc-per-node 2 examples/hf/train.py --model models/policy --engine http://127.0.0.1:8001
"""

from __future__ import annotations

import argparse
from pathlib import Path

import httpx
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from replaybuf import Client
from replaybuf_hf import ReplaybufTrainerMixin, RunOptions, newest_checkpoint


class PolicyTrainer(ReplaybufTrainerMixin, Trainer):
    """Writes a folder per version, which the engines load."""

    engines: tuple[str, ...] = ()

    def publish_weights(self, version: int) -> str:
        """Write the weights on all ranks, load them on the first one."""
        folder = Path(self.args.output_dir, "weights", str(version)).resolve()
        self.save_model(str(folder))
        if self.is_world_process_zero():
            for engine in self.engines:
                call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                httpx.post(f"{engine}/collective_rpc", json=call, timeout=300).raise_for_status()
                label = {"new_version": str(version)}
                httpx.post(f"{engine}/update_weight_version", json=label, timeout=60).raise_for_status()
        return folder.as_uri()


def main() -> None:
    """Create the run, unless it exists, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8900")
    parser.add_argument("--run", default="hf")
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", action="append", default=[])
    parser.add_argument("--output", default="hf-out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    with Client(options.url, options.run) as client:
        client.put_run({"batch": {"groups_per_batch": 16, "seq_len": 2048}, "max_steps": options.steps}, if_absent=True)
    args = TrainingArguments(
        options.output,
        max_steps=options.steps,
        save_steps=options.save_steps,
        save_total_limit=2,
        learning_rate=options.learning_rate,
        logging_steps=1,
        bf16=not options.cpu,
        use_cpu=options.cpu,
        report_to="none",
    )
    trainer = PolicyTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
        args=args,
        processing_class=AutoTokenizer.from_pretrained(options.model),
        replaybuf=RunOptions(url=options.url, run=options.run),
    )
    trainer.engines = tuple(options.engine)
    trainer.train(resume_from_checkpoint=newest_checkpoint(options.output))
    trainer.accelerator.end_training()  # leaves torch.distributed, which warns at the exit otherwise


if __name__ == "__main__":
    main()

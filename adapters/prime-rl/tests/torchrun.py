"""Stand-in for `torchrun ... -m prime_rl.trainer.rl.train @ FILE --output-dir DIR`: the trainer without a GPU.

KILL_AFTER=N in the environment kills it after N steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tomllib
from pathlib import Path

from prime_source import SOURCE, load
from prime_trainer import RANKS, PrimeTrainer


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", type=int, choices=[RANKS])
    parser.add_argument("-m", dest="module", choices=["prime_rl.trainer.rl.train"])
    parser.add_argument("at", choices=["@"])
    parser.add_argument("config", type=Path)
    parser.add_argument("--output-dir", type=Path)
    options = parser.parse_args()
    config, model = tomllib.loads(options.config.read_text()), options.output_dir / "model.json"
    resumed = json.loads(model.read_text()) if model.exists() and "resume" in config else []
    steps = [[tuple(row) for row in rows] for rows in resumed]
    trainer = PrimeTrainer(load(SOURCE.checkout()), options.output_dir, len(steps), steps)
    while len(trainer.model) < config["max_steps"]:
        trainer.train(lambda: None)
        if len(trainer.model) % config["ckpt"]["interval"] == 0:
            model.write_text(json.dumps(trainer.checkpoint()[1]))
        if len(trainer.model) == int(os.environ.get("KILL_AFTER", "0")):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()

"""Run a script that trains with TRL, and record what TRL trained: `python recording.py SCRIPT ARGUMENT...`.

A line per micro-batch and per received body is appended to the file that the variable TRAINED names.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from trl.experimental.async_grpo import async_grpo_trainer

from replaybuf.client import Client


def digest_of(targets: list[int], logprobs: list[float], advantage: float) -> str:
    """Digest of one trained rollout: sampled tokens, their logprobs as float32, advantage as float32."""
    numbers = torch.tensor([*logprobs, advantage], dtype=torch.float32).numpy().tobytes()
    return hashlib.sha256(repr(targets).encode() + numbers).hexdigest()[:16]


def trained_rollouts(inputs: dict[str, Any]) -> list[str]:
    """Digests of the rollouts whose loss terms are in the row of TRL's inputs."""
    ids_mask, selected = inputs["attention_mask"].bool(), inputs["token_index"] >= 0
    targets = inputs["shift_labels"][ids_mask][inputs["token_index"][selected]]
    logprobs, advantages = inputs["old_log_probs"][selected], inputs["advantages"][selected]
    segments = inputs["segment_id"][selected]
    digests = []
    for number in segments.unique().tolist():
        of = segments == number
        (advantage,) = set(advantages[of].tolist())
        digests.append(digest_of(targets[of].tolist(), logprobs[of].tolist(), advantage))
    return digests


def append(path: Path, **line: Any) -> None:
    """Append a line of JSON."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def threads() -> list[str]:
    """Names of the threads of this process, also of those that Python does not know."""
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def record(path: Path) -> None:
    """Append what TRL trains, and the bodies it gets, to a file."""
    compute_loss = async_grpo_trainer.AsyncGRPOTrainer.compute_loss
    fetch_batch = Client.fetch_batch

    def recorded_loss(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(self, model, inputs, *args, **kwargs)
        append(path, step=self.state.global_step, trained=trained_rollouts(inputs), loss=float(loss), pid=os.getpid())
        return loss

    def recorded_fetch(self: Client, step: int, *args: Any, **kwargs: Any) -> Any:
        body = fetch_batch(self, step, *args, **kwargs)
        if isinstance(body, bytes):
            append(path, step=step, body=hashlib.sha256(body).hexdigest())
        return body

    async_grpo_trainer.AsyncGRPOTrainer.compute_loss = recorded_loss
    Client.fetch_batch = recorded_fetch


if __name__ == "__main__":
    torch.set_num_threads(1)
    trained = Path(os.environ["TRAINED"])
    record(trained)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    append(trained, threads_at_the_end=threads())

"""Run a script that trains with TRL on a CPU, and record what TRL trained: `python on_cpu.py SCRIPT ARGUMENT...`.

TRL 1.16 needs a GPU in two places. The two patches are for tests only:

- `get_peak_flops_per_device` asks CUDA for the name of the device
- `tree_attention` uses FlashAttention 3; here is the same attention in torch

With the variable TRAINED, a line per micro-batch and per received body is appended to that file.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing

from replaybuf.client import Client


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    _max_q: int,
    _max_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Attend from the last queries of each segment to its path: query [T, H, D], key and value [K, G, D]."""
    assert causal and window_size == (-1, -1)
    query, key, value = (part.transpose(0, 1) for part in (query, key, value))
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outputs = []
    for number in range(len(ends_q) - 1):
        q = query[:, ends_q[number] : ends_q[number + 1]]
        k, v = (part[:, ends_k[number] : ends_k[number + 1]] for part in (key, value))
        before = k.shape[1] - q.shape[1]
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(before)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(attended[0])
    return torch.cat(outputs, dim=1).transpose(0, 1)


def patch() -> None:
    """Let TRL train on a CPU."""
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)


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
    found = []
    for number in segments.unique().tolist():
        of = segments == number
        (advantage,) = set(advantages[of].tolist())
        found.append(digest_of(targets[of].tolist(), logprobs[of].tolist(), advantage))
    return found


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
    patch()
    torch.set_num_threads(1)
    if path := os.environ.get("TRAINED"):
        record(Path(path))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    if path:
        append(Path(path), threads_at_the_end=threads())

"""A training of four groups of two rollouts per step, on groups that a test appends."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from recording import digest_of, trained_rollouts
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from replaybuf_trl import ReplaybufCallback, ReplaybufRolloutWorker, ReplaybufWeightTransfer
from tests.conftest import RunClient, group

GROUPS, SIZE, STEPS = 4, 2, 6
CONFIG: dict[str, Any] = {
    "batch": {"groups_per_batch": GROUPS, "tokens_per_batch": None, "seq_len": 64},
    "group_size": SIZE,
    "max_steps": STEPS,
    "strategy": {"name": "one-step-off-policy", "options": {"max_staleness": STEPS}},
}


Groups = dict[str, dict[str, Any]]
"""Groups as JSON, by name."""


def fill(
    run: RunClient,
    steps: int = STEPS,
    groups: int = GROUPS,
    size: int = SIZE,
    spread: float = 0.05,
    **changes: Any,
) -> Groups:
    """Create the run and append groups for so many steps; each has its own tokens and logprobs. Return them."""
    response = run.put(**CONFIG | changes)
    assert response.status_code == 201, response.text
    made_groups: Groups = {}
    for number in range(steps * groups):
        rng = np.random.default_rng(number)
        made = group(f"g{number}", rollouts=size, tokens=int(rng.integers(6, 20)))
        for rollout in made["rollouts"]:
            length = len(rollout["completion_ids"])
            rollout["completion_ids"] = rng.integers(3, 98, length).tolist()
            rollout["inference_logprobs"] = (-4.6 + rng.normal(0, spread, length)).tolist()
            rollout["completion_mask"] = [1, *rng.integers(0, 2, length - 1).tolist()]
        assert run.append(made)[0]["status"] == "stored"
        made_groups[f"g{number}"] = made
    return made_groups


def make_trainer(
    run: RunClient,
    model: Path,
    out: Path,
    *,
    callback: bool = True,
    worker: Any = None,
    weight_transfer: Any = None,
    peft_config: Any = None,
    **args: Any,
) -> Recorded:
    """Make a trainer on the run, with its worker and weight transfer unless others are given."""
    worker = worker or ReplaybufRolloutWorker(str(run.http.base_url), run.run, service_timeout_s=30.0)
    weight_transfer = weight_transfer or ReplaybufWeightTransfer(worker, str(model), weights_dir=out / "weights")
    keep = args.pop("keep", 50)
    defaults = {
        "token_budget": 0,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "save_steps": 2,
        "learning_rate": 1e-3,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return Recorded(
        model=str(model),
        args=AsyncGRPOConfig(str(out), **defaults | args),
        train_dataset=Dataset.from_dict({"prompt": ["not read"]}),
        rollout_worker=worker,
        weight_transfer=weight_transfer,
        callbacks=[ReplaybufCallback(worker, keep)] if callback else [],
        peft_config=peft_config,
    )


class Recorded(AsyncGRPOTrainer):
    """Records what it trains: `trained[step]` counts the digests of rollouts."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.trained: dict[int, Counter[str]] = {}
        self.staleness: dict[int, float] = {}

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.trained.setdefault(self.state.global_step, Counter()).update(trained_rollouts(inputs))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "sample/staleness_max" in logs:
            self.staleness[self.state.global_step - 1] = logs["sample/staleness_max"]


class Nowhere:
    """A weight transfer of somebody else, who publishes nothing."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...
    def send_weights(self, iterator: Iterator[Any]) -> None:
        for _ in iterator:
            pass


def of_ledger(run: RunClient, step: int, groups: Groups) -> Counter[str]:
    """What the ledger says that a step trained, in the digests of `Recorded`."""
    response = run.get(f"batches/{step}/record")
    assert response.status_code == 200, response.text
    names = [used["group_id"] for used in response.json()["groups"]]
    return Counter(map(rollout_digest, (made for name in names for made in with_advantages(groups[name]["rollouts"]))))


def with_advantages(rollouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rollouts of a group with the advantages of GRPO, unless they have their own."""
    rewards = np.array([rollout["reward"] for rollout in rollouts])
    computed = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
    own = [rollout.get("advantage") for rollout in rollouts]
    return [
        rollout | {"advantage": advantage if own_value is None else own_value}
        for rollout, advantage, own_value in zip(rollouts, computed, own, strict=True)
    ]


def rollout_digest(rollout: dict[str, Any]) -> str:
    """Digest of a rollout, from its JSON."""
    ids, logprobs = rollout["completion_ids"], rollout["inference_logprobs"]
    sampled = [place for place, mask_bit in enumerate(rollout.get("completion_mask") or [1] * len(ids)) if mask_bit]
    return digest_of([ids[place] for place in sampled], [logprobs[place] for place in sampled], rollout["advantage"])


def weights_digest(folder: Path) -> str:
    """Digest of a weights file."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()

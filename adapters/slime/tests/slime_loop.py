"""A training with slime's loop and rollout manager: `slime_loop.py SOURCE ARGUMENTS`, where slime trains on GPUs.

The order of calls is that of slime's `train.py` and `train_async.py`. The model is the list of the groups that trained
it, per step. A checkpoint is that list, written as slime writes one: before `save` of the data source. `kill_at` in the
arguments, such as "acked:2", kills this process with SIGKILL there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_source import load

from replaybuf.client import Client

PHASES = ("attached", "fetched", "trained", "model_saved", "acked", "published", "recorded")


class Death:
    """Kills this process at one phase of one step."""

    def __init__(self, at: str | None) -> None:
        self.phase, _, step = (at or "none:0").partition(":")
        self.step = int(step)

    def passes(self, phase: str, step: int) -> None:
        """Die here, if it is the place."""
        if (phase, step) == (self.phase, self.step):
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, call: str, phase: str, steps_off: int) -> None:
        """Die after a call of the client; its first argument is the step, or a number of steps."""
        original = getattr(Client, call)

        def watched(client: Client, number: int, *args: Any, **kwargs: Any) -> Any:
            answer = original(client, number, *args, **kwargs)
            self.passes(phase, number + steps_off)
            return answer

        setattr(Client, call, watched)


def manager_of(source: Path, settings: dict[str, Any]) -> Any:
    """Return slime's rollout manager with our function and data source, without engines."""
    arguments = {
        "advantage_estimator": "grpo",
        "balance_by_flops": False,
        "balance_data": False,
        "ci_test": False,
        "colocate": True,
        "custom_rollout_log_function_path": None,
        "debug_rollout_only": False,
        "global_batch_size": settings["rollout_batch_size"] * settings["n_samples_per_prompt"],
        "grpo_std_normalization": True,
        "load": settings["save"],
        "load_debug_rollout_data": None,
        "log_passrate": False,
        "log_reward_category": None,
        "micro_batch_size": 1,
        "release_train": False,
        "reward_key": None,
        "rewards_normalization": True,
        "rollout_global_dataset": True,
        "rollout_num_gpus": 1,
        "save_debug_rollout_data": None,
        "save_interval": None,
        "sglang_speculative_algorithm": None,
        "update_weights_interval": 1,
        "use_dynamic_batch_size": False,
        "use_fault_tolerance": False,
        "use_rollout_logprobs": True,
        "use_tis": False,
        "wandb_always_use_train_step": False,
    }
    kind = load(source)
    manager = object.__new__(kind)
    manager.args = SimpleNamespace(**arguments | settings)
    manager.train_parallel_config = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    manager._health_monitors = []
    manager.custom_reward_post_process_func = manager.custom_convert_samples_to_train_data_func = None
    from slime.utils.misc import load_function

    manager.data_source = load_function("replaybuf_slime.ReplaybufDataSource")(manager.args)
    manager.generate_rollout = load_function("replaybuf_slime.generate_rollout")
    return manager


def train(source: Path, settings: dict[str, Any]) -> None:
    """Run slime's loop to its end, from the newest checkpoint on."""
    death = Death(settings.pop("kill_at", None))
    death.watch("ack", "acked", 0)
    death.watch("publish_policy", "published", -1)
    death.watch("checkpoint", "recorded", -1)
    folder, interval = Path(settings["save"]), settings["save_interval"]
    manager = manager_of(source, settings)
    args, ahead = manager.args, manager.data_source.settings.steps_ahead
    saved = sorted(int(path.stem) for path in folder.glob("*.model"))
    start = saved[-1] + 1 if saved else 0
    model = json.loads((folder / f"{saved[-1]}.model").read_text()) if saved else []
    manager.load(start - 1)
    death.passes("attached", start)
    following = manager.generate(start) if ahead else None
    for rollout_id in range(start, args.num_rollout):
        ranks = following if ahead else manager.generate(rollout_id)
        death.passes("fetched", rollout_id)
        more = ahead and rollout_id + 1 < args.num_rollout
        following = manager.generate(rollout_id + 1) if more else None
        model.append(sorted(tokens for rank in ranks for tokens in map(list, rank.inner["tokens"])))
        death.passes("trained", rollout_id)
        if (rollout_id + 1) % interval == 0 or rollout_id == args.num_rollout - 1:
            scratch = folder / "scratch"
            scratch.write_text(json.dumps([[list(map(int, tokens)) for tokens in step] for step in model]))
            scratch.rename(folder / f"{rollout_id}.model")
            death.passes("model_saved", rollout_id)
            manager.save(rollout_id)
    manager.data_source.close()


if __name__ == "__main__":
    train(Path(sys.argv[1]), json.loads(sys.argv[2]))

"""Settings of the adapter from slime's arguments and the environment, and their check against the run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from importlib.metadata import PackageNotFoundError
from typing import Any

from replaybuf.client.peers import check_run_settings, misfit, warn_if_untested
from replaybuf.wire.answer.run_status import RunStatus

TESTED = ("0.3.1", "0.4")
DEFAULT_URL = "http://127.0.0.1:8900"


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Where the run is, and how slime's loop walks through it.

    `steps_ahead`: 0 for `train.py`; 1 for `train_async.py`, which asks for a rollout before the one before is trained.
    `deadline_s`: how long one rollout may wait for its batch, None = without end.
    """

    url: str
    run: str
    token: str | None
    steps_ahead: int
    deadline_s: float | None

    @classmethod
    def of(cls, args: Any) -> Settings:
        """Read `replaybuf_*` of slime's arguments, else `REPLAYBUF_*` of the environment. Raises `Invalid`."""
        with contextlib.suppress(PackageNotFoundError):  # slime may run from a checkout
            warn_if_untested("replaybuf-slime", "slime", *TESTED)
        if not args.rollout_global_dataset:
            raise misfit("--disable-rollout-global-dataset", "set", "not set: else slime calls neither load nor save")
        steps_ahead = _setting(args, "steps_ahead", 0 if args.colocate else None)
        if steps_ahead is None or int(steps_ahead) not in (0, 1):
            raise misfit("replaybuf_steps_ahead", steps_ahead, "0 for train.py, 1 for train_async.py")
        run, deadline_s = _setting(args, "run", None), _setting(args, "deadline_s", None)
        if run is None:
            raise misfit("replaybuf_run", None, "the name of a run, by --custom-config-path or REPLAYBUF_RUN")
        return cls(
            url=str(_setting(args, "url", DEFAULT_URL)),
            run=str(run),
            token=os.environ.get("REPLAYBUF_TOKEN"),
            steps_ahead=int(steps_ahead),
            deadline_s=None if deadline_s is None else float(deadline_s),
        )


def check_run(args: Any, settings: Settings, status: RunStatus) -> None:
    """Raise `Invalid` where batches of the run would not fit slime's rollouts.

    Warns if slime's loss would not use the logprobs of the engines that stale groups come with.
    """
    facts, batch, interval = status.facts(), status.config["batch"], _update_interval(args, settings)
    for name in ("save_interval", "num_rollout"):
        steps = getattr(args, name)
        if steps is not None and steps % interval:
            why = "a checkpoint between two updates of the weights cannot be resumed"
            raise misfit(
                f"--{name.replace('_', '-')}", steps, f"a multiple of --update-weights-interval {interval}; {why}"
            )
    if facts.strategy.name != "on-policy" and not (args.use_rollout_logprobs or args.use_tis):
        warnings.warn(
            f"strategy {facts.strategy.name} of run {settings.run} serves groups of older policies, and slime's loss "
            "does not use the logprobs of their engines; add --use-rollout-logprobs or --use-tis",
            stacklevel=3,
        )
    needed = {
        "adapters": (sorted(facts.adapters), [], "slime trains one policy"),
        "group_size": (facts.group_size, args.n_samples_per_prompt, "--n-samples-per-prompt"),
        "min_group_size": (facts.min_group_size, None, "slime needs whole groups"),
        "batch.groups_per_batch": (batch["groups_per_batch"], args.rollout_batch_size, "--rollout-batch-size"),
        "batch.tokens_per_batch": (batch["tokens_per_batch"], None, "a budget would make batches of fewer groups"),
        "batch.timeout_s": (batch["timeout_s"], None, "a time limit would make batches of fewer groups"),
        "steps_per_publish": (facts.steps_per_publish, interval, "--update-weights-interval"),
    }
    check_run_settings(settings.run, needed)


def _update_interval(args: Any, settings: Settings) -> int:
    """Return the rollouts between two updates of the weights; `train.py` and --release-train update after each one."""
    return 1 if args.release_train or not settings.steps_ahead else int(args.update_weights_interval)


def _setting(args: Any, name: str, default: Any) -> Any:
    value = getattr(args, f"replaybuf_{name}", None)
    return os.environ.get(f"REPLAYBUF_{name.upper()}", default) if value is None else value

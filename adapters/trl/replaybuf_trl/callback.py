"""The callback: attaches at train begin, acks each step, reports each checkpoint, and ends with the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from replaybuf.errors import Invalid, counted
from replaybuf.files import sync
from replaybuf_trainer.folders import sync_folder
from replaybuf_trl.layout import check_arguments, check_attention, check_version
from replaybuf_trl.worker import ReplaybufRolloutWorker


class ReplaybufCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers is not typed
    """Reports the training of TRL to the run of `worker`. TRL calls it before it sends weights, at train begin too.

    `keep`: how many newest checkpoints stay resumable; None = `save_total_limit`, or 1 without one.
    """

    def __init__(self, worker: ReplaybufRolloutWorker, keep: int | None = None) -> None:
        self._worker = worker
        self._keep = keep

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint says of its run."""
        return {"args": {}, "attributes": {"run": self._worker.run}}

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the arguments, before TRL replaces those that are not set."""
        check_version()
        check_attention()
        check_arguments(args)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Attach at the step of the loaded checkpoint."""
        if not state.is_world_process_zero:
            return
        self._check_checkpoint(state)
        if state.global_step >= args.max_steps:
            self._worker.settle(state.global_step, self._kept(args))
            raise Invalid(
                f"the checkpoint has {counted(state.global_step, 'step')} and max_steps is {args.max_steps}: "
                "nothing is left to train. Raise max_steps, or do not start",
                name="max_steps",
                value=args.max_steps,
                bound=state.global_step + 1,
            )
        self._worker.attach(args, state.global_step, self._kept(args))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ack the step; end the training behind the last one of the run."""
        ended = [False]
        if state.is_world_process_zero:
            self._worker.ack(state.global_step)
            ended = [self._worker.ended_at == state.global_step]
        if broadcast_object_list(ended)[0]:
            control.should_training_stop = True
            # transformers saves behind max_steps only: without this the last steps would be in no checkpoint.
            control.should_save |= args.save_strategy == SaveStrategy.STEPS

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the checkpoint once it is on disk."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            sync_folder(folder)
            sync(folder.parent)
            self._worker.checkpoint(state.global_step)

    def _kept(self, args: TrainingArguments) -> int:
        return self._keep or args.save_total_limit or 1

    def _check_checkpoint(self, state: TrainerState) -> None:
        """Raise `Invalid` for a checkpoint of another run."""
        if not state.global_step:
            return
        saved: Any = state.stateful_callbacks.get(type(self).__name__) or {}
        run = saved.get("attributes", {}).get("run") if isinstance(saved, dict) else None
        if run != self._worker.run:
            raise Invalid(
                f"the checkpoint of step {state.global_step} is of run {run}, not {self._worker.run}; resume from a "
                "checkpoint of this run, or start without one",
                name="resume_from_checkpoint",
                value=run,
                bound=self._worker.run,
            )

"""The rollout function of slime: the batch of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replaybuf.errors import Invalid
from replaybuf_slime.data_source import ReplaybufDataSource
from replaybuf_slime.samples import samples_of

if TYPE_CHECKING:
    from slime.rollout.base_types import RolloutFnTrainOutput

_EVALUATION = "--eval-function-path is this function; set it to slime.rollout.sglang_rollout.generate_rollout"


def generate_rollout(
    args: Any, rollout_id: int, data_source: ReplaybufDataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Return the batch of step `rollout_id`: `--rollout-function-path replaybuf_slime.generate_rollout`.

    Raises `Invalid` for an evaluation and for another data source.
    """
    from slime.rollout.base_types import RolloutFnTrainOutput

    if evaluation:
        raise Invalid(_EVALUATION, name="eval_function_path", value="replaybuf_slime.generate_rollout")
    if not isinstance(data_source, ReplaybufDataSource):
        source, needed = type(data_source).__name__, "replaybuf_slime.ReplaybufDataSource"
        raise Invalid(f"--data-source-path is {source}; needed: {needed}", name="data_source_path", value=source)
    batch = data_source.fetch(rollout_id)
    return RolloutFnTrainOutput(samples_of(batch, args.reward_key), data_source.metrics(batch))

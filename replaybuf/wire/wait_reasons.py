"""Reasons why a trainer or a producer waits: who has to act, what each means, and what a person can do."""

from __future__ import annotations

from typing import Literal, NamedTuple


class WaitReason(NamedTuple):
    """Who has to act, and two short texts for terminal and console."""

    blocked_on: Literal["nothing", "operator", "trainer", "producers"]
    meaning: str
    action: str

    def __str__(self) -> str:
        return f"{self.meaning} {self.action}"


WAIT_REASONS = {
    "finished": WaitReason(
        "nothing", "The run is finished.", "You can leave it as it is. To free its memory and its name, delete it."
    ),
    "paused": WaitReason("operator", "The run is paused.", "Read the reason, then resume the run."),
    "awaiting_ack": WaitReason(
        "trainer",
        "The trainer has a batch and did not ack it yet.",
        "Check that the trainer is alive and how long its step takes.",
    ),
    "awaiting_publication": WaitReason(
        "trainer",
        "The trainer did not publish the version that the next batch needs.",
        "Check that the trainer loads its weights into the engines and then publishes.",
    ),
    "rate_limited": WaitReason(
        "producers", "The buffer is full.", "The trainer must take batches, or you raise the limits of the run."
    ),
    "all_stale": WaitReason(
        "producers",
        "Every group became too stale.",
        "Producers sample with old weights. Check their engines, or allow more staleness (max_staleness).",
    ),
    "reuse_exhausted": WaitReason(
        "producers",
        "Every group was used as often as allowed.",
        "Producers must store new groups, or you allow more uses.",
    ),
    "no_producers": WaitReason(
        "producers", "No producer asks for tickets.", "Start a producer: replaybuf generate, or your own."
    ),
    "no_groups": WaitReason(
        "producers",
        "No usable group is stored yet.",
        "Producers work on their first groups. Look at producers and failed prompts if it lasts.",
    ),
    "too_few_groups": WaitReason(
        "producers",
        "The batch needs more groups.",
        "Producers are slower than the trainer, or their groups are dropped.",
    ),
    "too_few_tokens": WaitReason(
        "producers",
        "The batch needs more tokens.",
        "Producers are slower than the trainer, or their groups are dropped.",
    ),
    "awaiting_columns": WaitReason(
        "producers",
        "Groups lack columns that a later stage adds.",
        "Check that the stage runs: replaybuf stage.",
    ),
}
"""From far to near a batch. The first one that holds is reported; with adapters that of the one nearest to a batch."""
REASONS = tuple(WAIT_REASONS)

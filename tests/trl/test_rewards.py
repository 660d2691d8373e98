"""Rewards by functions with TRL's signature: those of TRL's own trainer on the same completions."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from replaybuf.client.producers import call_rewards

PROMPTS, TEXTS, IDS = ["p", "p", "p"], ["a", "bb", "ccc"], [[1], [2, 2], [3, 3, 3]]
ANSWERS = ["a", "x", "ccc"]


def length(completion_ids: list[list[int]], log_metric: Any, **_: Any) -> list[float]:
    log_metric("longest", max(map(len, completion_ids)))
    return [len(ids) / 7 for ids in completion_ids]


async def right(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    return [1.0 if text == wanted else None for text, wanted in zip(completions, answer, strict=True)]


def test_rewards_are_those_of_trls_trainer() -> None:
    """Value by function, None as NaN there, and their weighted sum without NaN."""
    weights = [0.5, 2.0]
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather=lambda tensor: tensor, is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        reward_funcs=[length, right],
        reward_processing_classes=[None, None],
        reward_func_names=["length", "right"],
        state=SimpleNamespace(global_step=0),
        environments=None,
        _log_completion_extra=lambda *_: None,
        _log_metric=lambda *_: None,
        _metrics=defaultdict(lambda: defaultdict(list)),
        model=SimpleNamespace(training=True),
        async_loop=_loop(),
    )
    inputs = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    theirs = GRPOTrainer._calculate_rewards(trainer, inputs, PROMPTS, TEXTS, IDS)
    summed = (theirs * torch.tensor(weights)).nansum(dim=1).tolist()
    ours = call_rewards(
        [length, right], prompts=PROMPTS, completions=TEXTS, completion_ids=IDS, weights=weights, answer=ANSWERS
    )
    assert [scored.reward for scored in ours] == pytest.approx(summed, rel=1e-6)
    for scored, row in zip(ours, theirs.tolist(), strict=True):
        assert list(scored.rewards.values()) == pytest.approx([0.0 if math.isnan(x) else x for x in row], rel=1e-6)


def _loop() -> Any:
    """Return a running event loop in a thread, as the trainer has one."""
    import asyncio
    import threading

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop

"""A short supervised warm start, so that reinforcement learning starts with a policy that is sometimes right.

Held-out problems are neither in the warm start nor among the training prompts. The warm start ends when the sampled
accuracy (T = 1) on separate check problems reaches the target.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replaybuf.errors import Invalid
from replaybuf_trainer.engine.sampler import Row, Wave
from replaybuf_trainer.folders import whole_folder
from replaybuf_trainer.models.tiny import character_tokenizer, new_model
from replaybuf_trainer.problems import Problem, Problems, collect_problems

BATCH = 128
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 20
CHECK_EVERY_STEPS = 10
MAX_STEPS = 3000
MAX_NEW_TOKENS = 8


def make(folder: Path, task: str, seed: int, target_accuracy: float) -> None:
    """Create model, tokenizer, training prompts and held-out problems in `folder`, complete or not at all.

    Raises `Invalid` for an unknown task, and if the accuracy stays below the target for `MAX_STEPS`.
    """
    problems = collect_problems(task, seed)
    counts = f"{len(problems.train)} to train on, {len(problems.held_out)} held out, {len(problems.check)} for checks"
    print(f"problems of {task}: {counts}", flush=True)
    tokenizer, model = character_tokenizer(), new_model(seed)
    print(f"model: Qwen3, {sum(p.numel() for p in model.parameters()):,} parameters, random weights", flush=True)
    warm_up(model, tokenizer, problems, seed, target_accuracy)
    with whole_folder(folder) as scratch:
        model.save_pretrained(scratch, safe_serialization=True)
        tokenizer.save_pretrained(scratch)
        _write_prompts(scratch / "prompts.jsonl", problems.train, "train", task)
        _write_prompts(scratch / "held_out.jsonl", problems.held_out, "held_out", task)
    print(f"written: {folder}, with prompts.jsonl and held_out.jsonl", flush=True)


def warm_up(model: Any, tokenizer: Any, problems: Problems, seed: int, target_accuracy: float) -> None:
    """Train on prompts and answers until the sampled accuracy on the check problems reaches the target."""
    print(f"supervised warm start until {target_accuracy:.0%} sampled accuracy (this is not reinforcement learning)")
    began = time.monotonic()
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    accuracy = 0.0
    for step in range(MAX_STEPS):
        chosen = [problems.train[i] for i in rng.integers(len(problems.train), size=BATCH)]
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS)
        loss = _supervised_loss(model, tokenizer, chosen)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % CHECK_EVERY_STEPS == 0:
            accuracy = sampled_accuracy(model, tokenizer, problems.check, rng)
            seconds = time.monotonic() - began
            print(
                f"step {step + 1}: loss {loss.item():.3f}, sampled accuracy {accuracy:.3f}, {seconds:.0f} s", flush=True
            )
            if accuracy >= target_accuracy:
                return
    raise Invalid(
        f"sampled accuracy is {accuracy:.3f} after {MAX_STEPS} supervised steps; the target is {target_accuracy}",
        name="target_accuracy",
        value=accuracy,
        bound=target_accuracy,
    )


def sampled_accuracy(model: Any, tokenizer: Any, problems: list[Problem], rng: np.random.Generator) -> float:
    """Return the share of problems that the model answers correctly, one sample each at T = 1."""
    stop = frozenset({tokenizer.eos_token_id})
    rows = [
        Row(tokenizer.encode(problem.prompt), MAX_NEW_TOKENS, 1.0, stop, rng.random(MAX_NEW_TOKENS))
        for problem in problems
    ]
    model.eval()
    wave = Wave(model, rows)
    while not wave.done:
        wave.step()
    answers = [tokenizer.decode(row.token_ids, skip_special_tokens=True) for row in rows]
    return float(np.mean([answer == problem.answer for answer, problem in zip(answers, problems, strict=True)]))


def _supervised_loss(model: Any, tokenizer: Any, problems: list[Problem]) -> torch.Tensor:
    """Return the mean cross-entropy of the answers' tokens; prompts have no loss."""
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    answers = [[*tokenizer.encode(problem.answer), tokenizer.eos_token_id] for problem in problems]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(problems), width), tokenizer.pad_token_id)
    labels = torch.full((len(problems), width), -100)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[number, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        labels[number, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def _write_prompts(path: Path, problems: list[Problem], split: str, task: str) -> None:
    with path.open("w") as file:
        for number, problem in enumerate(problems):
            line = {
                "prompt_id": f"{task}/{split}/{number}",
                "prompt": problem.prompt,
                "answer": problem.answer,
                "metadata": {"reasoning_gym": {"dataset": task, "entry": problem.entry, "partial_credit": False}},
            }
            file.write(json.dumps(line) + "\n")

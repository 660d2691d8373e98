"""A short supervised warm start, so that reinforcement learning starts with a policy that is sometimes right.

The task is `spell_backward` of reasoning-gym: the prompt is a word and `>`, the answer is the word backwards and the
end token. Held-out words are neither in the warm start nor among the training prompts. The warm start ends when the
sampled accuracy (T = 1) on separate check words reaches the target.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replaybuf.errors import Invalid, MissingExtra
from replaybuf_trainer.engine.sampler import Row, Wave
from replaybuf_trainer.folders import whole_folder
from replaybuf_trainer.models.tiny import character_tokenizer, new_model

TASKS = ("spell_backward",)
SHORTEST, LONGEST = 3, 6
HELD_OUT_WORDS = 200
CHECK_WORDS = 400
SCANNED_ENTRIES = 60_000
BATCH = 128
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 20
CHECK_EVERY_STEPS = 10
MAX_STEPS = 3000
MAX_NEW_TOKENS = LONGEST + 2


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
    """Disjoint sets of words; no word of `train` is the reverse of a word in `check` or `held_out`."""

    train: list[str]
    check: list[str]
    held_out: list[str]


def collect_words(seed: int) -> Words:
    """Draw the distinct words of the dataset. Raises `MissingExtra` without reasoning-gym."""
    try:
        import reasoning_gym
    except ImportError:
        raise MissingExtra("the warm start", "demo") from None
    dataset = reasoning_gym.create_dataset(
        "spell_backward", min_word_len=SHORTEST, max_word_len=LONGEST, size=SCANNED_ENTRIES, seed=0
    )
    distinct: dict[str, str] = {}
    for number in range(SCANNED_ENTRIES):
        word = dataset[number]["metadata"]["word"]
        if word.isascii() and word.isprintable():
            distinct.setdefault(word.lower(), word)
    order = np.random.default_rng(seed).permutation(len(distinct))
    listed = list(distinct.values())
    words = [listed[i] for i in order]
    held_out, check = words[:HELD_OUT_WORDS], words[HELD_OUT_WORDS : HELD_OUT_WORDS + CHECK_WORDS]
    kept_apart = {word.lower() for word in held_out + check}
    kept_apart |= {word[::-1] for word in kept_apart}
    train = [word for word in words[HELD_OUT_WORDS + CHECK_WORDS :] if word.lower() not in kept_apart]
    return Words(train, check, held_out)


def make(folder: Path, task: str, seed: int, target_accuracy: float) -> None:
    """Create model, tokenizer, training prompts and held-out problems in `folder`, complete or not at all.

    Raises `Invalid` for an unknown task, and if the accuracy stays below the target for `MAX_STEPS`.
    """
    if task not in TASKS:
        raise Invalid(
            f"task is {task!r}; it must be one of: {', '.join(TASKS)}", name="task", value=task, bound=list(TASKS)
        )
    words = collect_words(seed)
    print(
        f"{len(words.train)} words to train on, {len(words.held_out)} held out, {len(words.check)} for checks",
        flush=True,
    )
    tokenizer, model = character_tokenizer(), new_model(seed)
    print(f"model: Qwen3, {sum(p.numel() for p in model.parameters()):,} parameters, random weights", flush=True)
    warm_up(model, tokenizer, words, seed, target_accuracy)
    with whole_folder(folder) as scratch:
        model.save_pretrained(scratch, safe_serialization=True)
        tokenizer.save_pretrained(scratch)
        _write_prompts(scratch / "prompts.jsonl", words.train, "train", task)
        _write_prompts(scratch / "held_out.jsonl", words.held_out, "held_out", task)
    print(f"written: {folder}, with prompts.jsonl and held_out.jsonl", flush=True)


def warm_up(model: Any, tokenizer: Any, words: Words, seed: int, target_accuracy: float) -> None:
    """Train on (word, word backwards) until the sampled accuracy on the check words reaches the target."""
    print(f"supervised warm start until {target_accuracy:.0%} sampled accuracy (this is not reinforcement learning)")
    began = time.monotonic()
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    accuracy = 0.0
    for step in range(MAX_STEPS):
        chosen = [words.train[i] for i in rng.integers(len(words.train), size=BATCH)]
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS)
        loss = _supervised_loss(model, tokenizer, chosen)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % CHECK_EVERY_STEPS == 0:
            accuracy = sampled_accuracy(model, tokenizer, words.check, rng)
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


def sampled_accuracy(model: Any, tokenizer: Any, words: list[str], rng: np.random.Generator) -> float:
    """Return the share of words that the model spells backwards correctly, one sample each at T = 1."""
    stop = frozenset({tokenizer.eos_token_id})
    rows = [Row(tokenizer.encode(f"{word}>"), MAX_NEW_TOKENS, 1.0, stop, rng.random(MAX_NEW_TOKENS)) for word in words]
    model.eval()
    wave = Wave(model, rows)
    while not wave.done:
        wave.step()
    answers = [tokenizer.decode(row.token_ids, skip_special_tokens=True) for row in rows]
    return float(np.mean([answer == word[::-1] for answer, word in zip(answers, words, strict=True)]))


def _supervised_loss(model: Any, tokenizer: Any, words: list[str]) -> torch.Tensor:
    """Return the mean cross-entropy of the answers' tokens; prompts have no loss."""
    sequences = [[*tokenizer.encode(f"{word}>{word[::-1]}"), tokenizer.eos_token_id] for word in words]
    width = max(map(len, sequences))
    ids = torch.full((len(words), width), tokenizer.pad_token_id)
    labels = torch.full((len(words), width), -100)
    for number, (word, sequence) in enumerate(zip(words, sequences, strict=True)):
        ids[number, : len(sequence)] = torch.tensor(sequence)
        labels[number, len(word) + 1 : len(sequence)] = torch.tensor(sequence[len(word) + 1 :])
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def _write_prompts(path: Path, words: list[str], split: str, task: str) -> None:
    with path.open("w") as file:
        for number, word in enumerate(words):
            answer = word[::-1]
            scoring = {"dataset": task, "entry": {"question": word, "answer": answer, "metadata": {"word": word}}}
            line = {
                "prompt_id": f"{task}/{split}/{number}",
                "prompt": f"{word}>",
                "answer": answer,
                "metadata": {"reasoning_gym": {**scoring, "partial_credit": False}},
            }
            file.write(json.dumps(line) + "\n")

"""Samples as one self-contained HTML page: tokens coloured by ratio, or by another of their values.

Texts come from models and data sets, so they may hold anything. They are JSON in the page, and its script only ever
sets them as text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from replaybuf_trainer.report.tables.samples import TOKEN_COLUMNS, Sample, StepSamples

SAMPLE_TOKENS = 2000
PAGE_TOKENS = 40_000
"""Maximum completion tokens that a page shows of one sample, and of all."""
PROMPT_CHARACTERS = 8000
_DIGITS = 4


def write_page(path: Path, step: StepSamples) -> None:
    """Write the page of a step."""
    path.write_text(page(step), encoding="utf-8", errors="replace")


def page(step: StepSamples) -> str:
    """Return the page of a step. Only its own script may run in it, and it loads nothing."""
    style, script, body = (_part(name) for name in ("page.css", "page.js", "page.html"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # In a script element, only "</" and "<!--" could end or change the data.
    data = msgspec.json.encode(_data(step)).decode().replace("<", "\\u003c")
    parts = {"DIGEST": digest, "STYLE": style, "SCRIPT": script, "DATA": data}
    for name, text in parts.items():
        before, _, after = body.partition(f"{{{{{name}}}}}")
        body = before + text + after
    return body


@functools.cache
def _part(name: str) -> str:
    return resources.files("replaybuf_trainer.report.tables").joinpath(name).read_text(encoding="utf-8")


def _data(step: StepSamples) -> dict[str, Any]:
    most = min(SAMPLE_TOKENS, PAGE_TOKENS // max(1, len(step.samples)))
    return {
        "run": step.run,
        "step": step.step,
        "version": step.version,
        "loss": step.loss,
        "reward_parts": {name: _rounded(mean) for name, mean in step.reward_parts.items()},
        "columns": TOKEN_COLUMNS,
        "samples": [_sample(sample, most) for sample in step.samples],
    }


def _sample(sample: Sample, most: int) -> dict[str, Any]:
    names = ("group_id", "rollout", "adapter", "policy_version", "staleness", "times_sampled")
    prompt = sample.prompt
    return {
        **{name: getattr(sample, name) for name in names},
        "reward": _rounded(sample.reward),
        "reward_parts": {name: _rounded(part) for name, part in sample.reward_parts.items()},
        "advantage": _rounded(sample.advantage),
        "prompt": prompt[:PROMPT_CHARACTERS],
        "prompt_left": max(0, len(prompt) - PROMPT_CHARACTERS),
        "prompt_tokens": len(sample.prompt_ids),
        "length": len(sample.token_texts),
        "ids": sample.tokens["token_id"][:most].tolist(),
        "texts": sample.token_texts[:most],
        "mask": [int(value) for value in sample.tokens["loss_mask"][:most]],
        "values": [[_rounded(value) for value in sample.tokens[name][:most].tolist()] for name in TOKEN_COLUMNS],
    }


def _rounded(value: float) -> float | str | None:
    """Return 4 significant digits; None for NaN, and the infinities as text, which JSON lacks."""
    if value != value:
        return None
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else str(value)

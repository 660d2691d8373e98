"""What the adapters of a checkpoint belong to: shape of the adapters, and the frozen model that is not in it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from replaybuf.errors import Invalid
from replaybuf.wire.model.checkpoints import AdapterOrigin
from replaybuf_trainer.options import TrainOptions

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Places of each weights file that the fingerprint reads: another training of a model differs at nearly all of them."""


def origin_of(options: TrainOptions) -> AdapterOrigin | None:
    """Return the origin of the adapters that a trainer trains; None without `--lora-rank`."""
    if options.lora_rank is None:
        return None
    return AdapterOrigin(
        rank=options.lora_rank,
        alpha=options.lora_options.alpha or 2.0 * options.lora_rank,
        targets=sorted(options.lora_options.targets),
        model=str(options.model.resolve()),
        fingerprint=fingerprint(options.model),
    )


def check_origin(checkpoint: Path, stored: AdapterOrigin | None, options: TrainOptions) -> None:
    """Raise `Invalid` if a checkpoint has other adapters, or adapters of another model. A moved model is the same."""
    present = origin_of(options)
    if stored is None or present is None:
        if stored is not present:
            has = f"LoRA adapters of rank {stored.rank}" if stored else "whole weights"
            _reject(checkpoint, has, f"--lora-rank is {options.lora_rank or 'not given'}", "lora_rank")
        return
    for name in ("rank", "alpha", "targets"):
        before, now = getattr(stored, name), getattr(present, name)
        if before != now:
            _reject(checkpoint, f"adapters with {name} {before or 'all'}", f"this trainer has {now or 'all'}", name)
    if stored.fingerprint != present.fingerprint:
        _reject(
            checkpoint, f"adapters of the model {stored.model}", f"--model {present.model} has other weights", "model"
        )


def fingerprint(folder: Path) -> str:
    """Return a hash of names, sizes and samples of the weights files in a model folder; it reads 256 KiB of each."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(number * size // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _reject(checkpoint: Path, has: str, now: str, name: str) -> None:
    raise Invalid(
        f"checkpoint {checkpoint} has {has}; {now}; use another --checkpoint-dir, or the options of the checkpoint",
        name=name,
        value=str(checkpoint),
    )

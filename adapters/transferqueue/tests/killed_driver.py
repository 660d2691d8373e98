"""The driver of the kill test: puts, gets, clears and saves, and notes what was acknowledged. Killed at any moment.

    python killed_driver.py JOURNAL CHECKPOINTS ROUND URL

Begins with a restore, compares it with the journal, and exits with a message if anything is wrong. Each line of the
journal is written after its call returned: `put KEY NUMBER`, `begin-clear KEY`, `clear KEY`, `save FOLDER`.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
from pathlib import Path

import torch
import transfer_queue
from omegaconf import OmegaConf
from starting_ray import start_ray
from tensordict import NonTensorStack, TensorDict

from replaybuf_transferqueue import BACKEND, restore

PARTITION = "train"


def sample_of(numbers: list[int]) -> TensorDict:
    """Make samples whose every field tells their number."""
    ids = [torch.full((1 + number % 97,), number) for number in numbers]
    return TensorDict(
        {
            "ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
            "text": NonTensorStack(*[{"number": number} for number in numbers]),
        },
        batch_size=len(numbers),
    )


class Journal:
    """What this driver and those before it were told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.alive: dict[str, int] = {}
        self.unsure: dict[str, set[int]] = {}
        self.numbers = 0
        self.saved: list[tuple[str, dict[str, int]]] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            self.apply(line)

    def apply(self, line: str) -> None:
        """Fold one line."""
        word, *rest = line.split()
        if word == "begin-put":
            key, number = rest[0], int(rest[1])
            self.unsure.setdefault(key, set()).add(number)
            self.numbers = max(self.numbers, number + 1)
        elif word == "put":
            self.alive[rest[0]] = int(rest[1])
            self.unsure.pop(rest[0], None)
        elif word == "begin-clear":
            self.unsure.setdefault(rest[0], set()).update({-1, self.alive.get(rest[0], -1)})
        elif word == "clear":
            self.alive.pop(rest[0], None)
            self.unsure.pop(rest[0], None)
        elif word == "save":
            self.saved.append((rest[0], dict(self.alive)))
        elif word == "restored":
            self.alive = {key: int(number) for key, number in (part.split("=") for part in rest)}
            self.unsure = {}

    def write(self, line: str) -> None:
        """Note a line durably, then fold it."""
        with self.path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.apply(line)


def check_restore(journal: Journal, folder: str | None) -> dict[str, int]:
    """Restore, and compare the report and every value with the journal; returns the numbers by key."""
    before = dict(journal.saved).get(folder or "", {})
    restored = restore(folder)
    assert not restored.missing, restored.missing
    listed = transfer_queue.kv_list(PARTITION) or {}
    keys = sorted(listed.get(PARTITION, {}))
    numbers = numbers_of(keys)
    for key in journal.alive.keys() | before.keys() | numbers.keys() | journal.unsure.keys():
        # A sample of the checkpoint that was cleared later is back; a call without an answer may have happened or not.
        allowed = {journal.alive.get(key, before.get(key, -1))} | journal.unsure.get(key, set())
        if key in before:
            allowed |= {before[key]} if key in journal.unsure or key not in journal.alive else set()
        assert numbers.get(key, -1) in allowed, (key, numbers.get(key, -1), allowed, folder)
    later = {str(sample.key) for sample in restored.later}
    put_later = {key for key, number in journal.alive.items() if number != before.get(key)} - journal.unsure.keys()
    assert restored.samples == len(before), (restored.samples, len(before))
    assert put_later <= later <= put_later | journal.unsure.keys(), (put_later ^ later, journal.unsure)
    assert numbers.keys() == before.keys() | later, numbers.keys() ^ (before.keys() | later)
    return numbers


def numbers_of(keys: list[str]) -> dict[str, int]:
    """Read samples; every field of one must tell the same number."""
    if not keys:
        return {}
    data = transfer_queue.kv_batch_get(keys=keys, partition_id=PARTITION)
    numbers = {}
    for key, ids, text in zip(keys, data["ids"].unbind(), data["text"], strict=True):
        number = text["number"]
        assert ids.tolist() == [number] * (1 + number % 97), f"wrong bytes of {key}: {number}, {ids}"
        numbers[key] = number
    return numbers


def main() -> None:
    """Restore and check; then work until killed."""
    path, folder, round_, url = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    journal, rng = Journal(path), random.Random(round_)
    start_ray(1)
    backend = {"storage_backend": BACKEND, BACKEND: {"url": url, "timeout_s": 60.0}}
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend}))
    newest = next((name for name, _ in reversed(journal.saved) if Path(name).exists()), None)
    contents = check_restore(journal, newest)
    journal.write(" ".join(["restored", *(f"{key}={number}" for key, number in contents.items())]))
    print(f"restored {len(contents)}", flush=True)
    for turn in itertools.count():
        keys = [f"k{rng.randrange(40)}" for _ in range(rng.choice([1, 1, 8]))]
        keys = sorted(set(keys))
        if rng.random() < 0.6:
            numbers = list(range(journal.numbers, journal.numbers + len(keys)))
            for key, number in zip(keys, numbers, strict=True):
                journal.write(f"begin-put {key} {number}")
            transfer_queue.kv_batch_put(keys, PARTITION, sample_of(numbers), tags=[{"n": n} for n in numbers])
            for key, number in zip(keys, numbers, strict=True):
                journal.write(f"put {key} {number}")
        elif rng.random() < 0.7:
            keys = [key for key in keys if key in journal.alive]
            for key in keys:
                journal.write(f"begin-clear {key}")
            if keys:
                transfer_queue.kv_clear(keys, PARTITION)
            for key in keys:
                journal.write(f"clear {key}")
        elif rng.random() < 0.3:
            name = folder / f"ck-{round_}-{turn}"
            transfer_queue.save_checkpoint(name)
            journal.write(f"save {name}")
            for old in journal.saved[:-2]:
                shutil.rmtree(old[0], ignore_errors=True)
        else:
            alive = sorted(journal.alive)
            assert numbers_of(alive) == {key: journal.alive[key] for key in alive}


if __name__ == "__main__":
    main()

"""What fuzzing found once stays found: the corpus and the seeds of every target are replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import CORPUS, NAMES
from tests.fuzz.targets import TARGETS

FOUND = sorted(path for path in CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("name", TARGETS)
def test_a_seed_is_handled_whole_and_with_one_changed_byte(name: str) -> None:
    """The byte is changed at 64 places."""
    target = TARGETS[name]
    for seed in target.seeds:
        target.run(seed)
        for position in range(0, len(seed), -(-len(seed) // 64)):
            target.run(seed[:position] + bytes([seed[position] ^ 255]) + seed[position + 1 :])


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_findings_stay_fixed(path: Path) -> None:
    TARGETS[path.parent.name].run(path.read_bytes())


def test_every_folder_of_the_corpus_and_every_target_has_its_name_on_the_command_line() -> None:
    assert set(NAMES) == TARGETS.keys() >= {path.parent.name for path in FOUND}

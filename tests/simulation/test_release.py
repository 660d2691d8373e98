"""A seed belongs to its code, and each version of the product has seeds of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.release import (
    PRODUCT,
    SEEDS_PER_BASE,
    OtherRelease,
    base_of,
    base_of_product,
    check_release,
    release,
)

SOURCES = [b"import asyncio\n", b"", b"local run = {}\n"]


def test_a_seed_of_another_release_is_refused() -> None:
    """It would run another schedule, and its success would mean nothing."""
    check_release(7, release())
    with pytest.raises(OtherRelease, match="seed 7 is of release 0badc0de"):
        check_release(7, "0badc0de")


def test_the_same_sources_have_the_same_seeds_in_any_order() -> None:
    """Another machine may list its files in another order."""
    assert base_of(SOURCES) == base_of(reversed(SOURCES)) == base_of(list(SOURCES))


def test_each_changed_byte_gives_other_seeds() -> None:
    """Each change runs schedules that nobody has run. Two versions share no seed."""
    bases = {base_of(SOURCES)}
    for at, source in enumerate(SOURCES):
        for place in range(len(source)):
            changed = source[:place] + bytes([source[place] ^ 1]) + source[place + 1 :]
            bases.add(base_of([*SOURCES[:at], changed, *SOURCES[at + 1 :]]))
    assert len(bases) == 1 + sum(map(len, SOURCES))
    assert all(base % SEEDS_PER_BASE == 0 for base in bases)


def test_bytes_do_not_move_between_sources_unnoticed() -> None:
    """The joined text of all files is the same here."""
    assert base_of([b"ab", b"c"]) != base_of([b"a", b"bc"]) != base_of([b"abc"])


def test_only_contents_of_sources_count(tmp_path: Path) -> None:
    """Checkouts have other paths and times, and compiled files beside the sources."""
    for name in ("one", "two"):
        (tmp_path / name / "store").mkdir(parents=True)
        (tmp_path / name / "store" / f"{name}.lua").write_bytes(SOURCES[2])
        (tmp_path / name / "service.py").write_bytes(SOURCES[0])
    (tmp_path / "two" / "service.pyc").write_bytes(b"compiled")
    assert base_of_product([tmp_path / "one"]) == base_of_product([tmp_path / "two"])
    (tmp_path / "two" / "service.py").write_bytes(SOURCES[0] + b"#")
    assert base_of_product([tmp_path / "one"]) != base_of_product([tmp_path / "two"])


def test_the_product_is_the_service_with_its_functions_and_strategies() -> None:
    """Whatever of them changes, CI runs other schedules."""
    for folder in PRODUCT:
        assert base_of_product([folder]) != base_of_product()
    assert any((PRODUCT[0] / "store").rglob("*.lua"))

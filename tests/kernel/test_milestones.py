"""When versions were published and groups freed, as far as the life of a group needs it."""

from __future__ import annotations

import pytest

from replaybuf.kernel.figures import events as milestones
from replaybuf.kernel.figures.events import Milestones
from replaybuf.wire.ledger import CheckpointRecord, PolicyRecord, RewindRecord


def publish(milestones: Milestones, version: int, step: int, adapter: str = "", at_s: float = 1.0) -> None:
    """Note a published version at the next unacked step `step`."""
    milestones.publish(PolicyRecord(version=version, weights_uri=None, adapter=adapter, epoch=1, at_s=at_s), step)


def test_the_publication_after_a_step_has_a_version_above_the_one_that_it_trained() -> None:
    """A late publication of an older version does not hold the step; each adapter has its own."""
    milestones = Milestones()
    publish(milestones, 1, 1, at_s=10.0)
    publish(milestones, 1, 2, "math", at_s=15.0)
    publish(milestones, 2, 3, at_s=20.0)
    for step, version, published in ((0, 0, 1), (1, 1, 2), (2, 2, None), (1, None, 2)):
        after = milestones.publication_after("", step, version)
        assert (after.version if after else None) == published
    assert (after := milestones.publication_after("math", 1, None)) is not None and after.at_s == 15.0


def test_a_rewind_forgets_publications_of_lost_versions() -> None:
    milestones = Milestones()
    for version in (1, 2, 3):
        publish(milestones, version, version)
    milestones.rewind(RewindRecord(step=1, generation=1, on_resume="redeliver", version=1, until=0))
    assert [publication.version for publication in milestones.publications] == [1]


def test_a_group_is_freed_by_the_first_checkpoint_behind_its_last_step_that_keeps_it_for_no_cursor() -> None:
    milestones = Milestones()
    milestones.checkpoint(CheckpointRecord(step=2, keep=1, at_s=10.0), 2)
    milestones.checkpoint(CheckpointRecord(step=4, keep=1, at_s=20.0, kept_after=7), 4)
    milestones.checkpoint(CheckpointRecord(step=6, keep=1, at_s=30.0, kept_from=5), 6)
    for number, last_step, freed_s in ((1, 1, 10.0), (7, 3, 20.0), (8, 3, 30.0), (9, 5, None)):
        freed = milestones.freeing_of(number, last_step)
        assert (freed.at_s if freed else None) == freed_s


def test_moments_are_bounded_and_have_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milestones, "MOST_MOMENTS", 3)
    noted = Milestones()
    publish(noted, 1, 1, at_s=0.0)
    noted.checkpoint(CheckpointRecord(step=1, keep=1), 1)
    assert noted == Milestones()
    for version in range(1, 9):
        publish(noted, version, version)
        noted.checkpoint(CheckpointRecord(step=version, keep=1, at_s=1.0), version)
    assert [publication.version for publication in noted.publications] == [6, 7, 8]
    assert [freeing.step for freeing in noted.freeings] == [6, 7, 8]

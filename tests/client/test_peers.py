"""What an adapter checks: an untested release is a warning; a setting or a batch that does not fit is an error."""

from __future__ import annotations

import warnings

import pytest

from replaybuf.client import peers
from replaybuf.errors import Conflict, Invalid
from replaybuf.wire.batch import BatchMeta, read_batch
from tests.conftest import RunClient, group


@pytest.mark.parametrize("release", ["1.16", "1.16.0", "1.16.3.post1", "1.16.0rc1"])
def test_a_tested_release_is_silent(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "version", lambda _: release)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peers.warn_if_untested("replaybuf-x", "x", "1.16", "1.17")


@pytest.mark.parametrize("release", ["1.15.9", "1.17.0", "2.0", "0.dev1"])
def test_another_release_is_named_with_the_tested_range(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "version", lambda _: release)
    expected = rf"^x is {release}; replaybuf-x is tested with 1\.16 up to but not 1\.17: run its tests"
    with pytest.warns(UserWarning, match=expected):
        peers.warn_if_untested("replaybuf-x", "x", "1.16", "1.17")


def test_a_setting_of_the_run_that_does_not_fit_is_named_with_the_needed_value() -> None:
    peers.check_run_settings("main", {"adapters": ([], [], "one policy")})
    needed = {"adapters": ([], [], "one policy"), "group_size": (4, 8, "--n-samples-per-prompt")}
    with pytest.raises(Invalid, match=r"^run main: group_size is 4; needed: 8 \(--n-samples-per-prompt\)") as refused:
        peers.check_run_settings("main", needed)
    assert (refused.value.name, refused.value.value) == ("run main: group_size", "4")


def test_a_batch_that_is_not_the_step_of_a_trainer_of_equal_steps_is_named(run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 2})
    run.append(group("a", rollouts=3), group("b", rollouts=2))
    meta: BatchMeta = read_batch(run.batch(0, run.attach()).content).meta
    peers.check_size(meta, peers.Needed(5, "5 x 1 process"))
    with pytest.raises(Conflict, match=r"step 0 has 5 rollouts in 2 groups; needed: 4 \(4 x 1 process\)") as refused:
        peers.check_size(meta, peers.Needed(4, "4 x 1 process"))
    assert (refused.value.name, refused.value.value, refused.value.bound) == ("batch_rollouts", 5, 4)

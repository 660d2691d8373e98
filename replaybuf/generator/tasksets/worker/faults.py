"""Why a request has no answer; `process` makes a `Failed` of each."""

from __future__ import annotations


class Unfit(Exception):
    """What was asked for cannot be had of this taskset."""


class Rewritten(Exception):
    """A play asked for a turn after tokens that do not extend those it had."""


class PlayFailed(Exception):
    """A play ended without scores: verifiers, or code of the taskset, failed in it."""


def told(error: BaseException) -> str:
    """Say what was raised, and by whom where verifiers wrapped it."""
    return f"{type(error).__name__}: {error}"

"""Runs that a caller may see: all, or those that its token is limited to."""

from __future__ import annotations

from starlette.requests import Request

from replaybuf.errors import ReplaybufError
from replaybuf.missing_run import is_missing_run, no_run
from replaybuf.service.host import Service
from replaybuf.service.http.guard.auth import Caller
from replaybuf.service.run.served_run import Run

_LOST = "Redis lacks acknowledged data of a run; a token that may see the run is told more"


def list_runs(request: Request) -> list[tuple[str, Run]]:
    """Return names and runs of this server that the caller may see, by name."""
    service, caller = _of(request)
    return sorted((name, run) for name, run in service.runs.items() if caller.may_see(name))


def list_unreadable(request: Request) -> dict[str, str]:
    """Return the runs that cannot be read and that the caller may see, with the error."""
    service, caller = _of(request)
    reasons = service.unreadable.reasons.items()
    # A run that could be read is served a moment before it is taken out of the unreadable ones.
    return {name: why for name, why in reasons if name not in service.runs and caller.may_see(name)}


def hide_others(request: Request, error: ReplaybufError) -> ReplaybufError:
    """Leave only runs that the caller may see in the error of a run that does not exist."""
    if not is_missing_run(error):
        return error
    return no_run(
        str(error.value), [name for name, _ in list_runs(request)], f"create it with PUT /v1/runs/{error.value}"
    )


def describe_lost(request: Request) -> str | None:
    """Return why Redis lacks acknowledged data of a run, without its name if the caller may not see it."""
    service, caller = _of(request)
    for name, run in service.runs.items():
        if run.journal.lost:
            return run.journal.lost.detail if caller.may_see(name) else _LOST
    return None


def _of(request: Request) -> tuple[Service, Caller]:
    return request.app.state.service, request.state.caller

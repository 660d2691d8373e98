"""The command `replaybuf status`: show what the runs of a service hold and what they wait for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import httpx
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from replaybuf.client.addresses import addresses_of, authorization, base_url, unix_mounts
from replaybuf.client.calls import answer_of, error_of
from replaybuf.errors import ServiceUnavailable
from replaybuf.wire.config import check_run_name

TIMEOUT_S = 10.0
READINESS = "/readyz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """Service and run to show."""

    url: str = "http://127.0.0.1:8900"
    """Address of the service; separate several servers of one Redis by commas."""
    run: str | None = None
    """Name of one run; by default all runs are shown."""
    token: str | None = dataclasses.field(default=None, repr=False)
    """Bearer token with the role reader, trainer or operator."""


_DEFAULTS = StatusOptions()


def status(options: Annotated[StatusOptions, Parameter(name="*")] = _DEFAULTS) -> None:
    """Show the runs of a service: what each one holds and what it waits for."""
    show(options.url, options.run, options.token, Console())


def show(url: str, run: str | None, token: str | None, console: Console) -> None:
    """Print the state of one run, or of all. Raises what the service answers, `ServiceUnavailable` where it is away."""
    path = f"/v1/runs/{check_run_name(run)}" if run else "/v1/runs"
    address, body = _first_answer(addresses_of(url), path, token)
    runs = [body] if run else body["runs"]
    ready = _ask(address, READINESS, None)
    for line in _server(ready):
        console.print(line, markup=False)
    if not runs and not ready["unreadable"]:
        console.print(f"{url} has no runs yet; create one with PUT /v1/runs/NAME")
    for state in runs:
        kept = _ask(address, f"/v1/runs/{state['run']}/evaluations", token)["evaluations"]
        console.print(_table(state, ready["leaders"].get(state["run"]), kept))


def _server(ready: dict[str, Any]) -> list[str]:
    """Describe the server from its `/readyz`: durability, what is weaker than wanted, waited for, or unreadable."""
    lines = [
        f"durability {ready['durability']} ({ready['durability_met_by']}), wanted {ready['durability_wanted']}, "
        f"{ready['replicas']} replicas connected, {ready['wait_replicas']} waited for, redis {ready['redis_version']}"
    ]
    lines += [f"  {reason}" for reason in ready["durability_reasons"]]
    if ready["waiting_for"]:
        lines.append(f"waiting for redis: {ready['waiting_for']}")
    return lines + list(ready["unreadable"].values())


def _first_answer(addresses: Sequence[str], path: str, token: str | None) -> tuple[str, dict[str, Any]]:
    """Ask one address after the other; return the first that serves, and its answer.

    Raises what the last one answered where none serves.
    """
    *others, last = addresses
    for address in others:
        with contextlib.suppress(ServiceUnavailable):
            return address, _ask(address, path, token)
    return last, _ask(last, path, token)


def _ask(address: str, path: str, token: str | None) -> dict[str, Any]:
    try:
        mounts = unix_mounts([address], lambda path: httpx.HTTPTransport(uds=path))
        with httpx.Client(headers=authorization(token), timeout=TIMEOUT_S, mounts=mounts) as http:
            response = http.get(base_url(address) + path)
    except httpx.HTTPError as error:
        raise ServiceUnavailable(
            f"no answer from {address}: {error or type(error).__name__}", name="url", value=address
        ) from error
    if response.is_error and path != READINESS:  # its 503 says what it waits for
        raise error_of(response)
    return answer_of(response, dict[str, Any])


def _table(state: dict[str, Any], leader: str | None, evaluations: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"run {state['run']}", title_justify="left", show_header=False)
    paused = f" ({state['paused_reason']})" if state["paused_reason"] else ""
    groups, tickets = state["groups"], state["tickets"]
    for name, value in (
        ("state", state["state"] + paused),
        ("next batch", _waiting(state["waiting"])),
        ("next unacked step", state["step"]),
        ("published version", state["published_version"]),
        ("strategy", f"{state['strategy']['name']} {_pairs(state['strategy']['options'])}"),
        ("groups live", f"{groups['live']} ({state['tokens']['live']} tokens)"),
        ("groups stored", groups["stored"]),
        ("in batches, retired", f"{groups['in_batches']}, {groups['retired']}"),
        ("evicted", _pairs(groups["evicted"])),
        ("rejected", _pairs(groups["rejected"])),
        ("dead letters", groups["dead_lettered"]),
        ("tickets", _pairs(tickets)),
        ("staleness at use", _pairs(state["staleness"])),
        ("times sampled at use", _pairs(state["histograms"]["times_sampled"])),
        ("age at use", f"{_mean(state['histograms']['age_at_use_s'])} s"),
        ("tokens per rollout", _pairs(_means(state["histograms"]["rollout_tokens"]))),
        ("longest rollout", _pairs(_means(state["histograms"]["longest_rollout_tokens"]))),
        ("age when dropped", _drop_ages(state["histograms"]["dropped"])),
        ("prompts", _prompts(state["coverage"])),
        *((f"adapter {name}", _adapter(told)) for name, told in state["adapters"].items()),
        *((f"evaluation {name}", _evaluation(told)) for name, told in _last_evaluations(evaluations).items()),
        ("epoch, generation", f"{state['epoch']}, {state['generation']}"),
        ("durability", state["durability"]),
        ("led by", leader or "nobody, or a server not known yet"),
    ):
        table.add_row(name, str(value))
    return table


def _adapter(told: dict[str, Any]) -> str:
    progress = told["progress"]
    return (
        f"next unacked step {told['step']}, published version {told['published_version']}, "
        f"groups live {told['groups']['live']} ({told['tokens_live']} tokens), {told['tokens_used']} tokens used, "
        f"staleness at use {_pairs(told['staleness'])}, "
        f"{progress['groups']} of {progress['groups_per_batch']} given to step {progress['step']}; "
        f"{_waiting(told['waiting'])}"
    )


def _last_evaluations(evaluations: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the last result of each held-out set by its name, with the adapter where there is one."""
    return {" ".join(filter(None, (one["name"], one["adapter"]))): one for one in evaluations}


def _evaluation(told: dict[str, Any]) -> str:
    error = "" if told["standard_error"] is None else f" ± {told['standard_error']:.3f}"
    versions = ", ".join(str(version) for version in told["versions"])
    return (
        f"version {versions}: reward {told['reward_mean']:.3f}{error} over {told['rollouts']} completions, "
        f"{told['failed']} prompts failed"
    )


def _waiting(waiting: dict[str, Any] | None) -> str:
    if waiting is None:
        return "ready"
    return (
        f"{waiting['reason']}: have {_pairs(waiting['have'])}; need {_pairs(waiting['need'])}; "
        f"waiting for {waiting['blocked_on']}"
    )


def _mean(histogram: dict[str, Any]) -> str:
    """Tell the mean of a histogram; - where nothing is in it."""
    return f"{histogram['sum'] / histogram['count']:.1f}" if histogram["count"] else "-"


def _means(histograms: dict[str, Any]) -> dict[str, str]:
    return {name: _mean(histogram) for name, histogram in histograms.items()}


def _drop_ages(dropped: dict[str, Any]) -> str:
    told = (
        f"{reason} {_mean(ages['age_versions'])} versions, {_mean(ages['age_s'])} s" for reason, ages in dropped.items()
    )
    return "; ".join(told) or "none"


def _prompts(coverage: dict[str, Any]) -> str:
    return _pairs({name: value for name, value in coverage.items() if name != "share"})


def _pairs(values: dict[str, Any]) -> str:
    told = (f"{name}{':' if name.isdigit() else ''} {value}" for name, value in values.items())
    return ", ".join(told) or "none"

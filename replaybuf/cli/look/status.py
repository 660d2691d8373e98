"""The commands `replaybuf status` and `replaybuf evals`: what runs hold and wait for, and their held-out results."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from replaybuf.cli.fetch import READINESS, fetch, fetch_first
from replaybuf.cli.service import (
    DEFAULT_SERVICE,
    RunName,
    Service,
    ServiceOptions,
    client,
    explain_waiting,
    print_json,
    print_table,
)
from replaybuf.client.addresses import addresses_of
from replaybuf.errors import counted
from replaybuf.wire.answer.evaluations import MOST_LISTED, Evaluation, Evaluations
from replaybuf.wire.answer.run_status import (
    AdapterStatus,
    Buckets,
    DropAges,
    LengthBias,
    PromptCounts,
    RunList,
    RunStatus,
)
from replaybuf.wire.config import check_run_name
from replaybuf.wire.contract import Readiness, WaitingAnswer

WATCH_PERIOD_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusOptions(ServiceOptions):
    """How often to show them."""

    watch: bool = False
    """Show it again every two seconds, until interrupted; with --json one line each time."""


def status(
    run: Annotated[str | None, Parameter(help="Name of the run. Default: all runs.")] = None,
    /,
    options: Annotated[StatusOptions, Parameter(name="*")] = StatusOptions(),
) -> None:
    """Show what a run holds, and why it waits; without a name all runs."""
    if not options.watch:
        show_status(options, run)
        return
    console = Console()
    while True:
        if console.is_terminal and not options.json:
            console.clear()
        show_status(options, run)
        time.sleep(WATCH_PERIOD_S)


def show_status(options: ServiceOptions, run: str | None, console: Console | None = None) -> None:
    """Print the status of one run, or of all. Raises the service's errors, `ServiceUnavailable` without an answer."""
    name, console = check_run_name(run) if run else "", console or Console()
    address, runs = _first_runs(addresses_of(options.url), name, options.token)
    if options.json:
        print_json(runs[0] if name else runs)
        return
    ready = fetch(address, READINESS, options.token, Readiness)
    for line in _describe_server(ready):
        console.print(line, markup=False)
    if not runs and not ready.unreadable:
        console.print(f"{options.url} has no runs yet; create one with `replaybuf runs create NAME --from FILE`")
    for status in runs:
        results = fetch(address, f"/v1/runs/{status.run}/evaluations", options.token, Evaluations).evaluations
        console.print(_table(status, ready.leaders.get(status.run), results))
        for line in explain_waiting(status.waiting) if status.waiting else ():
            console.print(f"  {line}", markup=False, highlight=False)


def fetch_runs(options: ServiceOptions) -> list[RunStatus]:
    """Return the status of every run. Raises the service's errors, `ServiceUnavailable` without an answer."""
    return _first_runs(addresses_of(options.url), "", options.token)[1]


def _describe_server(ready: Readiness) -> list[str]:
    lines = [
        f"durability {ready.durability} ({ready.durability_met_by}), wanted {ready.durability_wanted}, "
        f"{counted(ready.replicas, 'replica')} connected, {ready.wait_replicas} of them must confirm each write, "
        f"{ready.server or 'server unknown'}"
    ]
    lines += [f"  {reason}" for reason in ready.durability_reasons]
    if ready.waiting_for:
        lines.append(f"waiting for redis: {ready.waiting_for}")
    return lines + list(ready.unreadable.values())


def _first_runs(addresses: Sequence[str], run: str, token: str | None) -> tuple[str, list[RunStatus]]:
    """Return the first address that serves, and its runs. Raises the error of the last one if none serves."""
    if run:
        address, status = fetch_first(addresses, f"/v1/runs/{run}", token, RunStatus)
        return address, [status]
    address, listing = fetch_first(addresses, "/v1/runs", token, RunList)
    return address, listing.runs


def _table(status: RunStatus, leader: str | None, evaluations: Sequence[Evaluation]) -> Table:
    table = Table(title=f"run {status.run}", title_justify="left", show_header=False)
    paused = f" ({status.paused_reason})" if status.paused_reason else ""
    groups, histograms = status.groups, status.histograms
    coverage, reuse = status.coverage, status.reuse
    prompts = {
        name: getattr(coverage, name) for name in ("issued", "stored", "trained", "dropped", "failed", "pending")
    }
    newest = {result.set_name: result for result in evaluations}  # oldest first
    for name, value in (
        ("state", status.state + paused),
        ("next batch", _waiting(status.waiting) + _since(status.waiting_s)),
        ("next unacked step", status.step),
        ("published version", status.published_version),
        ("strategy", f"{status.strategy.name} {_pairs(status.strategy.options)}"),
        ("groups live", f"{groups.live} ({counted(status.tokens.live, 'token')})"),
        ("groups stored", groups.stored),
        ("in batches, retired", f"{groups.in_batches}, {groups.retired}"),
        ("evicted", _pairs(groups.evicted)),
        ("rejected", _pairs(groups.rejected)),
        ("dead letters", groups.dead_lettered),
        ("tickets", _pairs(msgspec.structs.asdict(status.tickets))),
        ("staleness at use", _pairs(status.staleness)),
        ("times sampled at use", _pairs(histograms.times_sampled)),
        (
            "uses per group",
            f"{_number(reuse.uses_per_group)}, {_number(reuse.generated_share)} groups generated per use",
        ),
        ("age at use", f"{_mean(histograms.age_at_use_s)} s"),
        ("tokens per rollout", _pairs(_means(histograms.rollout_tokens))),
        ("longest rollout", _pairs(_means(histograms.longest_rollout_tokens))),
        ("age when dropped", _drop_ages(histograms.dropped)),
        ("prompts", _pairs(prompts)),
        *((f"prompts of {source}", _prompts(counts)) for source, counts in coverage.sources.items()),
        *((("length bias", _length_bias(coverage.lengths)),) if coverage.lengths else ()),
        *((f"adapter {name}", _adapter(adapter)) for name, adapter in status.adapters.items()),
        *((f"evaluation {name}", _evaluation(result)) for name, result in newest.items()),
        ("last seen", _last_seen(status)),
        ("epoch, generation", f"{status.epoch}, {status.generation}"),
        ("durability", status.durability),
        ("led by", leader or "no server, or one without an address"),
    ):
        table.add_row(name, str(value))
    return table


def _last_seen(status: RunStatus) -> str:
    trainer, producers = status.trainer, status.producers
    return (
        f"trainer {f'{trainer.last_seen_s:.0f} s ago' if trainer else 'never'}, "
        f"producers {'never' if producers.last_seen_s is None else f'{producers.last_seen_s:.0f} s ago'} "
        f"({producers.known} known)"
    )


def _adapter(status: AdapterStatus) -> str:
    progress = status.progress
    return (
        f"next unacked step {status.step}, published version {status.published_version}, "
        f"groups live {status.groups.live} ({counted(status.tokens_live, 'token')}), "
        f"{counted(status.tokens_used, 'token')} used, staleness at use {_pairs(status.staleness)}, "
        f"{progress.groups} of {progress.groups_per_batch} given to step {progress.step}; {_waiting(status.waiting)}"
    )


def _evaluation(result: Evaluation) -> str:
    error = "" if result.standard_error is None else f" ± {result.standard_error:.3f}"
    versions = ", ".join(str(version) for version in result.versions)
    return (
        f"version {versions}: reward {result.reward_mean:.3f}{error} over {counted(result.rollouts, 'completion')}, "
        f"{counted(result.failed, 'prompt')} failed"
    )


def _waiting(waiting: WaitingAnswer | None) -> str:
    if waiting is None:
        return "ready"
    have, need = msgspec.structs.asdict(waiting.have), msgspec.structs.asdict(waiting.need)
    actor = "nobody has to act" if waiting.blocked_on == "nothing" else f"waiting for {waiting.blocked_on}"
    return f"{waiting.reason}: have {_pairs(have)}; need {_pairs(need)}; {actor}"


def _since(seconds: float | None) -> str:
    return "" if seconds is None else f", for {seconds:.0f} s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _prompts(counts: PromptCounts) -> str:
    return f"{counts.trained} trained, {counts.dropped} dropped of {counts.stored} stored"


def _length_bias(lengths: LengthBias) -> str:
    means = f"{lengths.used:.1f} tokens per trained rollout, {lengths.stored:.1f} per stored one"
    lost = "long" if lengths.used < lengths.stored else "short"
    return f"{means}: {lost} rollouts get lost" if lengths.biased else means


def _mean(histogram: Buckets) -> str:
    return f"{histogram.sum / histogram.count:.1f}" if histogram.count else "-"


def _means(histograms: dict[str, Buckets]) -> dict[str, str]:
    return {name: _mean(histogram) for name, histogram in histograms.items()}


def _drop_ages(dropped: dict[str, DropAges]) -> str:
    ages = (f"{reason} {_mean(age.age_versions)} versions, {_mean(age.age_s)} s" for reason, age in dropped.items())
    return "; ".join(ages) or "none"


def _pairs(values: dict[str, Any]) -> str:
    pairs = (f"{name}{':' if name.isdigit() else ''} {value}" for name, value in values.items())
    return ", ".join(pairs) or "none"


def evals(run: RunName, /, options: Service = DEFAULT_SERVICE) -> None:
    """List the results of a run on held-out prompts, newest first."""
    with client(run, options) as service:
        newest = service.list_evaluations(MOST_LISTED)[::-1]
    if options.json:
        print_json(newest)
        return
    columns = ("set", ">version", ">reward", ">± error", ">completions", ">failed")
    print_table(columns, map(_row, newest))


def _row(result: Evaluation) -> list[object]:
    error = "-" if result.standard_error is None else f"{result.standard_error:.3f}"
    return [result.set_name, result.version, f"{result.reward_mean:.3f}", error, result.rollouts, result.failed]

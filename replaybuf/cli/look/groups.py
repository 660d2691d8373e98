"""The commands `replaybuf groups ...` and `replaybuf ledger`: look at what a run holds and what it did."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter
from rich import filesize
from rich.console import Console
from rich.text import Text

from replaybuf.cli.fetch import fetch_first
from replaybuf.cli.service import (
    DEFAULT_SERVICE,
    RunName,
    Service,
    ServiceOptions,
    client,
    print_json,
    print_table,
    printable,
)
from replaybuf.client.addresses import addresses_of
from replaybuf.errors import counted
from replaybuf.wire.answer.browse import GroupState, GroupSummary, SearchedGroups, StoredRollout
from replaybuf.wire.answer.overview import Flow
from replaybuf.wire.answer.samples import Sample
from replaybuf.wire.config import check_run_name

SHOWN_IDS = 24
"""Token ids of a completion that are shown where there is no text."""
SHOWN_LETTERS = 2000
SHOWN_DETAIL = 200
"""Letters of a ledger record."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryOptions(ServiceOptions):
    """Groups to list; all conditions hold."""

    state: GroupState | None = None
    """live, in_batches, retired, evicted or dead_lettered."""
    step: int | None = None
    """Step whose batch used the group."""
    min_reward: float | None = None
    """Lowest mean reward."""
    max_reward: float | None = None
    """Highest mean reward."""
    min_staleness: int | None = None
    """Lowest staleness at the next step to assemble."""
    max_staleness: int | None = None
    """Highest staleness at the next step to assemble."""
    version: int | None = None
    """Policy version of the group."""
    prompt_id: str | None = None
    """Prompt of the group."""
    id_prefix: str | None = None
    """Start of the id of the group or of its prompt."""
    source: str | None = None
    """Source in the group's metadata; "" = none."""
    adapter: str | None = None
    """Adapter of the group."""
    contains: str | None = None
    """Letters of a prompt or a completion, in any case; freed groups have no text: see groups samples."""
    order: Literal["arrival", "reward", "staleness"] = "arrival"
    """What to sort by."""
    desc: bool = True
    """Newest or highest first; with --no-desc oldest or lowest first."""
    limit: int = 20
    """Maximum number of groups."""
    after: int | None = None
    """The `next` of an earlier page."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions(ServiceOptions):
    """Samples to show."""

    step: int | None = None
    """Show those of this step alone."""
    before: int | None = None
    """Show those of steps below it: the `next` of an earlier page."""
    contains: str | None = None
    """Letters of the prompt or the completion, in any case."""
    limit: int = 5
    """Maximum number of steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerOptions(ServiceOptions):
    """Records to show."""

    before: int | None = None
    """Show records before this entry. Default: the newest."""
    limit: int = 50
    """Maximum number of records."""


def list_(run: RunName, /, options: Annotated[QueryOptions, Parameter(name="*")] = QueryOptions()) -> None:
    """List groups of a run, newest first, by state, step, reward, staleness, version, prompt, source or adapter."""
    query: dict[str, Any] = dataclasses.asdict(options)
    for field in dataclasses.fields(ServiceOptions):
        del query[field.name]
    with client(run, options) as service:
        page = service.list_groups(**query)
    if options.json:
        print_json(page)
        return
    if page.searched:
        print_table(("group", ">version", ">reward", ">rollout", "part", "text"), map(_match_row, page.groups))
        print(_looked_at(page.searched, len(page.groups), page.next is None))
    else:
        columns = ("group", "state", "prompt", ">version", ">reward", ">± std", ">size", ">tokens", "steps")
        print_table(columns, map(_row, page.groups))
    if page.next is not None:
        print(f"more: --after {page.next}")


def _match_row(group: GroupSummary) -> list[object]:
    head = [group.group_id, group.policy_version, f"{group.reward_mean:.3f}"]
    if not (match := group.match):
        return [*head, None, None, None]
    return [*head, match.place, match.part, f"{match.before}{match.text}{match.behind}"]


def _looked_at(searched: SearchedGroups, matches: int, everything: bool) -> str:
    """Say how far a search came: one call reads a bounded number of groups and bytes."""
    size = f"{counted(searched.groups, 'group')} ({filesize.decimal(searched.bytes)})"
    start = "looked at all" if everything else "the search stopped early: looked at"
    return f"{start} {size}; {matches} with this text"


def _row(group: GroupSummary) -> list[object]:
    state = group.state + (f" ({group.reason})" if group.reason else "")
    reward, spread = f"{group.reward_mean:.3f}", f"{group.reward_std:.3f}"
    steps = ", ".join(map(str, group.batches)) or None
    sizes = [group.group_size, group.tokens]
    return [group.group_id, state, group.prompt_id, group.policy_version, reward, spread, *sizes, steps]


def show(
    run: RunName, group_id: Annotated[str, Parameter(help="Id of the group.")], /, options: Service = DEFAULT_SERVICE
) -> None:
    """Show one group with its rollouts: text where the service has a tokenizer, else token ids."""
    with client(run, options) as service:
        group = service.get_group(group_id)
    if options.json:
        print_json(group)
        return
    console, facts = Console(), msgspec.structs.asdict(group)
    rollouts = facts.pop("rollouts")
    kept = facts.pop("samples")
    del facts["preview"], facts["match"]
    facts["arrival_s"] = _time(group.arrival_s)
    print_table(("of the group", "value"), facts.items(), title=f"group {group.group_id}")
    for number, rollout in enumerate(rollouts or []):
        console.rule(f"rollout {number}: {_describe(rollout, len(rollout.completion_ids))}", align="left")
        console.print(Text(printable(_completion(rollout))))
    if rollouts is None:
        console.print("its bytes are freed" if group.detail is None else Text(printable(group.detail)))
        _print_samples(console, kept)


def samples(run: RunName, /, options: Annotated[SampleOptions, Parameter(name="*")] = SampleOptions()) -> None:
    """Show rollouts of trained steps that stay readable after their groups are freed, newest step first."""
    with client(run, options) as service:
        page = service.list_samples(options.step, options.before, options.contains, options.limit)
    if options.json:
        print_json(page)
        return
    _print_samples(Console(), page.samples)
    if not page.samples:
        print(f"nothing to show: {counted(page.steps, 'step')} with samples, {page.samples_per_step} of each")
    if page.next is not None:
        print(f"more: --before {page.next}")


def _print_samples(console: Console, samples: Sequence[Sample]) -> None:
    for sample in samples:
        head = (
            f"step {sample.step}, {sample.why}, group {sample.group_id}: {_describe(sample, sample.completion_tokens)}"
        )
        console.rule(Text(printable(head)), align="left")
        for pieces in (sample.prompt, sample.completion):
            parts = [piece if isinstance(piece, str) else " ".join(map(str, piece[:SHOWN_IDS])) for piece in pieces]
            console.print(Text(printable(" ... ".join(parts))))


def _describe(rollout: StoredRollout | Sample, tokens: int) -> str:
    parts = [f"reward {rollout.reward:g}", counted(tokens, "token")]
    parts += [f"advantage {rollout.advantage:.3f}"] if rollout.advantage is not None else []
    return ", ".join([*parts, *([rollout.finish_reason] if rollout.finish_reason else [])])


def _completion(rollout: StoredRollout) -> str:
    if isinstance(rollout.completion_text, str):
        text, length = rollout.completion_text[:SHOWN_LETTERS], len(rollout.completion_text)
        return text + (f" ... {counted(length - SHOWN_LETTERS, 'more letter')}" if length > SHOWN_LETTERS else "")
    ids = rollout.completion_ids
    more = f" ... {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    return " ".join(map(str, ids[:SHOWN_IDS])) + more


def failures(run: RunName, /, options: Service = DEFAULT_SERVICE) -> None:
    """Show the newest failure of each producer of a run, with its traceback; the newest first."""
    with client(run, options) as service:
        failures = ((producer.name, producer.failure) for producer in service.list_producers())
        failed = {name: failure for name, failure in failures if failure is not None}
    if options.json:
        print_json(failed)
        return
    console = Console()
    for name, failure in sorted(failed.items(), key=lambda pair: pair[1].age_s):
        where = "" if failure.prompt_index is None else f" at prompt {failure.prompt_index}"
        since = "no group stored since" if failure.lasts else "groups stored since"
        head = f"{name}: {failure.reason}{where} {failure.age_s:.0f} s ago, {since}"
        console.rule(Text(printable(head)), align="left")
        console.print(Text(printable(failure.traceback)))
    if not failed:
        print("nothing to show")


def ledger(run: RunName, /, options: Annotated[LedgerOptions, Parameter(name="*")] = LedgerOptions()) -> None:
    """Show the ledger of a run, newest first: batches, acks, publications, checkpoints, rewinds and changes."""
    records, before = _read_ledger(run, options)
    if options.json:
        print_json({"records": records, "before": before})
        return
    print_table((">entry", "time (UTC)", "type", "detail"), map(_record_row, records))
    if before is not None:
        print(f"more: --before {before}")


def _read_ledger(run: str, options: LedgerOptions) -> tuple[list[dict[str, Any]], int | None]:
    """Return records, newest first, and the `--before` of the next page; None on the last one."""
    with client(run, options) as service:
        end = options.before
        if end is None:
            path = f"/v1/runs/{check_run_name(run)}/flow"
            end = fetch_first(addresses_of(options.url), path, options.token, Flow)[1].ledger_entries + 1
        start: int | None = max(end - 1 - options.limit, 0)
        before = start + 1 if start else None
        records: list[dict[str, Any]] = []
        while start is not None and start < end - 1:  # a page may be shorter, by its bytes
            page = service.get_ledger(start, end - 1 - start)
            records += page.records
            start = page.next
    return records[::-1], before


def _record_row(record: dict[str, Any]) -> list[object]:
    rest = {name: value for name, value in record.items() if name not in ("entry", "type", "at_s")}
    if isinstance(rest.get("groups"), list):
        rest["groups"] = len(rest["groups"])
    if "config" in rest:
        rest["config"] = "see --json"
    detail = ", ".join(f"{name} {msgspec.json.encode(value).decode()}" for name, value in rest.items())
    short = detail if len(detail) <= SHOWN_DETAIL else f"{detail[:SHOWN_DETAIL]} ..."
    return [record["entry"], _time(record.get("at_s", 0.0)), record["type"], short]


def _time(at_s: float) -> str | None:
    """Write a time in seconds since the epoch for people; 0 = unknown."""
    return f"{datetime.datetime.fromtimestamp(at_s, datetime.UTC):%Y-%m-%d %H:%M:%S}" if at_s else None

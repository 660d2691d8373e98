"""State of a run as `GET /v1/runs/{run}` reports it: pure views of the fold and the tickets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from replaybuf.kernel.histograms import KINDS, GroupHistograms, Histogram
from replaybuf.kernel.index import EVICTED, IN_BATCHES, LIVE
from replaybuf.kernel.state import RunState
from replaybuf.kernel.tickets import TicketBook
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.group import hash_name
from replaybuf.wire.run_status import (
    AdapterStatus,
    Buckets,
    ChosenStrategy,
    Coverage,
    DropAges,
    GroupCounts,
    Histograms,
    LiveTotal,
    RunStatus,
    StoredCounts,
    TicketCounts,
)


class RunCounts(msgspec.Struct, frozen=True):
    """The part of a run's state that counts what became of groups and prompts."""

    histograms: Histograms
    coverage: Coverage


def histograms(tallies: GroupHistograms) -> Histograms:
    """Tell the tallies of a run, or of one adapter."""
    return Histograms(
        times_sampled={str(times): uses for times, uses in sorted(tallies.reuse.items())},
        age_at_use_s=_buckets(tallies.age_at_use, 1000),
        rollout_tokens={kind: _buckets(tallies.lengths[kind].mean) for kind in KINDS},
        longest_rollout_tokens={kind: _buckets(tallies.lengths[kind].longest) for kind in KINDS},
        dropped={
            reason: DropAges(_buckets(ages.versions), _buckets(ages.ms, 1000))
            for reason, ages in sorted(tallies.drop_ages.items())
            if ages.versions.count
        },
    )


def coverage(state: RunState, book: TicketBook) -> Coverage:
    """Tell what became of a run's prompts, of all adapters together."""
    return state.histograms.coverage(sum(book.next_index.values()), len(state.failed_prompts))


def _buckets(histogram: Histogram, unit: int = 1) -> Buckets:
    edges = [edge / unit if unit > 1 else edge for edge in histogram.edges]
    pairs = zip([*edges, None], histogram.counts, strict=True)
    total = histogram.sum / unit if unit > 1 else histogram.sum
    return Buckets(histogram.count, total, [(edge, count) for edge, count in pairs if count])


class AdapterSummary(msgspec.Struct, frozen=True):
    """What the index has of one adapter: groups by state, tokens of the live ones, what became of all."""

    groups: dict[str, Any]
    tokens_live: int
    histograms: Histograms


class IndexSummary(msgspec.Struct, frozen=True):
    """What the index of a run adds up to: groups by state, bytes of the live ones, histograms, all of each adapter."""

    groups: dict[str, Any]
    live_bytes: int
    histograms: Histograms
    adapters: dict[str, AdapterSummary]


def summarize_index(state: RunState) -> IndexSummary:
    """Add up the index of a run: the one part of its state that takes longer the more groups there are."""
    names = sorted(state.config.adapters) if state.config else []
    adapters = {name: summarize_adapter(name, state) for name in names}
    return IndexSummary(group_counts(state), state.live_bytes(), histograms(state.histograms), adapters)


def render_run_state(
    run: str,
    state: RunState,
    book: TicketBook,
    config: dict[str, Any],
    holds: IndexSummary,
    *,
    durability: str,
    rejected: dict[str, int],
    waits: WaitingAnswer | None,
    adapters_wait: Mapping[str, WaitingAnswer | None],
) -> RunStatus:
    """Render `GET /v1/runs/{run}`."""
    return RunStatus(
        run=run,
        state=state.state,
        paused_reason=state.config_reason if state.config_state == "paused" else None,
        strategy=ChosenStrategy(**config["strategy"]),
        durability=durability,
        epoch=state.epoch,
        generation=state.generation,
        step=state.step,
        published_version=state.published[""],
        groups=GroupCounts(**holds.groups, rejected=rejected),
        tokens=LiveTotal(live=state.live_totals().tokens),
        bytes=LiveTotal(live=holds.live_bytes),
        tickets=TicketCounts(
            issued=book.counts["issued"],
            out=book.out,
            expired=book.counts["expired"],
            returned=book.counts["returned"],
            failed=len(state.failed_prompts),
        ),
        staleness={str(age): number for age, number in sorted(state.used_staleness.items())},
        histograms=holds.histograms,
        coverage=coverage(state, book),
        waiting=waits,
        adapters={
            name: render_adapter(name, state, book, one, adapters_wait[name]) for name, one in holds.adapters.items()
        },
        checkpoints=state.checkpoints,
        oldest_step=state.oldest_step,
        config=config,
    )


def group_counts(state: RunState, adapter: str = "") -> dict[str, Any]:
    """Count groups, of an adapter, by where they stand.

    stored = live + in_batches + retired + sum(evicted) + dead_lettered
    """
    index, counted = state.index, state.counts_of(adapter) if adapter else state
    states = index["state"][index["adapter"] == hash_name(adapter)] if adapter else index["state"]
    by_state = np.bincount(states, minlength=EVICTED + 1)
    return {
        "stored": counted.stored,
        "live": int(by_state[LIVE]),
        "in_batches": int(by_state[IN_BATCHES]),
        "retired": counted.retired,
        "evicted": {reason: number for reason, number in sorted(counted.evicted.items()) if number},
        "dead_lettered": sum(counted.dead_lettered.values()),
    }


def summarize_adapter(name: str, state: RunState) -> AdapterSummary:
    """Add up what the index has of one adapter."""
    live = (state.index["adapter"] == hash_name(name)) & (state.index["state"] == LIVE)
    tokens_live = int(state.index["tokens"][live].sum(dtype=np.int64))
    return AdapterSummary(group_counts(state, name), tokens_live, histograms(state.counts_of(name).tallies))


def render_adapter(
    name: str, state: RunState, book: TicketBook, holds: AdapterSummary, waits: WaitingAnswer | None
) -> AdapterStatus:
    """Render what a run has of one adapter."""
    standing = state.counts_of(name)
    return AdapterStatus(
        step=state.own_step(state.step, name),
        published_version=state.published[name],
        weights_uri=state.weights_uri[name],
        groups=StoredCounts(**holds.groups),
        tokens_live=holds.tokens_live,
        tokens_used=standing.tokens_used,
        staleness={str(age): number for age, number in sorted(standing.used_staleness.items())},
        histograms=holds.histograms,
        tickets_out=book.out_of(name),
        progress=state.progress_at(state.next_step, name),
        waiting=waits,
    )

"""State of a run as `GET /v1/runs/{run}` reports it, from the fold and the tickets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from replaybuf.kernel.figures.histograms import KINDS, GroupHistograms, Histogram
from replaybuf.kernel.rows.index import EVICTED, IN_BATCHES, LIVE
from replaybuf.kernel.state.group_counts import AdapterCounts
from replaybuf.kernel.state.lookups import explain_failed_share, read_failed_share
from replaybuf.kernel.state.pool import NO_COUNTS
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.tickets import TicketBook
from replaybuf.service.presence import Presence
from replaybuf.wire.answer.run_status import (
    AdapterStatus,
    Buckets,
    ChosenStrategy,
    Coverage,
    DropAges,
    FailedRule,
    GroupCounts,
    Histograms,
    LiveTotal,
    ProducersPresence,
    Progress,
    RunStatus,
    SpillStatus,
    StoredCounts,
    TicketCounts,
    TrainerPresence,
)
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.group import hash_name


def render_histograms(histograms: GroupHistograms) -> Histograms:
    """Render the histograms of a run, or of one adapter."""
    return Histograms(
        times_sampled={str(times): uses for times, uses in sorted(histograms.reuse.items())},
        age_at_use_s=_buckets(histograms.age_at_use, 1000),
        rollout_tokens={kind: _buckets(histograms.lengths[kind].mean) for kind in KINDS},
        longest_rollout_tokens={kind: _buckets(histograms.lengths[kind].longest) for kind in KINDS},
        dropped={
            reason: DropAges(_buckets(ages.versions), _buckets(ages.ms, 1000))
            for reason, ages in sorted(histograms.drop_ages.items())
            if ages.versions.count
        },
    )


def _buckets(histogram: Histogram, unit: int = 1) -> Buckets:
    edges = [edge / unit if unit > 1 else edge for edge in histogram.edges]
    pairs = zip([*edges, None], histogram.counts, strict=True)
    total = histogram.sum / unit if unit > 1 else histogram.sum
    return Buckets(histogram.count, total, [(edge, count) for edge, count in pairs if count])


NO_HISTOGRAMS = render_histograms(NO_COUNTS.histograms)


def coverage(state: RunState, book: TicketBook, sources: Iterable[str] = ()) -> Coverage:
    """Count a run's prompts by their fate, of all adapters together; a reissue counts as another prompt.

    `sources`: names of sources that are known, beside those of the configuration.
    """
    issued = sum(book.next_index.values()) + state.reissues.total
    names = [*sources, *(state.config.stale_policies if state.config else ())]
    return state.totals.histograms.coverage(
        issued, len(state.failed.prompts), {hash_name(name): name for name in names}
    )


class AdapterSummary(msgspec.Struct, frozen=True):
    """Groups of one adapter, or of a run, by state; tokens of the live ones; histograms."""

    groups: dict[str, Any]
    tokens_live: int
    histograms: Histograms


class IndexSummary(msgspec.Struct, frozen=True):
    """Sums over the index of a run: they take longer the more groups there are, so callers cache them."""

    run: AdapterSummary
    live_bytes: int
    adapters: dict[str, AdapterSummary]


def summarize_index(state: RunState) -> IndexSummary:
    """Sum up the index of a run, and of each named adapter."""
    names = sorted(state.config.adapters) if state.config else []
    return IndexSummary(
        _summarize(state), state.pool.live.totals().frame_bytes, {name: _summarize(state, name) for name in names}
    )


def _summarize(state: RunState, adapter: str | None = None) -> AdapterSummary:
    counts = state.totals if adapter is None else state.pool.counts_of(adapter)
    tokens_live = state.pool.live.totals(adapter).tokens
    histograms = NO_HISTOGRAMS if counts is NO_COUNTS else render_histograms(counts.histograms)
    return AdapterSummary(group_counts(state, adapter), tokens_live, histograms)


def group_counts(state: RunState, adapter: str | None = None) -> dict[str, Any]:
    """Count the groups of an adapter, or of the run, by state.

    stored = live + in_batches + retired + sum(evicted) + dead_lettered
    """
    states, counts = state.index["state"], state.totals
    if adapter is not None:
        states, counts = states[state.index["adapter"] == hash_name(adapter)], state.pool.counts_of(adapter)
    by_state = np.bincount(states, minlength=EVICTED + 1)
    return {
        "stored": counts.stored,
        "live": int(by_state[LIVE]),
        "in_batches": int(by_state[IN_BATCHES]),
        "retired": counts.retired,
        "evicted": {reason: number for reason, number in sorted(counts.evicted.items()) if number},
        "dead_lettered": counts.dead_lettered.total(),
        "partial": count_partial(state, adapter),
    }


def count_partial(state: RunState, adapter: str | None = None) -> int:
    """Count the groups of an adapter, or of the run, that were stored with fewer rollouts than `group_size`."""
    return state.pool.count_partial(state.config.group_size if state.config else None, adapter)


def _staleness(counts: AdapterCounts) -> dict[str, int]:
    return {str(age): number for age, number in sorted(counts.used_staleness.items())}


def render_run_state(
    run: str,
    state: RunState,
    book: TicketBook,
    config: dict[str, Any],
    index: IndexSummary,
    *,
    durability: str,
    rejected: dict[str, int],
    presence: Presence,
    spill: SpillStatus | None,
    waits: WaitingAnswer | None,
    waiting_s: float | None,
    adapters_wait: Mapping[str, WaitingAnswer | None],
) -> RunStatus:
    """Render `GET /v1/runs/{run}`."""
    adapters = {
        name: _render_adapter(name, state, book, summary, adapters_wait[name])
        for name, summary in index.adapters.items()
    }
    return RunStatus(
        run=run,
        state=state.phase,
        paused_reason=state.phase_reason if state.config_phase == "paused" else None,
        strategy=ChosenStrategy(**config["strategy"]),
        durability=durability,
        epoch=state.epoch,
        trainer=TrainerPresence(last_seen_s=round(presence.trainer_s, 3), epoch=state.epoch) if state.epoch else None,
        producers=_producers(presence),
        failed_prompts=_failed_prompts(state),
        generation=state.generation,
        step=state.step,
        published_version=state.published[""],
        groups=GroupCounts(**index.run.groups, rejected=rejected),
        tokens=LiveTotal(live=index.run.tokens_live),
        bytes=LiveTotal(live=index.live_bytes),
        spill=spill,
        tickets=TicketCounts(
            issued=book.counts["issued"],
            out=book.out,
            expired=book.counts["expired"],
            returned=book.counts["returned"],
            failed=len(state.failed.prompts),
            reissued=state.reissues.total,
            awaiting_reissue=len(state.reissues.waiting),
        ),
        staleness=_staleness(state.totals),
        histograms=index.run.histograms,
        coverage=coverage(state, book, presence.sources),
        reuse=state.totals.histograms.reuse_figures(),
        waiting=waits,
        waiting_s=waiting_s,
        adapters=adapters,
        checkpoints=state.checkpoints,
        oldest_step=state.oldest_step,
        revision=state.figures.changes.revision,
        config=config,
    )


def _failed_prompts(state: RunState) -> FailedRule | None:
    share = read_failed_share(state)
    if share is None or state.config is None or state.config.tickets.max_failed_share is None:
        return None
    return FailedRule(
        failed=share.failed,
        ended=share.ended,
        share=round(share.share, 4),
        max_share=state.config.tickets.max_failed_share,
        alarm=explain_failed_share(state),
    )


def _producers(presence: Presence) -> ProducersPresence:
    seen_s = presence.producers_s
    return ProducersPresence(
        last_seen_s=None if seen_s is None else round(seen_s, 3),
        known=presence.producers_known,
        gone=len(presence.producers.list_gone()),
    )


def _render_adapter(
    name: str, state: RunState, book: TicketBook, index: AdapterSummary, waits: WaitingAnswer | None
) -> AdapterStatus:
    counts, progress = state.pool.counts_of(name), state.progress_at(state.next_step, name)
    size = state.config.groups_per_batch_of(name) if state.config else None
    return AdapterStatus(
        step=state.own_step(state.step, name),
        published_version=state.published[name],
        weights_uri=state.weights_uri[name],
        groups=StoredCounts(**index.groups),
        tokens_live=index.tokens_live,
        tokens_used=counts.tokens_used,
        staleness=_staleness(counts),
        histograms=index.histograms,
        tickets_out=book.out_of(name),
        progress=Progress(progress.steps, progress.groups, size or 0),
        waiting=waits,
    )

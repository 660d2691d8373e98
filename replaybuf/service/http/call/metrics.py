"""`/metrics`: reads every metric of the table from the state of the runs when it is scraped."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import platform
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from replaybuf.kernel.figures.histograms import Histogram
from replaybuf.kernel.figures.step_figures import StepFigures
from replaybuf.kernel.rows.index import IN_BATCHES
from replaybuf.kernel.state.lookups import explain_failed_share, read_failed_share
from replaybuf.metric_push import Identity, Pusher
from replaybuf.service.host import Service
from replaybuf.service.http.call.metric_text import MetricText
from replaybuf.service.report.status import count_partial, coverage
from replaybuf.service.run.next_batch import OUTCOMES
from replaybuf.service.run.served_run import Run
from replaybuf.service.traffic import REFUSALS
from replaybuf.version import __version__
from replaybuf.wire.wait_reasons import REASONS

TIMES_SAMPLED_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Upper edges of the buckets of `times_sampled`."""
MOST_STALENESS = 64
"""Greatest staleness with a label of its own."""
KEPT_S = 300.0
"""A finished run leaves the metrics so long after its last change: its last values are scraped by then."""
READ_S = 10.0
"""Time limit to read the metrics for a push."""
_PROMPT_STATES = ("trained", "dropped", "failed", "pending")
_RUN_STATES = ("running", "paused", "finished")

_RUN_VALUES: dict[str, Callable[[Run], float]] = {
    "groups_retired": lambda run: run.state.totals.retired,
    "groups_dead_lettered": lambda run: run.state.totals.dead_lettered.total(),
    "groups_partial": lambda run: count_partial(run.state),
    "groups_duplicate": lambda run: run.side_state.duplicates,
    "rollouts_truncated_groups": lambda run: run.appends.truncated,
    "tokens_stored": lambda run: run.arrivals.tokens,
    "tokens_masked": lambda run: run.state.masked_tokens,
    "admission_waiting": lambda run: run.admission_plugins.waiting,
    "admission_deferred": lambda run: run.admission_plugins.deferred,
    "tickets_issued": lambda run: run.book.counts["issued"],
    "tickets_expired": lambda run: run.book.counts["expired"],
    "tickets_returned": lambda run: run.book.counts["returned"],
    "prompts_failed": lambda run: len(run.state.failed.prompts),
    "prompts_reissued": lambda run: run.state.reissues.total,
    "groups_in_batches": lambda run: run.state.count(IN_BATCHES),
    "bytes_live": lambda run: run.state.pool.live.totals().frame_bytes,
    "groups_per_second": lambda run: run.measured.groups_per_s,
    "steps_per_second": lambda run: run.measured.steps_per_s,
    "step_seconds": lambda run: run.measured.step_s,
    "group_seconds": lambda run: run.measured.group_s,
    "step": lambda run: run.state.step,
    "checkpoint_step": lambda run: max(run.state.checkpoints, default=0),
    "epoch": lambda run: run.state.epoch,
    "generation": lambda run: run.state.generation,
    "leading": lambda run: float(run.journal.leading),
    "cursor_groups_missed": lambda run: run.cursors.missed,
    "index_bytes": lambda run: run.state.index.nbytes,
}
"""Metrics with the label `run` alone."""
_PROCESS = CollectorRegistry()
ProcessCollector(registry=_PROCESS)
"""Processor time, memory and open files of this process, under the names that every Prometheus client uses."""


def _read_run(text: MetricText, name: str, run: Run) -> None:
    state = run.state
    for metric, read in _RUN_VALUES.items():
        text.add(metric, read(run), name)
    for reason in REASONS:
        text.add("waiting_seconds", run.batches.waits.total_s.get(reason, 0.0), name, reason)
    for outcome in OUTCOMES:
        text.add("batches_prepared", run.batches.next_batch.outcomes[outcome], name, outcome)
    if (failed := read_failed_share(state)) is not None:
        text.add("prompts_failed_share", failed.share, name)
        text.add("prompts_failed_alarm", float(explain_failed_share(state) is not None), name)
    _read_newest_batch(text, name, state.figures)
    _read_limits(text, name, run)
    _read_presence(text, name, run)
    _read_spill(text, name, run)
    _read_evaluations(text, name, run)
    for cursor in run.cursors.describe():
        text.add("cursor_lag_groups", cursor.lag, name, cursor.name)
    for value in _RUN_STATES:
        text.add("run_state", float(state.phase == value), name, value)
    outcomes = coverage(state, run.book)
    for prompt_state in _PROMPT_STATES:
        text.add("prompts", getattr(outcomes, prompt_state), name, prompt_state)
    _read_histograms(text, name, run)


def _by_staleness(uses: Counter[int]) -> list[tuple[str, int]]:
    """Return uses by label. Labels are bounded: a strategy without a limit could make one per policy version."""
    near = [(str(age), count) for age, count in sorted(uses.items()) if age <= MOST_STALENESS]
    far = sum(count for age, count in uses.items() if age > MOST_STALENESS)
    return [*near, (f"{MOST_STALENESS + 1}+", far)] if far else near


def _read_newest_batch(text: MetricText, name: str, figures: StepFigures) -> None:
    if not figures.rows:
        return
    newest = figures.rows[-1]
    text.add("batch_reward_mean", newest.reward_mean, name)
    text.add("batch_reward_std", newest.reward_std, name)
    text.add("batch_reward_min", newest.reward_min, name)
    text.add("batch_reward_max", newest.reward_max, name)
    text.add("batch_fill_ratio", newest.fill, name)
    # The newest batches may be assembled ahead and have no ack yet.
    if acked_s := next((row.acked_s for row in reversed(figures.rows) if row.acked_s), 0.0):
        text.add("step_timestamp_seconds", acked_s, name)


def _read_limits(text: MetricText, name: str, run: Run) -> None:
    limits, live = run.journal.config.limits, run.state.pool.live.totals()
    for limit, used, bound in (
        ("max_tokens_live", live.tokens, limits.max_tokens_live),
        ("max_bytes_live", live.frame_bytes, limits.max_bytes_live),
        ("max_bytes_in_memory", run.spill.in_memory, limits.max_bytes_in_memory),
    ):
        if bound is not None:
            text.add("limit_used_ratio", used / bound, name, limit)


def _read_presence(text: MetricText, name: str, run: Run) -> None:
    presence = run.journal.presence
    if run.state.epoch:
        text.add("trainer_last_seen_seconds", presence.trainer_s, name)
    if (producers_s := presence.producers_s) is not None:
        text.add("producers_last_seen_seconds", producers_s, name)
    text.add("producers_known", presence.producers_known, name)
    text.add("producers_gone", len(presence.producers.list_gone()), name)


def _read_evaluations(text: MetricText, name: str, run: Run) -> None:
    if not run.journal.leading:  # another server records the results now
        return
    for result in run.evaluations.newest.values():
        labels = (name, result.name, result.adapter)
        text.add("evaluation_reward_mean", result.reward_mean, *labels)
        if result.standard_error is not None:
            text.add("evaluation_standard_error", result.standard_error, *labels)
        text.add("evaluation_version", result.version, *labels)


def _read_spill(text: MetricText, name: str, run: Run) -> None:
    status, files = run.spill.describe(), run.spill.files
    if status is None or files is None:
        return
    text.add("bytes_in_memory", status.bytes_in_memory, name)
    text.add("bytes_spilled", status.bytes, name)
    text.add("groups_spilled", status.groups, name)
    text.add("spill_moves", run.spill.moved, name)
    text.add("spill_reads", files.reads, name)
    text.add("spill_failures", files.failures, name)
    text.add("spill_up", float(status.failing is None), name)


def _read_histograms(text: MetricText, name: str, run: Run) -> None:
    histograms = run.state.totals.histograms
    times_sampled = Histogram(TIMES_SAMPLED_EDGES)
    for times, uses in histograms.reuse.items():
        times_sampled.add(np.array([times]), uses)
    text.add_histogram("group_times_sampled", times_sampled, 1, name)
    text.add_histogram("group_age_at_use_seconds", histograms.age_at_use, 1000, name)
    for kind, lengths in histograms.lengths.items():
        text.add_histogram("longest_rollout_tokens", lengths.longest, 1, name, kind)
    for reason, ages in sorted(histograms.drop_ages.items()):
        text.add_histogram("dropped_age_versions", ages.versions, 1, name, reason)
        text.add_histogram("dropped_age_seconds", ages.ms, 1000, name, reason)
    for admission, took in run.admission_plugins.check_times():
        text.add_histogram("admission_seconds", took, 1_000_000, name, admission)


def _read_adapters(text: MetricText, name: str, run: Run) -> None:
    """Read what is counted by adapter: also of those that left the configuration, so that no sum goes back.

    A run without adapters has one, without a name. A rejected group may name any adapter, and counts for none.
    """
    state, named = run.state, run.journal.config.adapters
    for adapter in sorted(state.published):
        counts, live, labels = state.pool.counts_of(adapter), state.pool.live.totals(adapter), (name, adapter)
        rejected = Counter() if adapter else run.side_state.rejected
        for reason, count in sorted((rejected + counts.evicted + counts.dead_lettered).items()):
            text.add("groups_dropped", count, *labels, reason)
        if not adapter and named and not counts.stored:
            continue
        text.add("groups_stored", counts.stored, *labels)
        text.add("groups_used", counts.groups_used, *labels)
        text.add("tokens_used", counts.tokens_used, *labels)
        text.add("groups_live", live.groups, *labels)
        text.add("tokens_live", live.tokens, *labels)
        text.add("tickets_out", run.book.out_of(adapter), *labels)
        text.add("published_version", state.published[adapter], *labels)
        for age, count in _by_staleness(counts.used_staleness):
            text.add("groups_used_by_staleness", count, *labels, age)
        for kind, lengths in counts.histograms.lengths.items():
            text.add_histogram("rollout_tokens", lengths.mean, 1, *labels, kind)
    reasons = run.state_cache.waits().adapters if named else {}
    for adapter, options in sorted(named.items()):
        if waiting := reasons[adapter]:
            text.add("own_batch_waiting", 1, name, adapter, waiting.reason)
        text.add("own_batches_acked", state.own_step(state.step, adapter), name, adapter)
        text.add("own_batch_groups", state.progress_at(state.next_step, adapter).groups, name, adapter)
        text.add("own_batch_groups_full", options.groups_per_batch, name, adapter)


def _read_server(text: MetricText, service: Service) -> None:
    for reason in REFUSALS:
        text.add("requests_refused", service.traffic.refused[reason], reason)
    text.add("connections", service.traffic.connections)
    text.add("body_bytes", service.traffic.body_bytes)
    report, connection = service.report, service.store.connection
    text.add("build_info", 1, __version__, platform.python_version())
    text.add("durability_strict", report is not None and report.durability == "strict")
    text.add("durability_met", report is not None and report.meets_policy)
    text.add("writes_unconfirmed", connection.unconfirmed)
    text.add("redis_up", service.outage is None)
    text.add("redis_replicas", report.replicas if report else 0)
    text.add("replicas_confirmed", connection.replicas_confirmed)
    text.add("redis_memory_used_bytes", report.used_memory_bytes if report else 0)
    text.add("redis_memory_max_bytes", report.max_memory_bytes if report else 0)
    text.add_histogram("loop_hold_seconds", service.loop_watch.holds, 1_000_000)


def _pieces(service: Service) -> Iterator[Callable[[MetricText], None]]:
    """Yield what reads the metrics of each run, of its calls, and of the server: less than a millisecond each."""
    answered: defaultdict[str, list[tuple[str, str, int]]] = defaultdict(list)
    took: defaultdict[str, list[tuple[str, Histogram]]] = defaultdict(list)
    for (run, call, status), count in sorted(service.traffic.answered.items()):
        answered[run].append((call, str(status), count))
    for (run, call), histogram in sorted(service.traffic.took.items()):
        took[run].append((call, histogram))
    left_out = {name for name, run in service.runs.items() if run.state.phase == "finished" and run.quiet(KEPT_S)}
    for name, served in sorted(service.runs.items()):
        if name in left_out:
            continue
        yield functools.partial(_read_run, name=name, run=served)
        yield functools.partial(_read_adapters, name=name, run=served)
    for name in sorted((answered.keys() | took.keys()) - left_out):
        yield functools.partial(_read_traffic, name=name, answered=answered[name], took=took[name])
    yield functools.partial(_read_server, service=service)


def _read_traffic(
    text: MetricText, name: str, answered: list[tuple[str, str, int]], took: list[tuple[str, Histogram]]
) -> None:
    for call, status, count in answered:
        text.add("requests", count, name, call, status)
    for call, histogram in took:
        text.add_histogram("request_seconds", histogram, 1_000_000, name, call)


class Exposition:
    """Metrics of a service as Prometheus text. Scrapes that come while one is in progress get its text."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._scrape: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        """Read all metrics, or wait for the scrape in progress."""
        if self._scrape is None or self._scrape.done():
            self._scrape = asyncio.create_task(_read(self._service))
        return await asyncio.shield(self._scrape)  # a caller that leaves must not end it for the others

    @contextlib.asynccontextmanager
    async def pushed(self, url: str | None, instance: str, every_s: float) -> AsyncIterator[None]:
        """Push the metrics to a server, if there is one, until the end of the body. Raises as `Pusher`."""
        if url is None:
            yield
            return
        loop = asyncio.get_running_loop()

        def read() -> bytes:
            return asyncio.run_coroutine_threadsafe(self.text(), loop).result(READ_S)

        pusher = Pusher(url, Identity("replaybuf", instance), read, every_s)
        try:
            yield
        finally:
            await asyncio.to_thread(pusher.close)  # the last push reads in this loop


async def _read(service: Service) -> bytes:
    """Read all metrics piece by piece; other calls go on in between."""
    text = MetricText()
    for read in _pieces(service):
        read(text)
        await asyncio.sleep(0)
    return await asyncio.to_thread(_render, text)


def _render(text: MetricText) -> bytes:
    return text.render() + generate_latest(_PROCESS)

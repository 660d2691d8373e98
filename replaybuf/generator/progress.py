"""Counters of a generator, and its status: one line in the log and one JSON line in the metrics file."""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from replaybuf.errors import counted
from replaybuf.generator.failures import LOST_ROLLOUTS
from replaybuf.generator.fleet import ServerStatus
from replaybuf.generator.recent import RecentGroups, RecentMeans
from replaybuf.wire.answer.evaluations import EvaluationRequest
from replaybuf.wire.decoding import prepared
from replaybuf.wire.group import Group

logger = logging.getLogger(__name__)


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Last result of a held-out set: oldest version that sampled it, mean reward, completions, failed prompts."""

    version: int
    reward_mean: float
    rollouts: int
    failed: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A generator's numbers at one moment. Counts are since its start; rates and means since the last status.

    `time` in seconds since the epoch; `groups`, `rollouts`, `generated_tokens` (completion tokens) of stored groups,
    `groups_partial` of which lost rollouts to faults; `given_back`: returned tickets by reason; `tokens_saved`:
    estimate of the tokens that `groups_aborted` lacked; `reward_mean` None where nothing was stored; `waiting`: why the
    generator does less than it could; `engines`: status of every server, `stages` those of the stages by column;
    `evaluations`: last result by held-out set; `recent`: means over the newest groups.
    """

    time: float
    groups: int
    rollouts: int
    generated_tokens: int
    reward_mean: float | None
    waiting: str | None
    rollouts_per_s: float
    tokens_per_s: float
    duplicates: int
    given_back: dict[str, int]
    groups_aborted: int = 0
    tokens_saved: int = 0
    groups_partial: int = 0
    recent: RecentMeans | None = None
    engines: tuple[ServerStatus, ...] = ()
    stages: dict[str, tuple[ServerStatus, ...]] = {}
    evaluations: dict[str, EvaluationSummary] = {}


class Durations:
    """Histogram of durations: `counts[i]` of those in (EDGES_S[i - 1], EDGES_S[i]]; the last of those above."""

    EDGES_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.EDGES_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect.bisect_left(self.EDGES_S, seconds)] += 1
        self.sum_s += seconds


class Progress:
    """Counts stored groups and returned tickets since the start, at `now_s` of a clock that does not jump.

    `reward_s`: time to score a group; `group_s`: time from ticket to append; `sampled_version`: newest version in a
    stored group, None before the first one; `prompts_dropped`: prompts that filters dropped at load, by reason.
    """

    def __init__(self, now_s: float) -> None:
        self.prompts_dropped: Counter[str] = Counter()
        self.groups = 0
        self.groups_partial = 0
        self.rollouts_lost: Counter[str] = Counter()
        self.rollouts = 0
        self.generated_tokens = 0
        self.duplicates = 0
        self.given_back: Counter[str] = Counter()
        self.groups_aborted = 0
        self.tokens_saved = 0
        self.reward_s = Durations()
        self.group_s = Durations()
        self.recent = RecentGroups()
        self.sampled_version: int | None = None
        self.evaluations: dict[str, EvaluationSummary] = {}
        self.evaluations_failed = 0
        self._last_s = now_s
        self._last_rollouts = 0
        self._last_tokens = 0
        self._reward_sum = 0.0

    def record_stored(self, group: Group, took_s: float) -> None:
        """Count one stored group, `took_s` seconds after its ticket."""
        self.group_s.add(took_s)
        self.recent.add(group)
        self.sampled_version = max(self.sampled_version or 0, group.policy_version_max)
        self.groups += 1
        lost = group.metadata.get(LOST_ROLLOUTS, {})
        self.groups_partial += bool(lost)
        self.rollouts_lost.update(lost)
        self.rollouts += group.rollouts
        self.generated_tokens += int(group.completion_lengths.sum())
        self._reward_sum += float(group.rewards.sum())

    def record_aborted(self, rollouts: int, max_tokens: int, seconds: float) -> None:
        """Count a group that was aborted `seconds` after its ticket, and estimate the tokens that it lacked."""
        self.groups_aborted += 1
        self.tokens_saved += round(self._lacked(rollouts, max_tokens, seconds))

    def _lacked(self, rollouts: int, max_tokens: int, seconds: float) -> float:
        """Estimate the tokens that an aborted group lacked: its rollouts are as long as those of the newest groups.

        With l = tokens of a rollout after `seconds` at the mean pace of stored groups, and L = a length of a newest
        rollout: rollouts * mean(max(L - l, 0)). In a group that outlasts them, one rollout still samples. Its length
        is between the longest L and `max_tokens`; it lacks half of that distance, and at least one token.
        """
        groups = self.recent.lengths()
        if not groups:
            return rollouts * max_tokens
        longest = [int(lengths.max()) for lengths in groups]
        pace = float(np.mean(longest)) * self.groups / max(self.group_s.sum_s, 1e-9)
        rest = np.maximum(np.concatenate(groups) - seconds * pace, 0.0)
        return float(rollouts * rest.mean()) if rest.any() else max((max_tokens - max(longest)) / 2, 1.0)

    def record_evaluation(self, result: EvaluationRequest) -> None:
        """Keep the result of an evaluation."""
        self.evaluations[result.name] = msgspec.convert(result, prepared(EvaluationSummary), from_attributes=True)

    def status(
        self,
        now_s: float,
        wall_s: float,
        waiting: str | None,
        engines: tuple[ServerStatus, ...] = (),
        stages: dict[str, tuple[ServerStatus, ...]] | None = None,
    ) -> Status:
        """Return the status, and start the next interval. `now_s`: as at the start; `wall_s`: since the epoch."""
        seconds = max(now_s - self._last_s, 1e-9)
        rollouts, tokens = self.rollouts - self._last_rollouts, self.generated_tokens - self._last_tokens
        status = Status(
            time=wall_s,
            groups=self.groups,
            rollouts=self.rollouts,
            generated_tokens=self.generated_tokens,
            reward_mean=self._reward_sum / rollouts if rollouts else None,
            waiting=waiting,
            rollouts_per_s=rollouts / seconds,
            tokens_per_s=tokens / seconds,
            duplicates=self.duplicates,
            given_back=dict(self.given_back),
            groups_aborted=self.groups_aborted,
            tokens_saved=self.tokens_saved,
            groups_partial=self.groups_partial,
            recent=self.recent.means(),
            engines=engines,
            stages=stages or {},
            evaluations=dict(self.evaluations),
        )
        self._last_s, self._last_rollouts, self._last_tokens = now_s, self.rollouts, self.generated_tokens
        self._reward_sum = 0.0
        return status


def log_status(status: Status) -> None:
    """Log one status line."""
    logger.info(
        "status: %s, %.1f rollouts/s, %.0f tokens/s, reward %s%s, tickets returned %d%s%s%s",
        counted(status.groups, "group"),
        status.rollouts_per_s,
        status.tokens_per_s,
        "-" if status.reward_mean is None else f"{status.reward_mean:.3f}",
        _recent_text(status.recent),
        sum(status.given_back.values()),
        f", partial groups {status.groups_partial}" if status.groups_partial else "",
        f", groups aborted {status.groups_aborted}, tokens saved {status.tokens_saved}"
        if status.groups_aborted
        else "",
        f", waiting: {status.waiting}" if status.waiting else "",
    )


def _recent_text(recent: RecentMeans | None) -> str:
    if recent is None:
        return ""
    kl = "".join(f", KL to {name} {value:.4f}" for name, value in recent.kl.items())
    groups = counted(recent.groups, "group")
    return f", last {groups}: reward {recent.reward:.3f}, length {recent.completion_tokens:.1f}{kl}"


def append_status(file: Path, status: Status) -> None:
    """Append one JSON line to a file."""
    with file.open("ab") as stream:
        stream.write(msgspec.json.encode(status) + b"\n")

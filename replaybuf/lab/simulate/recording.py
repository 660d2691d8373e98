"""A recorded run as input of the simulator: sizes of its groups and times of its ledger, without payloads.

Read from a service over HTTP (pages of `GET groups` and `GET ledger`) or from a saved file. `derive` estimates what the
ledger does not hold; the report names the resulting workload.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.client.client import Client
from replaybuf.errors import Invalid, Malformed, NotFound, counted
from replaybuf.files import RECORDING_BYTES, read_bounded
from replaybuf.kernel.rows.index import ENTRY
from replaybuf.lab.simulate.latencies import LEAST_S, Latencies, measure_latencies
from replaybuf.lab.simulate.workload import BLOCK, DEFAULT_GROUP_SIZE, LONGEST_S, Block, Supply, Workload
from replaybuf.wire.config import RunConfig

PAGE = 1000
_FEWEST_GROUPS = 8
_BUSY_PERCENTILE = 75
_COPIED = ("tokens", "longest_tokens", "reward_mean", "reward_std", "advantage_abs_mean", "truncated", "source")


class RecordedGroup(msgspec.Struct, frozen=True):
    """One group as `GET groups` reports it; `ticket_s`: when its ticket was issued, None = not known."""

    number: int
    policy_version: int
    tokens: int
    arrival_s: float
    group_size: int
    longest_tokens: int
    prompt_index: int | None = None
    reward_mean: float = 0.0
    reward_std: float = 0.0
    advantage_abs_mean: float = 0.0
    truncated: int = 0
    source: int = 0
    ticket_s: float | None = None


class Recording(msgspec.Struct, frozen=True):
    """Configuration, ticket counts, groups in the order they were stored, ledger records.

    By the last heartbeats of the producers:

    - `slots`: the most groups that they generate at a time; 0 = they reported none
    - `held_back`: producers by what held them back
    """

    run: str
    config: RunConfig
    tickets: dict[str, int]
    groups: list[RecordedGroup]
    records: list[dict[str, Any]]
    slots: int = 0
    held_back: dict[str, int] = {}


def read_service(url: str, run: str, token: str | None) -> Recording:
    """Read a run from a service. Raises what the client raises, `NotFound` if the run has too few groups."""
    with Client(url, run, token=token) as client:
        status, producers = client.get_run(), client.list_producers()
        raw: dict[str, Any] = {
            "run": run,
            "config": status.config,
            "tickets": msgspec.to_builtins(status.tickets),
            "groups": list(_pages(client, "groups")),
            "records": list(_pages(client, "records")),
            "slots": sum(producer.slots or 0 for producer in producers),
            "held_back": Counter(producer.held_back_by for producer in producers if producer.held_back_by),
        }
    try:
        return _checked(msgspec.convert(raw, Recording))
    except msgspec.ValidationError as error:
        raise Malformed(f"run {run} at {url} does not fit this release: {error}", name="from") from error


def _pages(client: Client, kind: str) -> Iterator[dict[str, Any]]:
    after: int | None = 0
    while after is not None:
        if kind == "records":
            records = client.get_ledger(after, PAGE)
            yield from records.records
            after = records.next
        else:
            groups = client.list_groups(limit=PAGE, after=after)
            yield from msgspec.to_builtins(groups.groups)
            after = groups.next


def read_file(path: Path) -> Recording:
    """Read a saved recording. Raises `Invalid` if the file is not a recording."""
    try:
        return _checked(msgspec.json.decode(read_bounded(path, RECORDING_BYTES), type=Recording))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"recording {path} cannot be read: {error}", name="from", value=str(path)) from error


def save(recording: Recording, path: Path) -> None:
    """Write a recording as JSON. Raises `Invalid` if `path` cannot be written."""
    try:
        path.write_bytes(msgspec.json.encode(recording))
    except OSError as error:
        raise Invalid(
            f"recording {path} cannot be written: {error.strerror}", name="save_recording", value=str(path)
        ) from error


def _checked(recording: Recording) -> Recording:
    if len(recording.groups) < _FEWEST_GROUPS:
        raise NotFound(
            f"run {recording.run} has {counted(len(recording.groups), 'group')}; at least {_FEWEST_GROUPS} are "
            "needed to learn from them",
            name="groups",
            value=len(recording.groups),
            bound=_FEWEST_GROUPS,
        )
    return recording


@dataclasses.dataclass(frozen=True, slots=True)
class _Times:
    """Times since the last rewind, by step or version; seconds since the epoch.

    `waited`: seconds that the trainer waited for a step, empty in a recording without them.
    """

    batches: dict[int, tuple[float, int]]
    acks: dict[int, float]
    published: dict[int, float]
    waited: dict[int, float]


def derive(recording: Recording, workload: Workload) -> Workload:
    """Estimate speeds and failures from a recording; fields that were given explicitly are kept.

    - A step takes the time between two publications without waits: fit train_s + train_token_s · tokens by least
      squares, both at least 0. publish_s is the median from ack to publication.
    - Each group has a latency of its own, from its ticket to its arrival (`latencies`), and token_s is their mean /
      mean longest rollout. Slots are those that producers reported, else the most groups in generation at a time.
    - Without tickets: a group starts while its policy version is published, and its latency counts from the middle of
      that time. Producers often wait, so their rate is that of the busier quarter of the run; slots = rate · latency
      (Little's law).
    """
    times = _times(recording.records)
    train_s, train_token_s = _training(times)
    latencies = measure_slots(recording)
    longest = float(np.mean([group.longest_tokens for group in recording.groups]))
    tickets = recording.tickets
    issued = max(1, tickets.get("issued", 0))
    steps_per_publish = recording.config.steps_per_publish
    publishing = [
        at - times.acks[version * steps_per_publish - 1]
        for version, at in times.published.items()
        if version * steps_per_publish - 1 in times.acks
    ]
    recorded: dict[str, Any] = {
        "slots": latencies.slots,
        "group_s": 0.0,
        "token_s": float(np.clip(latencies.total_s.mean(), LEAST_S, LONGEST_S)) / longest,
        "load_share": latencies.load_share,
        "failure_rate": min(0.9, tickets.get("returned", 0) / issued),
        "lost_rate": min(0.09, tickets.get("expired", 0) / issued),
        "train_s": train_s,
        "train_token_s": train_token_s,
        "publish_s": float(np.median(publishing)) if publishing else workload.publish_s,
    }
    return dataclasses.replace(
        workload, **{name: value for name, value in recorded.items() if name not in workload.explicit_fields}
    )


def _times(records: list[dict[str, Any]]) -> _Times:
    rewinds = [position for position, record in enumerate(records) if record["type"] == "REWIND"]
    records = records[rewinds[-1] + 1 :] if rewinds else records

    def of(kind: str) -> list[dict[str, Any]]:
        return [record for record in records if record["type"] == kind]

    return _Times(
        {record["step"]: (record["at_s"], record["tokens"]) for record in of("BATCH")},
        {record["step"]: record["at_s"] for record in of("ACK")},
        {record["version"]: record["at_s"] for record in of("POLICY")},
        {record["step"]: sum(record["waited_s"].values()) for record in of("ACK") if record.get("waited_s")},
    )


def _training(times: _Times) -> tuple[float, float]:
    """Fit seconds per step and per token. Raises `NotFound` if no step was trained.

    A step has all time since the publication before it in which the trainer did not wait: the calls that fetch a batch
    and the writing of a checkpoint are work too. It lasts at least from its batch to its ack.
    """
    samples = []
    for step, done_s in times.acks.items():
        if step in times.batches:
            made_s, tokens = times.batches[step]
            before = [at for at in (times.acks.get(step - 1), *times.published.values()) if at and at < done_s]
            since_s = before[-1] if before else made_s
            waited_s = times.waited.get(step, 0.0) if times.waited else max(0.0, made_s - since_s)
            samples.append((tokens, max(done_s - since_s - waited_s, done_s - max(made_s, since_s))))
    if not samples:
        raise NotFound("the recording has no acked step since the last rewind", name="from", value=0, bound=1)
    tokens, seconds = np.array(samples, np.float64).T
    if len(samples) > 2 and tokens.std() > 0.01 * tokens.mean():
        slope, base = np.polyfit(tokens, seconds, 1).tolist()
        if slope >= 0 and base >= 0:
            return base, slope
    return float(np.median(seconds)), 0.0


def measure_slots(recording: Recording) -> Latencies:
    """Return the slots, and the seconds that each group occupies one of them [groups], in the order of prompts."""
    groups = _in_order(recording.groups)
    arrivals_s = np.array([group.arrival_s for group in groups])
    tickets_s = np.array([group.ticket_s for group in groups], np.float64)
    longest = np.array([group.longest_tokens for group in groups], np.float64)
    if np.isfinite(tickets_s).any():
        return measure_latencies(tickets_s, arrivals_s, longest, recording.slots)
    latency_s = _latency_s(groups, _times(recording.records), float(arrivals_s.min()))
    slots = recording.slots or max(1, round(_busy_rate(np.sort(arrivals_s)) * latency_s))
    return Latencies(slots, latency_s * longest / longest.mean(), np.zeros(len(groups)), 0.0)


def _in_order(groups: list[RecordedGroup]) -> list[RecordedGroup]:
    """Sort groups by prompt; those without a prompt come last, as they were stored."""
    return sorted(groups, key=lambda g: (math.inf if g.prompt_index is None else g.prompt_index, g.number))


def _latency_s(groups: list[RecordedGroup], times: _Times, first_s: float) -> float:
    """Estimate the median latency: each group starts in the middle of the time in which its version is the newest."""
    latencies = []
    for group in groups:
        since_s = times.published.get(group.policy_version, first_s)
        until_s = min(times.published.get(group.policy_version + 1, group.arrival_s), group.arrival_s)
        latencies.append(group.arrival_s - (min(since_s, until_s) + until_s) / 2)
    return float(np.clip(np.median(latencies), 1e-3, LONGEST_S))


def _busy_rate(arrivals: npt.NDArray[np.float64]) -> float:
    """Return groups per second in the busier quarter of the time, over windows of a fiftieth of all groups."""
    window = max(4, len(arrivals) // 50)
    spans = np.maximum(arrivals[window:] - arrivals[:-window], 1e-3)
    return float(np.percentile(window / spans, _BUSY_PERCENTILE))


class RecordedSupply(Supply):
    """Groups of a recording, repeated in the order of their prompts, with the speeds of a workload.

    A group takes as much longer or shorter than its length suggests as it did when it was recorded: rewards, engines
    and queues differ too.
    """

    def __init__(self, recording: Recording, workload: Workload, config: RunConfig, seed: int) -> None:
        super().__init__(workload, config, seed)
        groups = _in_order(recording.groups)
        longest = np.array([group.longest_tokens for group in groups], np.float64)
        latencies = measure_slots(recording)
        tokens_per_s = longest.mean() / latencies.total_s.mean()
        self._effective, self._rewards = latencies.total_s * tokens_per_s, latencies.reward_s * tokens_per_s
        self._feedback: dict[int, dict[str, Any] | None] = {
            record["step"]: record.get("feedback") for record in recording.records if record["type"] == "ACK"
        }
        self._sizes = np.array([max(1, group.group_size) for group in groups])
        self._entries = np.zeros(len(groups), ENTRY)
        for name in _COPIED:
            self._entries[name] = [getattr(group, name) for group in groups]
        self._group_size = int(np.bincount(self._sizes).argmax()) or DEFAULT_GROUP_SIZE

    def feedback(self, step: int) -> dict[str, Any] | None:
        """Return the recorded feedback of a step."""
        return self._feedback.get(step)

    def _draw(self, block: int, number: int) -> Block:
        picks = (block * BLOCK + np.arange(BLOCK)) % len(self._entries)
        entries = self._entries[picks].copy()
        lengths = _spread(entries["tokens"], entries["longest_tokens"], self._group_size)
        effective, rewards = self._effective[picks], self._rewards[picks]
        return self._finish(block, number, entries, lengths, effective, rewards, self._rng(block, number))


def _spread(tokens: npt.NDArray[np.int32], longest: npt.NDArray[np.int32], rollouts: int) -> npt.NDArray[np.int32]:
    """Return lengths [n, rollouts] with these sums and maxima: the longest rollout, and the rest evenly."""
    lengths = np.empty((len(tokens), rollouts), np.int32)
    if rollouts == 1:
        lengths[:, 0] = tokens
        return lengths
    lengths[:, 0] = np.minimum(longest, tokens - rollouts + 1)
    rest, others = tokens - lengths[:, 0], rollouts - 1
    lengths[:, 1:] = (rest // others)[:, None]
    lengths[:, 1:] += np.arange(others) < (rest % others)[:, None]
    return lengths

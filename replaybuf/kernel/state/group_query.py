"""Query of groups by state, step and the columns of their index entries, in windows of a bounded number of groups.

Groups that are not freed have a row in memory, and numpy compares their columns. A freed group has only a code of its
reason: the caller reads its index entry, which has the same columns, and compares it with `GroupMatcher.compare`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from replaybuf.kernel.rows.column_bits import have_all
from replaybuf.kernel.rows.index import FREED, LIVE, NEVER, Numbers
from replaybuf.kernel.state.lookups import GROUP_STATES, check_record_kept
from replaybuf.kernel.state.pool import PURGED, RETIRED
from replaybuf.kernel.state.run_state import RunState
from replaybuf.wire.group import hash_name

GroupOrder = Literal["arrival", "reward", "staleness", "longest_tokens", "reward_std"]
_KEYS = {"reward": "reward_mean", "longest_tokens": "longest_tokens", "reward_std": "reward_std"}
"""Orders by a column, and its name."""
WINDOW = 65_536
"""Groups of one window: comparing all columns of one takes about 1 ms."""
_COLUMNS = ("reward_mean", "policy_version", "source", "adapter")
_FREED_STATES = ("retired", "evicted", "dead_lettered")

Mask = npt.NDArray[np.bool_]
Columns = Mapping[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupQuery:
    """Conditions on groups, all of which must hold (None = any), and the order of the answer.

    - `step`: the batch of this step in the current history used the group
    - `min_reward`, `max_reward`: of the mean reward of the group
    - `min_staleness`, `max_staleness`: the staleness that the group has at the next step to assemble
    - `version`: `policy_version` of the group; `source`, `adapter`: names, compared by their hashes
    - `id_prefix`: start of the id of the group or of its prompt
    - `contains`: letters of a prompt or completion; the caller compares them, and freed groups have no text
    - `lacks`: a column that the group does not have and may still get: it is live, and no batch has drawn it
    """

    state: str | None = None
    step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_staleness: int | None = None
    max_staleness: int | None = None
    version: int | None = None
    prompt_id: str | None = None
    id_prefix: str | None = None
    source: str | None = None
    adapter: str | None = None
    contains: str | None = None
    lacks: str | None = None
    order: GroupOrder = "arrival"
    desc: bool = False

    @property
    def reads_columns(self) -> bool:
        """Return whether a condition concerns a column, which freed groups have in their index entries only."""
        conditions = (self.min_reward, self.max_reward, self.min_staleness, self.max_staleness)
        return any(value is not None for value in (*conditions, self.version, self.source, self.adapter))

    @property
    def reads_ids(self) -> bool:
        """Return whether a condition concerns ids, which only the index entries have."""
        return self.prompt_id is not None or self.id_prefix is not None

    def matches_ids(self, group_id: str, prompt_id: str) -> bool:
        """Return whether a group meets the conditions on its ids."""
        prefix = self.id_prefix or ""
        return self.prompt_id in (None, prompt_id) and (group_id.startswith(prefix) or prompt_id.startswith(prefix))


class Window(NamedTuple):
    """Groups with numbers from `low` to `high`, both ascending int64.

    `matching`: numbers of groups that match; `freed`: freed groups of the state asked for, whose columns are not
    compared yet. No ids were compared, which only the entries have.
    """

    low: int
    high: int
    matching: Numbers
    freed: Numbers

    def cut(self, low: int, high: int) -> Window:
        """Return the part from `low` to `high`."""
        matching, freed = (part[(part >= low) & (part <= high)] for part in (self.matching, self.freed))
        return Window(low, high, matching, freed)


class GroupMatcher:
    """Compares the groups of one state with one query, whose versions and step are those at its construction.

    Raises `Gone` if the record of the step is trimmed.
    """

    def __init__(self, state: RunState, query: GroupQuery) -> None:
        self.query = query
        self._state = state
        names = state.config.adapter_names if state.config else ("",)
        versions = {hash_name(name): state.version_at(state.next_step, name) for name in names}
        self._codes = np.array(sorted(versions), np.int64)
        self._versions = np.array([versions[code] for code in sorted(versions)], np.int64)
        self._wanted: Numbers | None = None
        if query.step is not None:
            check_record_kept(state, query.step)
            record = state.records.get(query.step)
            self._wanted = np.sort(record.numbers) if record else np.empty(0, np.int64)

    def next_window(self, edge: int | None) -> Window | None:
        """Return the window after number `edge` (None = the first one), in the order of arrival; None at the end."""
        bounds = self._below(edge) if self.query.desc else self._above(edge or 0)
        if bounds is None:
            return None
        low, high = bounds
        return Window(low, high, self._rows(low, high), self._freed(low, high))

    def _above(self, edge: int) -> tuple[int, int] | None:
        """Return the bounds of the window above `edge`. Up to `trimmed`, where few are left, it counts rows."""
        state, numbers = self._state, self._state.index["number"]
        begin, end = (int(np.searchsorted(numbers, number, "right")) for number in (edge, state.trimmed))
        if begin < end:
            return int(numbers[begin]), int(numbers[min(begin + WINDOW, end) - 1])
        edge = max(edge, state.trimmed)
        return (edge + 1, min(edge + WINDOW, state.stored)) if edge < state.stored else None

    def _below(self, edge: int | None) -> tuple[int, int] | None:
        state, numbers = self._state, self._state.index["number"]
        edge = state.stored + 1 if edge is None else min(edge, state.stored + 1)
        if edge > state.trimmed + 1:
            return max(state.trimmed + 1, edge - WINDOW), edge - 1
        end = int(np.searchsorted(numbers, edge, "left"))
        return (int(numbers[max(0, end - WINDOW)]), int(numbers[end - 1])) if end else None

    def _rows(self, low: int, high: int) -> Numbers:
        index, rows = self._state.index, self._rows_between(low, high)
        matches = index["state"][rows] != FREED
        if self.query.state is not None:
            matches &= index["state"][rows] == GROUP_STATES.index(self.query.state)
        if self.query.reads_columns:
            matches &= self.compare({name: index[name][rows] for name in _COLUMNS})
        if self.query.lacks is not None:
            bits = self._state.pool.columns.bits_of([self.query.lacks])
            matches &= ~have_all(index["columns"][rows], bits)
            matches &= (index["state"][rows] == LIVE) & (index["last_step"][rows] == NEVER)
        matching: Numbers = index["number"][rows][matches]
        return matching

    def _rows_between(self, low: int, high: int) -> slice | npt.NDArray[np.int64]:
        if self._wanted is not None:
            return self._state.index.rows_of(_between(self._wanted, low, high))
        begin, end = _positions(self._state.index["number"], low, high)
        return slice(begin, end)

    def _freed(self, low: int, high: int) -> Numbers:
        """List the freed groups of the state asked for; those up to `trimmed` are forgotten."""
        state, wanted = self._state, self.query.state
        low = max(low, state.trimmed + 1)
        needs_rows = self.query.lacks is not None or self.query.contains is not None
        if high < low or wanted not in (None, *_FREED_STATES) or needs_rows:
            return np.empty(0, np.int64)
        # A copy: nobody may trim `freed_as` while an array views it, and a traceback may keep this one.
        codes = np.frombuffer(state.pool.freed_as[low - state.trimmed : high - state.trimmed + 1], np.uint8)
        retired, purged = codes == state.pool.reasons.index(RETIRED), (codes & PURGED) > 0
        dropped = (codes > 0) & ~retired & ~purged
        masks = {None: codes > 0, "retired": retired, "evicted": dropped, "dead_lettered": purged}
        freed: Numbers = np.flatnonzero(masks[wanted]) + low
        return freed if self._wanted is None else freed[np.isin(freed, _between(self._wanted, low, high))]

    def compare(self, columns: Columns) -> Mask:
        """Return which groups meet the conditions on these columns, `_COLUMNS` of rows or of index entries."""
        query = self.query
        matches = np.ones(len(columns["adapter"]), bool)
        rewards = columns["reward_mean"]
        if query.min_reward is not None:
            matches &= rewards >= query.min_reward
        if query.max_reward is not None:
            matches &= rewards <= query.max_reward
        if query.min_staleness is not None:
            matches &= self._staleness(columns) >= query.min_staleness
        if query.max_staleness is not None:
            matches &= self._staleness(columns) <= query.max_staleness
        if query.version is not None:
            matches &= columns["policy_version"] == query.version
        for name in ("source", "adapter"):
            if (wanted := getattr(query, name)) is not None:
                matches &= columns[name] == hash_name(wanted)
        return matches

    def sort_keys(self, columns: Columns) -> npt.NDArray[np.float64]:
        """Return the keys of the order asked for, which is not `arrival`."""
        column = _KEYS.get(self.query.order)
        return np.asarray(columns[column] if column else self._staleness(columns), np.float64)

    def keys_of(self, numbers: Numbers) -> tuple[npt.NDArray[np.float64], Numbers]:
        """Return the keys of these groups and the numbers, without groups that were freed meanwhile."""
        index, rows = self._state.index, self._state.index.rows_of(numbers)
        columns = {name: index[name][rows] for name in {*_COLUMNS, *_KEYS.values()}}
        return self.sort_keys(columns), index["number"][rows]

    def _staleness(self, columns: Columns) -> npt.NDArray[np.int64]:
        places = np.minimum(np.searchsorted(self._codes, columns["adapter"]), len(self._codes) - 1)
        versions = np.where(self._codes[places] == columns["adapter"], self._versions[places], 0)
        staleness: npt.NDArray[np.int64] = versions - columns["policy_version"]
        return staleness


class Ranking:
    """The first `limit` groups in the order of their keys, then of their numbers, behind a position.

    `after`: key and number of the last group of the page before. `desc` reverses both orders.
    """

    def __init__(self, limit: int, after: tuple[float, int] | None, *, desc: bool) -> None:
        self._limit = limit
        self._sign = -1 if desc else 1
        self._after = after and (after[0] * self._sign, after[1] * self._sign)
        self._keys = np.empty(0, np.float64)
        self._numbers = np.empty(0, np.int64)

    def add(self, keys: npt.NDArray[np.float64], numbers: Numbers) -> None:
        """Add groups that match, in any order."""
        keys, numbers = keys * self._sign, numbers * self._sign
        if self._after is not None:
            key, number = self._after
            behind = (keys > key) | ((keys == key) & (numbers > number))
            keys, numbers = keys[behind], numbers[behind]
        if len(self._keys) == self._limit:  # most groups of a later window are not among the first
            last, number = self._keys[-1], self._numbers[-1]
            near = (keys < last) | ((keys == last) & (numbers < number))
            keys, numbers = keys[near], numbers[near]
        keys, numbers = np.concatenate([self._keys, keys]), np.concatenate([self._numbers, numbers])
        if len(keys) > self._limit:  # sorting all of a window takes 15 ms
            last_key = np.partition(keys, self._limit - 1)[self._limit - 1]
            below, equal = np.flatnonzero(keys < last_key), np.flatnonzero(keys == last_key)
            free = self._limit - len(below)
            few = np.concatenate([below, equal[np.argpartition(numbers[equal], free - 1)[:free]]])
            keys, numbers = keys[few], numbers[few]
        order = np.lexsort((numbers, keys))
        self._keys, self._numbers = keys[order], numbers[order]

    @property
    def numbers(self) -> list[int]:
        """The numbers, in order."""
        numbers: list[int] = (self._numbers * self._sign).tolist()
        return numbers


def _positions(ascending: Numbers, low: int, high: int) -> tuple[int, int]:
    return int(np.searchsorted(ascending, low, "left")), int(np.searchsorted(ascending, high, "right"))


def _between(ascending: Numbers, low: int, high: int) -> Numbers:
    begin, end = _positions(ascending, low, high)
    return ascending[begin:end]

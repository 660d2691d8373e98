"""Read-only columns of groups, as strategies see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
"""Numbers of groups: values of `Groups.row`."""
Positions = npt.NDArray[np.int64]
"""Positions of groups in columns of the index or of `Groups`."""

_COLUMNS: dict[str, npt.DTypeLike] = {
    "row": np.int64,
    "prompt_index": np.int64,
    "adapter": np.int32,
    "policy_version": np.int32,
    "policy_version_max": np.int32,
    "tokens": np.int32,
    "rollouts": np.int32,
    "times_sampled": np.int32,
    "last_step": np.int32,
    "reward_mean": np.float32,
    "reward_std": np.float32,
    "advantage_abs_mean": np.float32,
    "arrival_s": np.float64,
    "priority": np.float32,
    "source": np.int32,
    "longest_tokens": np.int32,
    "truncated": np.int32,
}
_OPTIONAL = ("source", "longest_tokens", "truncated")
"""Columns that may be left out when groups are built; they are 0 then."""


def read_only(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view that cannot be made writable again, unlike an array with `flags.writeable` off."""
    return np.asarray(column.data.toreadonly())


class Groups:
    """Live groups as read-only columns of equal length, in the order they were stored.

    - `row` int64: identifies the group in `Selection` and `Evictions`; ascends in the order of storing
    - `prompt_index` int64 (-1 = none), `adapter` and `source` int32 (`source_hash` of the name; 0 = none)
    - `policy_version`, `policy_version_max` int32: oldest and newest version that sampled a token
    - `tokens`, `rollouts`, `times_sampled`, `last_step` int32 (`last_step` -1 = never used); `longest_tokens` int32: of
      the longest rollout; `truncated` int32: rollouts that ended at their token limit
    - `reward_mean`, `reward_std`, `advantage_abs_mean`, `priority` float32
    - `arrival_s` float64: seconds since the epoch when the group was stored

    A column is copied from the index on first use, and not at all if it shows all groups. Setting an attribute raises
    `AttributeError`; writing into an array raises `ValueError`.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = tuple(_COLUMNS)
    DTYPES: ClassVar[Mapping[str, np.dtype[Any]]] = {name: np.dtype(kind) for name, kind in _COLUMNS.items()}

    _base: dict[str, npt.NDArray[Any]]
    _size: int
    _which: Positions | None
    row: Numbers
    prompt_index: npt.NDArray[np.int64]
    adapter: npt.NDArray[np.int32]
    policy_version: npt.NDArray[np.int32]
    policy_version_max: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    rollouts: npt.NDArray[np.int32]
    times_sampled: npt.NDArray[np.int32]
    last_step: npt.NDArray[np.int32]
    reward_mean: npt.NDArray[np.float32]
    reward_std: npt.NDArray[np.float32]
    advantage_abs_mean: npt.NDArray[np.float32]
    arrival_s: npt.NDArray[np.float64]
    priority: npt.NDArray[np.float32]
    source: npt.NDArray[np.int32]
    longest_tokens: npt.NDArray[np.int32]
    truncated: npt.NDArray[np.int32]

    def __init__(self, **columns: npt.NDArray[Any]) -> None:
        missing = [name for name in self.COLUMNS if name not in columns and name not in _OPTIONAL]
        unknown = [name for name in columns if name not in _COLUMNS]
        if missing or unknown:
            raise TypeError(f"Groups: missing columns {missing}, unknown columns {unknown}")
        self.__dict__.update(
            _base={name: read_only(column) for name, column in columns.items()}, _size=len(columns["row"]), _which=None
        )

    @classmethod
    def view_of(cls, columns: dict[str, npt.NDArray[Any]], size: int, which: Positions | None) -> Groups:
        """Return the first `size` groups of `read_only` columns, or of these the ones at positions `which`."""
        shown = object.__new__(cls)
        shown.__dict__.update(_base=columns, _size=size, _which=which)
        return shown

    def __getattr__(self, name: str) -> npt.NDArray[Any]:
        """Return a column and keep it as a plain attribute."""
        if name not in _COLUMNS:
            raise AttributeError(f"Groups has no column {name!r}; it has {', '.join(self.COLUMNS)}")
        base = self._base.get(name)
        if base is None:
            base = read_only(np.zeros(self._size, _COLUMNS[name]))
        column = base[: self._size] if self._which is None else read_only(base[self._which])
        self.__dict__[name] = column
        return column

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Groups are read-only; {name!r} cannot be set")

    def __len__(self) -> int:
        return self._size if self._which is None else len(self._which)

    def unread_copy(self) -> Groups:
        """Return the same groups without read columns, so that no plug-in sees what another did to the object."""
        return Groups.view_of(dict(self._base), self._size, self._which)

    def take(self, which: npt.NDArray[Any]) -> Groups:
        """Return the groups at these positions, or where a mask is true, without reading a column."""
        positions = np.flatnonzero(which) if which.dtype == bool else which
        return Groups.view_of(self._base, self._size, positions if self._which is None else self._which[positions])

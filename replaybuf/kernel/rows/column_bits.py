"""Bits of columns: which of the columns that may come late a group has.

The bits of a row are those of the columns in the group's own frame, from its index entry, and those of late columns.
Rewards and advantages count only if they came late: every group has some from the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from replaybuf.wire.group import OPTIONAL_PER_TOKEN, Group
from replaybuf.wire.late_columns import FIXED_NAMES

_FIRST_PART = 8
"""Bit of the first reward part; the bits before it are those of `FIXED_NAMES`, and `ADMITTED_BIT`."""
ADMITTED_BIT = 1 << 7
"""Bit that is not of a column: the service stored the group, after the admission plug-ins. Direct writes lack it."""
UNKNOWN_BIT = 1 << 16
"""Bit of a column that no group of the run has: it does not fit the columns of the index."""
_OWN_BITS = tuple((name, 1 << place) for place, name in enumerate(FIXED_NAMES) if name in OPTIONAL_PER_TOKEN)


def bits_of_group(group: Group) -> int:
    """Return the bits of the optional columns in the frame of a group."""
    bits = 0
    for name, bit in _OWN_BITS:
        if getattr(group, name) is not None:
            bits |= bit
    return bits


def bits_of(names: Iterable[str], parts: Sequence[str]) -> int:
    """Return the bits of columns. `parts`: reward parts that came late in this run, in the order of the first time."""
    bits = 0
    for name in names:
        if name in FIXED_NAMES:
            bits |= 1 << FIXED_NAMES.index(name)
        else:
            bits |= 1 << _FIRST_PART + parts.index(name) if name in parts else UNKNOWN_BIT
    return bits


def names_of(bits: int, parts: Sequence[str]) -> list[str]:
    """List the columns that have these bits."""
    fixed = [name for place, name in enumerate(FIXED_NAMES) if bits & 1 << place]
    return fixed + [name for place, name in enumerate(parts, _FIRST_PART) if bits & 1 << place]


def have_all(columns: npt.NDArray[np.uint16], bits: int) -> npt.NDArray[np.bool_]:
    """Return which groups have all columns of these bits, from their `columns` in the index."""
    if bits >= UNKNOWN_BIT:
        return np.zeros(len(columns), np.bool_)
    complete: npt.NDArray[np.bool_] = (columns & bits) == bits
    return complete

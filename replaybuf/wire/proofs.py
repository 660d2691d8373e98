"""Proofs of rollouts: bytes with which a producer shows how it computed a rollout, as two columns of a group.

The service stores them and reads nothing in them; an admission plug-in may. They are for all rollouts or for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from replaybuf.errors import GroupRejected

LARGEST_PROOFS_BYTES = 1 << 20
"""Proofs of all rollouts of a group together."""


def join_proofs(proofs: Sequence[bytes | None]) -> dict[str, Any]:
    """Return the fields `proofs` and `proof_lengths` of a group; none if no rollout has a proof.

    Raises `GroupRejected` if only some rollouts have one.
    """
    present = [proof for proof in proofs if proof is not None]
    if not present:
        return {}
    if len(present) != len(proofs):
        name = f"rollouts[{proofs.index(None)}].proof"
        raise GroupRejected("length_mismatch", f"{name} is missing; give proofs for all rollouts or none", name=name)
    lengths = np.array([len(proof) for proof in present], np.int32)
    return {"proofs": np.frombuffer(b"".join(present), np.uint8), "proof_lengths": lengths}


def split_proofs(
    proofs: npt.NDArray[np.uint8] | None, lengths: npt.NDArray[np.int32] | None, rollouts: int
) -> list[bytes | None]:
    """Return the proof of each rollout, None without proofs."""
    if proofs is None or lengths is None:
        return [None] * rollouts
    ends, joined = np.cumsum(lengths).tolist(), proofs.tobytes()
    return [joined[end - size : end] for end, size in zip(ends, lengths.tolist(), strict=True)]

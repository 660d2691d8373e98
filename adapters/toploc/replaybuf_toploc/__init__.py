"""Proofs of computation by toploc: producers build them, the admission plug-in `toploc` verifies them.

toploc and torch are imported at first use: the service imports this module to check the options.
"""

from __future__ import annotations

from replaybuf_toploc.admission import Toploc, ToplocOptions
from replaybuf_toploc.proofs import build_proof

__all__ = ["Toploc", "ToplocOptions", "build_proof"]

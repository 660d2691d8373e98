"""Feed prime-rl's trainer from a run: `replaybuf-prime-rl`, a process beside it."""

from __future__ import annotations

from replaybuf_prime_rl.sidecar import Sidecar, SidecarOptions

__all__ = ["Sidecar", "SidecarOptions"]

"""Needs of a run, computed from its shape and from rates that were measured on one machine. Pure.

Rates are of groups of 16 rollouts of 8,192 tokens on two cores, with strict durability, service, Valkey and clients on
the same machine. Smaller groups cost more per token; a faster core less.
"""

from __future__ import annotations

import dataclasses
import math

APPEND_CORES = 0.187e-6
"""Cores of the services per stored token/s: 2.8 for 15 million tokens/s."""
VALKEY_CORES = 0.04e-6
"""Cores of Valkey per stored token/s: 0.6 for 15 million tokens/s."""
STORE_RATE = 5.4e6
"""Tokens/s that one service stores, with its clients on the same two cores."""
DELIVER_RATE = 11.9e6
"""Tokens/s that one service delivers as bodies."""
SHARED_COST = 2.0
"""Processor time per group of several servers together, against one server (`benchmarks/servers.py`)."""
LEADER_S = 1.5e-3
"""Seconds of the leader for a group of any size that other servers store and deliver."""
BUSY = 0.7
"""Largest load of a server that leaves time for bursts."""
TOKEN_BYTES = 8
"""A token in a frame: id, log probability, and its share of masks and header; 131 kB for 16,384 tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """A run: `generating` of `gpus` sample `tokens_per_s` each; `step_s`: seconds of a training step.

    `max_staleness` bounds the versions that wait in the buffer, `checkpoint_steps` what a resume may need again.
    """

    gpus: int
    generating: float
    tokens_per_s: float
    group_size: int
    rollout_tokens: int
    step_s: float
    checkpoint_steps: int
    max_staleness: int
    gpus_per_rank: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the run needs. `server_load`: share of one server's time, if it does all alone.

    `direct_load`: the same where ranks read frames from Redis themselves. `servers` share the work; one of them leads,
    with `leader_load`. `deliver_s`: seconds for a step's bodies.
    """

    tokens_per_s: float
    groups_per_s: float
    ranks: int
    server_load: float
    direct_load: float
    servers: int
    leader_load: float
    server_cores: float
    valkey_cores: float
    deliver_s: float
    deliver_share: float
    memory_bytes: float
    disk_bytes_per_s: float
    network_bytes_per_s: float


def compute_needs(shape: RunShape) -> Needs:
    """Compute what a run needs.

    ::

        stored = gpus * generating * tokens_per_s
        kept   = stored * step_s * (max_staleness + 1 + 2 * checkpoint_steps)      two checkpoints stay resumable
        load   = stored / STORE_RATE + stored / DELIVER_RATE, the second part without direct reads
        servers = 1 up to BUSY, else SHARED_COST * load / BUSY
    """
    stored = shape.gpus * shape.generating * shape.tokens_per_s
    step_tokens = stored * shape.step_s
    deliver_s = step_tokens / DELIVER_RATE
    kept_steps = shape.max_staleness + 1 + 2 * shape.checkpoint_steps
    groups_per_s = stored / (shape.group_size * shape.rollout_tokens)
    load = stored / STORE_RATE + stored / DELIVER_RATE
    servers = 1 if load <= BUSY else max(2, math.ceil(SHARED_COST * load / BUSY))
    return Needs(
        tokens_per_s=stored,
        groups_per_s=groups_per_s,
        ranks=max(1, round(shape.gpus * (1 - shape.generating) / shape.gpus_per_rank)),
        server_load=load,
        direct_load=stored / STORE_RATE,
        servers=servers,
        leader_load=load if servers == 1 else groups_per_s * LEADER_S,
        server_cores=stored * APPEND_CORES + deliver_s / shape.step_s,
        valkey_cores=stored * VALKEY_CORES,
        deliver_s=deliver_s,
        deliver_share=deliver_s / shape.step_s,
        memory_bytes=step_tokens * kept_steps * TOKEN_BYTES,
        disk_bytes_per_s=stored * TOKEN_BYTES,
        network_bytes_per_s=3 * stored * TOKEN_BYTES,
    )

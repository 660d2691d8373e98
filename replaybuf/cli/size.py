"""The command `replaybuf size`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveFloat, PositiveInt
from cyclopts.validators import Number

from replaybuf.cli.service import print_json, print_table
from replaybuf.lab.sizing import BUSY, Needs, RunShape, compute_needs

_SHARE = Parameter(validator=Number(gt=0, lt=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Shape of the run."""

    gpus: PositiveInt = 1000
    """GPUs of the run."""
    generating: Annotated[float, _SHARE] = 0.75
    """Share of the GPUs that generate."""
    tokens_per_s: PositiveFloat = 2000.0
    """Tokens/s that a generating GPU samples."""
    group_size: PositiveInt = 16
    """Rollouts of a group."""
    rollout_tokens: PositiveInt = 8192
    """Mean tokens of a rollout, with its prompt."""
    step_s: PositiveFloat = 18.0
    """Seconds of a training step."""
    checkpoint_steps: PositiveInt = 10
    """Steps between two checkpoints: what they may need again stays in memory."""
    max_staleness: NonNegativeInt = 2
    """Versions that a group may be behind."""
    gpus_per_rank: PositiveInt = 8
    """GPUs that share one body of a batch."""
    json: bool = False
    """Print JSON."""


def size(options: Annotated[SizeOptions, Parameter(name="*")] = SizeOptions()) -> None:
    """Compute the cores, memory, network and disk that a run needs, and say what of it was measured."""
    fields = dataclasses.asdict(options)
    del fields["json"]
    needs = compute_needs(RunShape(**fields))
    if options.json:
        print_json(dataclasses.asdict(needs))
        return
    print_table(("what", ">need", "from"), _rows(needs))
    if needs.leader_load > BUSY and needs.servers > 1:
        print("One server leads the run, and cannot decide about so many groups: let a group have more rollouts.")
    elif needs.servers > 1:
        print("Several servers share the work. Ranks that read frames from Redis themselves (direct) leave them less.")


def _rows(needs: Needs) -> list[tuple[str, str, str]]:
    return [
        ("tokens stored", f"{needs.tokens_per_s / 1e6:,.2f} M/s", "computed from the GPUs"),
        ("groups stored", f"{needs.groups_per_s:,.1f} /s", "computed"),
        ("ranks", f"{needs.ranks:,}", "computed"),
        ("load of one server", f"{needs.server_load:.0%}", "measured: it stores 5.4 M tokens/s, delivers 11.9"),
        ("load, direct reads", f"{needs.direct_load:.0%}", "measured: ranks read frames from Redis"),
        ("servers", f"{needs.servers:,}", "computed: 1 up to 70 % load; several take twice the time"),
        ("load of the leader", f"{needs.leader_load:.0%}", "measured: 1.5 ms per group that others store"),
        ("cores of the server", f"{needs.server_cores:,.1f}", "measured per token stored; delivery computed"),
        ("cores of Valkey", f"{needs.valkey_cores:,.2f}", "measured per token stored"),
        ("bodies of a step", f"{needs.deliver_s:,.1f} s", f"computed: {needs.deliver_share:.0%} of the step"),
        ("memory of Valkey", f"{needs.memory_bytes / 1e9:,.1f} GB", "computed: 8 bytes per token; less with spill"),
        ("disk", f"{needs.disk_bytes_per_s / 1e6:,.1f} MB/s", "computed: each group once, fsync before the answer"),
        ("network", f"{needs.network_bytes_per_s / 1e6:,.1f} MB/s", "computed: in, to Valkey, out to the ranks"),
    ]

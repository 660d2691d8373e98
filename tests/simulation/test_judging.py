"""What the judge of the simulation excuses beyond the checker of chaos, and what it does not."""

from __future__ import annotations

import msgspec
import pytest

from replaybuf.wire.ledger import AnyRecord, ConfigRecord, RewindRecord
from tests.chaos.fault_checks import REPORT_S
from tests.chaos.history import AnyEvent, Healed, LedgerSeen, OlderRedis, TicketReturned
from tests.chaos.run_history import RunHistory
from tests.simulation.judging import _halted, _reports_beside_faults

RIGHT_S = 9.0


@pytest.mark.parametrize(("healed_s", "late_s", "excused"), [(18.0, 19.5, 1), (18.0, 28.5, 0), (19.5, 19.6, 0)])
def test_a_late_report_of_lost_data_needs_another_fault_of_redis(healed_s: float, late_s: float, excused: int) -> None:
    """A node that stands still keeps a server from reading the right Redis again, for so long and no longer."""
    older = OlderRedis(at_s=RIGHT_S, run="run", from_s=3.0, right_s=RIGHT_S, kind="failover", written=[], silent=[])
    late = TicketReturned(at_s=late_s, run="run", sent_s=late_s, server="http://a", outcome="data-lost", ticket="t")
    history: list[AnyEvent] = [older, Healed(at_s=healed_s, process="valkey"), late]
    assert late_s > RIGHT_S + REPORT_S
    assert len(list(_reports_beside_faults(RunHistory([older, late]), history))) == excused


@pytest.mark.parametrize("rewound", [True, False])
def test_adapters_may_have_trained_nothing_after_a_rewind(rewound: bool) -> None:
    """It takes their steps back, and the groups that they had stay counted."""
    records: list[AnyRecord] = [ConfigRecord(config={"adapters": {"code": {}, "math": {"paused": True}}}, max_uses=1)]
    records += [RewindRecord(step=0, generation=1, on_resume="resample", version=0, until=3)] if rewound else []
    seen = [
        LedgerSeen(at_s=1.0, run="run", server="a", entry=entry, record=msgspec.to_builtins(record, str_keys=True))
        for entry, record in enumerate(records, 1)
    ]
    assert _halted(RunHistory(seen)) == (
        ("adapter code has ", "adapter math has ") if rewound else ("adapter math has ",)
    )

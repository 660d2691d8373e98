"""Recordings as input of studies: which options they replace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replaybuf.cli.main import main
from replaybuf.client.client import Client
from replaybuf.lab.simulate.advice import FleetOptions
from replaybuf.lab.simulate.command import SimulateOptions, run_advice
from replaybuf.lab.simulate.recording import RecordedGroup, Recording, derive, read_service, save
from replaybuf.lab.simulate.workload import Workload
from replaybuf.wire.ledger import AckRecord, BatchRecord, PolicyRecord
from tests.conftest import RunClient, ServeProcess, group
from tests.lab.simulate.workloads import config

DEFAULTS = Workload()


def record(struct: Any, **fields: Any) -> dict[str, Any]:
    """Build a ledger record as `GET ledger` reports it."""
    return {"type": struct.__struct_config__.tag} | fields


@pytest.fixture
def recording() -> Recording:
    """Build a run of 4 steps of 2 s, 4 groups each, which generates one group per 0.5 s."""
    groups = [
        RecordedGroup(
            number=n + 1,
            policy_version=n // 4,
            tokens=400,
            arrival_s=0.5 * n,
            group_size=4,
            longest_tokens=100,
            prompt_index=n,
        )
        for n in range(16)
    ]
    records = []
    for step in range(4):
        records.append(record(BatchRecord, step=step, at_s=2.0 * step + 1, tokens=1600))
        records.append(record(AckRecord, step=step, at_s=2.0 * step + 2))
        records.append(record(PolicyRecord, version=step + 1, at_s=2.0 * step + 2.5))
    return Recording(run="recorded", config=config(), tickets={"issued": 16}, groups=groups, records=records)


def test_a_recording_replaces_only_options_that_were_not_given(recording: Recording) -> None:
    """An option counts as given even if its value is the default."""
    learned = derive(recording, Workload())
    assert learned.slots != DEFAULTS.slots and learned.train_s != DEFAULTS.train_s
    workload = derive(recording, Workload(slots=DEFAULTS.slots, train_s=9.0))
    assert (workload.slots, workload.train_s, workload.publish_s) == (DEFAULTS.slots, 9.0, learned.publish_s)


def test_an_option_equal_to_its_default_counts_on_the_command_line(recording: Recording, tmp_path: Path) -> None:
    saved, report = tmp_path / "recording.json", tmp_path / "report"
    save(recording, saved)
    arguments = ["--slots", str(DEFAULTS.slots), "--steps", "2", "--report-dir", str(report)]
    main(["simulate", "--from", str(saved), *arguments])
    workload = json.loads((report / "report.json").read_bytes())["workload"]
    assert workload["slots"] == DEFAULTS.slots
    assert workload["train_s"] != DEFAULTS.train_s, "the recording gives the others"


def test_an_advice_keeps_the_speed_of_the_recording_unless_another_is_given(recording: Recording) -> None:
    """Its slots are those of the recording at the recorded share of engines, and follow the engines."""
    options = SimulateOptions(steps=3, strategy=("one-step-off-policy",), fleet=FleetOptions(gpus=2, generating=0.5))
    advice = run_advice(options, recording.config, recording)
    slots = derive(recording, Workload()).slots
    assert {choice.slots for choice in (advice.proposal, *(cost.choice for cost in advice.costs))} <= {
        max(1, round(slots * factor)) for factor in (0.5, 1, 2)
    }


def test_what_a_trainer_does_between_two_batches_is_work_unless_it_waited(recording: Recording) -> None:
    """Calls and checkpoints take time too: of the 1.5 s from a publication to the next ack, the trainer waited 0.3 s.

    A recording without waits has only the time from batch to ack.
    """
    records = [entry.copy() for entry in recording.records]
    for entry in records:
        if entry["type"] == "ACK":
            entry["waited_s"] = {"too_few_groups": 0.3}
    assert derive(recording, Workload()).train_s == pytest.approx(1.0)
    waited = msgspec.structs.replace(recording, records=records)
    assert derive(waited, Workload()).train_s == pytest.approx(1.2)


def test_slots_and_latencies_are_those_between_tickets_and_arrivals(recording: Recording) -> None:
    """The producers reported 5 slots: more than the window ever let them use."""
    groups = [msgspec.structs.replace(group, ticket_s=group.arrival_s - 1.0) for group in recording.groups]
    timed = msgspec.structs.replace(recording, groups=groups)
    learned = derive(timed, Workload())
    assert learned.slots == 2
    assert learned.token_s == pytest.approx(1.0 / 100)
    assert derive(msgspec.structs.replace(timed, slots=5), Workload()).slots == 5


def test_a_recording_keeps_what_held_producers_back(service: ServeProcess, run: RunClient) -> None:
    """As they reported it last, beside their slots, and when the tickets of groups were issued."""
    run.put(batch={"groups_per_batch": 8, "tokens_per_batch": None})
    tickets = [ticket["ticket"] for ticket in run.post("tickets", producer="a", count=8).json()["tickets"]]
    run.append(*(group(None, ticket=ticket) for ticket in tickets))
    reports = {"a": "engine_away", "b": "engine_away", "c": None}
    with Client(service.url, run.run) as client:
        for producer, reason in reports.items():
            client.send_heartbeat(producer, slots=4, held_back_by=reason)
    recording = read_service(service.url, run.run, None)
    assert (recording.slots, recording.held_back) == (12, {"engine_away": 2})
    assert all(stored.ticket_s and 0 <= stored.arrival_s - stored.ticket_s < 60 for stored in recording.groups)

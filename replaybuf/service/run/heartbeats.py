"""Heartbeats of producers, and the list of producers of a run."""

from __future__ import annotations

from replaybuf.kernel.state.producers import Failure
from replaybuf.service.run.served_run import Run
from replaybuf.wire.contract import Heartbeat, HeartbeatRequest, ProducerList, ProducerStatus, ReportedFailure


def record_heartbeat(run: Run, name: str, report: HeartbeatRequest) -> Heartbeat:
    """Record that a producer is at work; an unknown one becomes known."""
    journal = run.journal
    journal.presence.record_producer(name)
    producers, now_s = journal.presence.producers, journal.clock.monotonic()
    producer = producers.see(name, now_s)
    producer.announced = True
    producer.in_flight, producer.slots = report.in_flight, report.slots
    producer.engines, producer.held_back_by = report.engines, report.held_back_by
    if report.failure is not None:
        producers.record_failure(producer, report.failure, now_s)
    return Heartbeat(
        published_version=run.state.published[""],
        state=run.state.phase,
        heartbeat_s=journal.config.tickets.heartbeat_s,
    )


def list_producers(run: Run) -> ProducerList:
    """List the producers that this server knows; only the leader gets their calls."""
    now_s = run.journal.clock.monotonic()
    return ProducerList(
        producers=[
            ProducerStatus(
                name=producer.name,
                last_seen_s=round(now_s - producer.seen_s, 3),
                tickets_out=run.book.out_with(producer.name),
                groups_per_min=round(producer.groups.read(now_s), 2),
                faults=producer.faults,
                heartbeats=producer.announced,
                gone=producer.gone,
                in_flight=producer.in_flight,
                slots=producer.slots,
                engines=producer.engines,
                held_back_by=producer.held_back_by,
                failure=None if producer.failure is None else _describe(producer.failure, now_s),
            )
            for producer in run.journal.presence.producers.list_known(now_s)
        ]
    )


def _describe(failure: Failure, now_s: float) -> ReportedFailure:
    return ReportedFailure(
        reason=failure.report.reason,
        prompt_index=failure.report.prompt_index,
        traceback=failure.report.traceback,
        age_s=round(now_s - failure.at_s, 3),
        lasts=failure.lasts,
    )

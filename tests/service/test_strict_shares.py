"""Strict shares of sources over HTTP: the wait for a short source, tickets meanwhile, a short batch in the end."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.conftest import RunClient, group

STRICT = {"mix": {"a": 0.5, "b": 0.5}, "mix_strict": True, "max_staleness": 1, "max_uses": 1}


def of_source(source: str, ticket: dict[str, Any]) -> dict[str, Any]:
    """Make the group of a ticket."""
    return group(None, ticket=ticket["ticket"], metadata={"source": source})


def test_a_batch_waits_for_a_short_source_while_tickets_go_on_and_is_short_in_the_end(run: RunClient) -> None:
    """The answer names the source. The second batch is short by its places after `batch.timeout_s`."""
    strategy = {"name": "replay", "options": STRICT}
    assert run.put(batch={"groups_per_batch": 4}, strategy=strategy).is_success
    epoch = run.attach()

    def produce(sources: str) -> None:
        tickets = run.post("tickets", producer="p", count=len(sources)).json()["tickets"]
        assert len(tickets) == len(sources), "tickets go on"
        run.append(*map(of_source, sources, tickets))

    produce("aaaaaaaa")
    assert run.state()["groups"]["evicted"] == {"beyond_share": 4}
    waits = run.batch(0, epoch).json()
    assert (waits["reason"], waits["blocked_on"], waits["have"]["groups"]) == ("too_few_groups", "producers", 2)
    assert waits["detail"] == "source b has 0 of its 2 groups in the batch"
    produce("bb")
    for short in (None, "timeout"):
        step = 0 if short is None else 1
        assert run.batch(step, epoch, wait_ms=20_000).status_code == 200
        record = run.get(f"batches/{step}/record").json()
        sources = Counter(
            run.get(f"groups/{used['group_id']}").json()["metadata"]["source"] for used in record["groups"]
        )
        assert (record.get("short"), sources) == (short, {"a": 2} if short else {"a": 2, "b": 2})
        assert run.ack(step, epoch).is_success
        assert run.publish(step + 1, epoch).is_success
        assert run.http.patch(run.path, json={"batch": {"timeout_s": 0.5}}).is_success

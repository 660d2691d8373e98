"""A heartbeat brings the newest failure: it is forgotten when the service has it, not before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from replaybuf.errors import Invalid, ReplaybufError, ServiceUnavailable
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.heartbeats import Heartbeats
from replaybuf.generator.inflight import InFlight
from replaybuf.wire.contract import ProducerFailure

FAILURE = ProducerFailure(reason="reward_raised", traceback="x")


class Client:
    """Answers heartbeats with what `answers` has: an error, or None = never."""

    def __init__(self, *answers: ReplaybufError | SimpleNamespace | None) -> None:
        self.sent: list[ProducerFailure | None] = []
        self.asked = asyncio.Event()
        self._answers = [*answers]

    async def send_heartbeat(self, producer: str, failure: ProducerFailure | None, **others: Any) -> Any:
        self.sent.append(failure)
        self.asked.set()
        answer = self._answers.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, ReplaybufError):
            raise answer
        return answer


ANSWER = SimpleNamespace(heartbeat_s=15.0, state="running")
FLEET = cast(Fleet, SimpleNamespace(status=list))


def inflight_of(client: Client) -> InFlight:
    inflight = InFlight.__new__(InFlight)
    inflight.client, inflight.jobs, inflight.failure = cast(Any, client), {}, FAILURE
    return inflight


async def test_a_failure_of_a_cancelled_heartbeat_comes_with_the_last_one() -> None:
    """A run may end while the heartbeat is on its way."""
    client = Client(None, ANSWER)
    inflight, heartbeats = inflight_of(client), Heartbeats("p", lambda: None, lambda: 1)
    task = asyncio.ensure_future(heartbeats.report_failure(inflight, FLEET))
    await client.asked.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await heartbeats.report_failure(inflight, FLEET)
    assert client.sent == [FAILURE, FAILURE] and inflight.failure is None


@pytest.mark.parametrize(
    ("answer", "left"), [(ANSWER, None), (Invalid("x"), None), (ServiceUnavailable("x"), FAILURE)], ids=str
)
def test_a_failure_is_kept_until_the_service_has_answered(answer: Any, left: ProducerFailure | None) -> None:
    """One that it refuses would be refused again."""
    inflight = inflight_of(Client(answer))
    asyncio.run(Heartbeats("p", lambda: None, lambda: 1).report_failure(inflight, FLEET))
    assert inflight.failure is left


async def test_a_failure_during_the_heartbeat_is_the_next_to_be_reported() -> None:
    newer = ProducerFailure(reason="prompt_raised", traceback="y")
    client = Client(ANSWER)
    inflight = inflight_of(client)
    answer = client.send_heartbeat

    async def meanwhile(*args: Any, **kwargs: Any) -> Any:
        inflight.failure = newer
        return await answer(*args, **kwargs)

    client.send_heartbeat = meanwhile  # type: ignore[method-assign]
    await Heartbeats("p", lambda: None, lambda: 1).report_failure(inflight, FLEET)
    assert client.sent == [FAILURE] and inflight.failure is newer

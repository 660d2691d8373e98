"""A run whose engine hangs, dies or comes back with old weights: what becomes of the ticket, and that the run goes on.

Beside `FaultContract` (what one request comes to), `test_daemon` and `test_weight_following`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response, StreamingResponse

from replaybuf.generator.fleet import TRIES
from replaybuf.generator.fleet import member as member_module
from replaybuf.kernel.tickets import is_forgiven
from tests.generator.doubles import TIMEOUT_S, EngineDouble, Script, ServiceDouble
from tests.generator.worlds import World, run, sampled_by, world
from tests.waiting import until

PROMPTS = 4


async def hang(request: dict[str, Any]) -> None:
    """Script: no answer, ever."""
    await asyncio.Event().wait()


async def die(request: dict[str, Any]) -> Response:
    """Script: the connection breaks in the middle of the answer."""

    async def half() -> AsyncIterator[bytes]:
        yield b'{"choices": [{"index": 0, "token_ids": [1, '
        raise ConnectionResetError

    return StreamingResponse(half(), media_type="application/json")


async def one_choice_less(request: dict[str, Any]) -> dict[str, Any]:
    """Script: fewer choices than were asked for."""
    answer = EngineDouble().answer(request)
    del answer["choices"][-1]
    return answer


def generated(tmp_path: Path, engine: EngineDouble, **options: Any) -> World:
    """Generate to the end of the supply, one group at a time; return the world as it was then."""
    made: list[World] = []

    async def main() -> None:
        service = ServiceDouble(prompts=PROMPTS)
        async with world(tmp_path, engine, service, max_inflight_groups=1, **options) as w:
            await w.run()
            made.append(w)

    run(main())
    return made[0]


@pytest.mark.parametrize(
    ("script", "timeout_s", "reason"),
    [(hang, 0.3, "engine_timeout"), (one_choice_less, TIMEOUT_S, "engine_bad_answer")],
)
def test_what_the_next_try_would_not_mend_costs_one_ticket_with_its_reason(
    tmp_path: Path, script: Script, timeout_s: float, reason: str
) -> None:
    engine = EngineDouble()
    engine.script.append(script)
    w = generated(tmp_path, engine, engine_timeout_s=timeout_s)
    ((ticket, said),) = w.service.returned
    assert ticket == "t0" and said.startswith(f"{reason}: engine {engine.url}")
    assert [group.prompt_index for group in w.service.groups] == [1, 2, 3]
    assert w.daemon.progress.given_back == {reason: 1}


def test_an_engine_that_dies_in_the_middle_of_an_answer_costs_no_ticket(tmp_path: Path) -> None:
    engine = EngineDouble()
    engine.script.append(die)
    w = generated(tmp_path, engine)
    assert w.service.returned == []
    assert [group.prompt_index for group in w.service.groups] == list(range(PROMPTS))
    assert w.daemon.engines[0].outcomes == {"ok": PROMPTS, "engine_away": 1}


def test_a_request_over_which_an_engine_dies_again_and_again_is_told_from_an_engine_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a failed try of its prompt: one that brings engines down would come again for ever."""
    monkeypatch.setattr(member_module, "PROBE_FIRST_S", 0.01)
    engine = EngineDouble()
    engine.script.extend([die] * TRIES)
    w = generated(tmp_path, engine)
    ((ticket, said),) = w.service.returned
    assert ticket == "t0" and not is_forgiven(said)
    assert said.startswith("engine_lost: the connection to the engine failed in 3 tries")
    assert [group.prompt_index for group in w.service.groups] == [1, 2, 3]


def test_what_an_engine_sampled_with_old_weights_is_not_stored_and_it_is_used_once_they_are_right(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        engine, service = EngineDouble(version=5), ServiceDouble(prompts=PROMPTS)
        service.published = 5
        engine.script.append(sampled_by(2))  # it was started anew and says so in its answer
        async with world(tmp_path, engine, service, max_inflight_groups=1) as w:
            w.start()
            await until(lambda: bool(engine.requests))
            engine.version = 2
            await until(lambda: w.daemon.waiting == "engine_stale")
            engine.version = 5
            await w.end()
            assert {group.policy_version for group in service.groups} == {5}
            assert len(service.groups) == PROMPTS and service.returned == []

    run(main())

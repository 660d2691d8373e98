"""Evaluations beside generating: every so many versions a held-out set, by the engines that generate.

The engines go on with training groups meanwhile. One evaluation runs at a time; versions that pass meanwhile are passed
over. A version that somebody has evaluated already, before a restart or beside us, is not evaluated again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from replaybuf.errors import EngineFault, EngineUnfit, NotFound, RewardFault
from replaybuf.generator.engines import Engine
from replaybuf.generator.evaluation import HeldOut
from replaybuf.generator.inflight import Flight
from replaybuf.wire.evaluations import EvaluationRequest

logger = logging.getLogger(__name__)

_LOOKED_AT = 1000
_NEVER = -1


class Schedule:
    """Evaluates `held_out` at the first version seen of every `every`: 0..every-1, every..2*every-1, and so on."""

    def __init__(self, held_out: HeldOut, every: int, *, adapter: str = "", producer: str = "") -> None:
        self.held_out = held_out
        self._every = every
        self._told = {"adapter": adapter, "producer": producer}
        self._turn = _NEVER

    async def follow(self, flight: Flight, engine: Engine, published: Callable[[], int | None]) -> None:
        """Loop: evaluate when it is due. Ends where a stop comes; raises `EngineUnfit`, and as `Flight.patiently`."""
        while not flight.stopping:
            await flight.until(lambda: flight.stopping or self._due(published()))
            version = published()
            if flight.stopping or version is None:
                return
            self._turn = version // self._every
            if not await self._known(flight):
                await self._evaluate(flight, engine)

    def _due(self, version: int | None) -> bool:
        return version is not None and version // self._every != self._turn

    async def _known(self, flight: Flight) -> bool:
        """Say whether the service has a result of this turn."""
        try:
            kept = await flight.patiently("evaluations", lambda: flight.client.list_evaluations(_LOOKED_AT))
        except NotFound:  # a service of before there were any
            return False
        return any(
            (one.name, one.adapter) == (self.held_out.name, self._told["adapter"])
            and one.version // self._every == self._turn
            for one in kept or ()
        )

    async def _evaluate(self, flight: Flight, engine: Engine) -> None:
        try:
            result = await self.held_out.evaluate(engine) | self._told
        except EngineUnfit:
            raise
        except (EngineFault, RewardFault) as fault:
            flight.progress.evaluations_failed += 1
            logger.error("evaluation %s failed: %s", self.held_out.name, fault)
            return
        flight.progress.evaluated(result)
        logger.info("evaluation %s", told(result))
        await self._keep(flight, result)

    async def _keep(self, flight: Flight, result: dict[str, Any]) -> None:
        try:
            await flight.patiently(
                "evaluation", lambda: flight.client.record_evaluation(msgspec.convert(result, EvaluationRequest))
            )
        except NotFound as error:
            logger.warning("evaluation %s is not kept: %s", self.held_out.name, error)


def told(result: dict[str, Any]) -> str:
    """Describe a result in one line."""
    error = "" if result["standard_error"] is None else f" ± {result['standard_error']:.3f}"
    versions = ", ".join(str(version) for version in result["versions"])
    return (
        f"{result['name']} at version {versions}: reward {result['reward_mean']:.3f}{error} over {result['rollouts']} "
        f"completions, {result['failed']} prompts failed, {result['seconds']:.1f} s"
    )

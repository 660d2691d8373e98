"""An engine whose tokens show the version that sampled them; run it as a process to kill it::

    python -m tests.generator.engines.rule_engine PORT VERSION CUTS HOLD

CUTS: JSON, see `ByRule.cuts`. HOLD: number of requests that it answers; it holds all later ones. It prints its address
when it listens, and `held` for every request that it holds.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from tests.generator.doubles import EngineDouble

PROMPT = [2, 0, 1]
VOCABULARY = 27

Segment = Sequence[tuple[int, int]]
"""(version, tokens): number of consecutive tokens of this version."""


def next_token(context: Sequence[int], version: int) -> int:
    """Return the next token, which depends on all tokens before it and on the version."""
    return (7 * len(context) + sum(context) + 5 * version) % VOCABULARY


def logprob(token: int, version: int) -> float:
    """Return a logprob that shows the version, exact in float32."""
    return -(token + 1) / 64 - version


class ByRule(EngineDouble):
    """Samples by rule up to `max_tokens`; the next entry of `cuts` cuts the completions of a request.

    A cut completion has the segments given and is aborted after them; an uncut one (None) is whole.
    """

    def __init__(self, version: int, **options: Any) -> None:
        super().__init__(version=version, **options)
        self.cuts: deque[list[Segment | None]] = deque()
        self.aborts = True
        self.always = self.by_rule

    async def by_rule(self, request: dict[str, Any]) -> dict[str, Any]:
        """Script: answer by rule."""
        cut = self.cuts.popleft() if self.cuts else [None] * request["n"]
        choices = [self._choice(request, index, segments) for index, segments in enumerate(cut)]
        return {"id": "cmpl", "model": self.model, "choices": choices, "usage": {}}

    def _choice(self, request: dict[str, Any], index: int, segments: Segment | None) -> dict[str, Any]:
        whole = segments is None or not self.aborts
        context: list[int] = list(request["prompt"])
        logprobs: list[float] = []
        spans: list[dict[str, Any]] = []
        for version, tokens in segments if segments is not None else [(int(self.version), request["max_tokens"])]:
            start = len(logprobs)
            for _ in range(tokens):
                context.append(next_token(context, version))
                logprobs.append(logprob(context[-1], version))
            spans.append({"version": str(version), "start": start, "end": len(logprobs)})
        changes: dict[str, Any] = {
            "index": index,
            "token_ids": context[len(request["prompt"]) :],
            "logprobs": {"token_logprobs": logprobs, "tokens": []},
            "finish_reason": "length" if whole else "abort",
        }
        return self.choice(request["prompt"], **changes | ({"weight_versions": spans} if self.labels else {}))


async def serve(port: int, version: int, cuts: list[list[Segment | None]], hold: int) -> None:
    """Serve until the process is killed."""
    engine = ByRule(version)
    engine.cuts.extend(cuts)

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        if len(engine.requests) > hold:
            print("held", flush=True)
            await asyncio.Event().wait()
        return await engine.by_rule(request)

    engine.always = answer
    async with engine.up(port):
        print(engine.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])))

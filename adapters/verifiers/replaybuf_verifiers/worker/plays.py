"""Plays: rollouts that verifiers runs here, with turns that the generator's engines sample.

::

    verifiers ──/inference/v1/generate──► TurnServer ──► Play ──PlayState──► generator ──► engines
                                          TurnServer ◄── Play ◄──TakeTurn─── generator
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from .messages import Rewritten, Scored

if TYPE_CHECKING:
    from aiohttp import web

STOPPED = "generator_bound"
"""Stop condition of a trace that gets no more turns: the generator's bound of length or turns is reached."""


class Over(Exception):
    """A play asked for a turn but gets no more."""


class Play:
    """One play, whose conversation only grows.

    ::

        ids(k + 1) = ids(k) + turn(k) + answer(k),   ids(0) = the prompt

    A play that breaks this has rendered its conversation again, and training would use tokens that the policy never
    sampled. It is cancelled and fails as `Rewritten`. Without `prompt_ids` any opening is accepted.
    """

    def __init__(self, prompt_ids: list[int] | None) -> None:
        self._ids = prompt_ids
        self._requests: asyncio.Queue[list[int] | None] = asyncio.Queue()  # answers before a turn; None: it ended
        self._turn: asyncio.Future[tuple[list[int], bool]] | None = None
        self._over = False
        self._rewritten: Rewritten | None = None
        self._task: asyncio.Task[Scored] | None = None

    def start(self, episode: Coroutine[Any, Any, Scored]) -> None:
        """Run it; `episode` returns its scores."""
        self._task = asyncio.get_running_loop().create_task(episode)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Scored]) -> None:
        if not task.cancelled():
            task.exception()  # marks it as retrieved, if nobody awaits the play
        self._requests.put_nowait(None)

    async def state(self) -> list[int] | Scored:
        """Wait for its next request for a turn, and return the answer before that; after its end return its scores.

        Raises `Rewritten`, `PlayFailed`.
        """
        answer = await self._requests.get()
        if answer is not None or self._task is None:
            return answer or []
        self._requests.put_nowait(None)  # for the next call
        if self._rewritten is not None:
            raise self._rewritten
        return self._task.result()

    def take(self, token_ids: list[int], *, cut_off: bool) -> None:
        """Give it the requested turn, if it still waits."""
        if self._turn is not None and not self._turn.done() and self._ids is not None:
            self._ids = self._ids + token_ids
            self._turn.set_result((token_ids, cut_off))

    def end(self) -> None:
        """Give it no more turns."""
        self._over = True
        if self._turn is not None and not self._turn.done():
            self._turn.set_exception(Over())

    def drop(self) -> None:
        """Cancel it."""
        self.end()
        if self._task is not None:
            self._task.cancel()

    async def sample(self, token_ids: list[int]) -> tuple[list[int], bool]:
        """Wait for the turn after these tokens, and whether it was cut off. Raises `Over` if there is none."""
        if self._over:
            raise Over
        self._check(token_ids)
        answer = token_ids if self._ids is None else token_ids[len(self._ids) :]
        self._ids = token_ids
        self._turn = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(answer)
        return await self._turn

    def _check(self, token_ids: list[int]) -> None:
        ids = token_ids if self._ids is None else self._ids
        if self._turn is not None and not self._turn.done():
            wrong = "asks for two turns at the same time"
        elif token_ids[: len(ids)] != ids:
            same = next((n for n, (a, b) in enumerate(zip(token_ids, ids, strict=False)) if a != b), len(token_ids))
            wrong = f"asks for a turn after {len(token_ids)} tokens that differ from its first {len(ids)} at {same}"
        elif (self._turn is not None) == (len(token_ids) == len(ids)):  # only the first turn follows without an answer
            wrong = f"asks for a turn after {len(token_ids)} tokens; it already has {len(ids)}"
        else:
            return
        self._rewritten = Rewritten(wrong)
        self.drop()
        raise Over


class TurnServer:
    """Replaces an engine: a request of verifiers' client becomes the request of a play for its next turn.

    It listens on a loopback port. The client sends the id of the play's trace with every request.
    """

    def __init__(self) -> None:
        self._plays: dict[str, tuple[Play, Any]] = {}
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen, once."""
        from aiohttp import web

        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=1 << 30)  # as verifiers' own server
            app.router.add_post("/inference/v1/generate", self._generate)
            self._runner = web.AppRunner(app)
            await self._runner.setup()
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    def add(self, play: Play, trace: Any) -> None:
        """Send the requests of this trace to a play."""
        self._plays[trace.id] = (play, trace)

    def remove(self, trace_id: str) -> None:
        """Reject further requests of this trace."""
        self._plays.pop(trace_id, None)

    async def _generate(self, request: web.Request) -> web.Response:
        from aiohttp import web

        play, trace = self._plays.get(request.headers.get("X-Session-ID", ""), (None, None))
        if play is None or trace is None:
            return web.json_response({"error": {"message": "unknown play"}}, status=404)
        try:
            token_ids, cut_off = await play.sample(msgspec.json.decode(await request.read())["token_ids"])
        except Over:
            trace.stop(STOPPED)
            return web.json_response({"error": {"message": "the play gets no more turns"}}, status=400)
        # The client needs logprobs; the generator keeps the real ones.
        logprobs = [{"token": f"token_id:{token}", "logprob": 0.0} for token in token_ids]
        choice = {
            "token_ids": token_ids,
            "finish_reason": "length" if cut_off else "stop",
            "logprobs": {"content": logprobs},
        }
        body = msgspec.json.encode({"request_id": trace.id, "choices": [choice]})
        return web.Response(body=body, content_type="application/json")

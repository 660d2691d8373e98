"""The harness of plays: a loop between a model and its tools.

Like verifiers' harness `null`, but in this process: that one fetches its program with `uv`, and starts an interpreter
for every rollout.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import MCPConnection, call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]

HARNESS = "replaybuf_chat"
sys.modules[HARNESS] = sys.modules[__name__]  # verifiers finds a harness by the name of a top-level module
CONNECT_S = 5.0

tools_of: dict[str, list[dict[str, Any]]] = {}
"""Tools offered to the model of a rollout, by the id of its trace; recorded only for ids that are keys."""


class ChatHarness(NullHarness):  # type: ignore[misc]
    """A conversation that goes on as long as the model calls tools."""

    async def setup(self, runtime: Any) -> None:
        """Do nothing."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Run one segment of the conversation, up to a reply without tool calls."""
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
            if trace.id in tools_of:
                tools_of[trace.id] = tools
            # No time limit: the reply comes when the turn is sampled, and the rollout's limits end it.
            client = await stack.enter_async_context(
                httpx.AsyncClient(
                    headers={"Authorization": f"Bearer {secret}"},
                    timeout=httpx.Timeout(None, connect=CONNECT_S),
                    verify=False,  # loopback HTTP; reading certificates is most of the cost of a client
                )
            )
            chat = _Chat(client, tools, dispatch, connected, tool_interception_url)
            try:
                await chat.run(f"{endpoint}/chat/completions", ctx.model, self._messages(data))
            except (httpx.HTTPStatusError, _Stopped) as error:  # verifiers records the cause, and handles it
                return ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return ProgramResult(exit_code=0, stdout="", stderr="")

    def _messages(self, data: Any) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        opening = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*opening, {"role": "user", "content": prompt}]
        return [*opening, *(message_to_wire(message) for message in prompt or [])]


class _Stopped(Exception):
    pass


class _Chat:
    def __init__(
        self,
        client: httpx.AsyncClient,
        tools: list[dict[str, Any]],
        dispatch: dict[str, tuple[str, str]],
        servers: dict[str, MCPConnection],
        gate_url: str | None,
    ) -> None:
        self._client = client
        self._tools = tools
        self._dispatch = dispatch
        self._servers = servers
        self._gate_url = gate_url

    async def run(self, url: str, model: str, messages: list[dict[str, Any]]) -> None:
        """Raise `httpx.HTTPStatusError` if the model does not reply, `_Stopped` if a hook ended the rollout."""
        offered = {"tools": self._tools} if self._tools else {}
        while True:
            completion = await self._post(url, {"model": model, "messages": messages, **offered})
            reply = completion["choices"][0]["message"]
            messages.append(reply)
            if not reply.get("tool_calls"):
                return
            for call in reply["tool_calls"]:
                messages.append(bound_tool_message(await self._answer(call)))

    async def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._client.post(url, json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    async def _answer(self, call: dict[str, Any]) -> dict[str, Any]:
        name, text = call["function"]["name"], call["function"]["arguments"] or "{}"
        try:
            arguments = json.loads(text)
        except json.JSONDecodeError:
            arguments = text
        if self._gate_url is not None:
            request = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
            decision = await self._post(self._gate_url, request)
            if decision["action"] == "stop":
                raise _Stopped(decision["reason"])
            if decision["action"] == "deny":
                denied: dict[str, Any] = decision["message"]
                return denied
        content = await self._call(name, arguments)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

    async def _call(self, name: str, arguments: Any) -> str | list[dict[str, Any]]:
        if name not in self._dispatch:
            return f"error: unknown tool {name!r}"
        if not isinstance(arguments, dict):
            return "error: tool arguments must be a JSON object; resend them as one"
        content: str | list[dict[str, Any]] = await call_mcp(self._servers, self._dispatch, name, arguments)
        return content

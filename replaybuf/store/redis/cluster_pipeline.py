"""Sends the commands of a pipeline to the nodes of a cluster, and single commands too.

Each node gets its commands in one exchange, and the waits for durability behind them on the same connection. The
weakest of the replies to a wait counts. Redirected commands were not executed: they go to the node that was named, in
their order, with waits of their own. Without waits, the commands of a node that is away get its error as their replies:
those of other nodes are answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, TypeVar

from redis.exceptions import AskError, MovedError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from replaybuf.store.redis.cluster import Cluster
from replaybuf.store.redis.sentinel_answers import Address

T = TypeVar("T")

MOST_REDIRECTIONS = 5
_WAITS = ("WAITAOF", "WAIT")
_KEYLESS = ("TIME", "INFO")
_ASKING = ("ASKING",)


class _Sent(NamedTuple):
    """A command to a node: its position in the pipeline, and whether the node is only about to get the slot."""

    position: int
    asking: bool = False


class Router:
    """Sends commands to the nodes of their keys; PING goes to every primary."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands and return their replies, errors too."""
        await self._cluster.find()
        waits = [words for words in commands if words[0] in _WAITS]
        routed = commands[: len(commands) - len(waits)]
        replies: list[Any] = [None] * len(routed)
        waited: list[list[Any]] = []
        left: dict[Address, list[_Sent]] = {}
        for position, words in enumerate(routed):
            try:
                for address in self._addresses(words):
                    left.setdefault(address, []).append(_Sent(position))
            except RedisConnectionError as error:
                if waits:
                    raise
                replies[position] = error
        for _ in range(MOST_REDIRECTIONS):
            if not left:
                break
            sent, left = left, {}
            exchanges = [self._exchange(node, commands, each, waits) for node, each in sent.items()]
            for (node, each), result in zip(sent.items(), await _all(exchanges), strict=True):
                own, node_waits = result
                waited.append(node_waits)
                for step, reply in zip(each, own, strict=True):
                    replies[step.position] = reply
                    if isinstance(reply, AskError):
                        left.setdefault(self._follow(reply, node), []).append(
                            _Sent(step.position, asking=not isinstance(reply, MovedError))
                        )
        return replies + [_weakest([each[number] for each in waited]) for number in range(len(waits))]

    def _addresses(self, words: Sequence[Any]) -> Sequence[Address]:
        if words[0] == "PING":
            return self._cluster.view.primaries
        key = key_of(words)
        return [self._cluster.view.primaries[0] if key is None else self._cluster.owner(key)]

    def _follow(self, reply: AskError, asked: Address) -> Address:
        address = reply.host or asked[0], reply.port
        if isinstance(reply, MovedError):
            self._cluster.move_slot(reply.slot_id, address)
        return address

    async def _exchange(
        self,
        address: Address,
        commands: Sequence[Sequence[Any]],
        sent: Sequence[_Sent],
        waits: Sequence[Sequence[Any]],
    ) -> tuple[list[Any], list[Any]]:
        """Send some of the commands, and waits, to one node; return the replies of both."""
        words: list[Sequence[Any]] = []
        for position, asking in sent:
            words += [_ASKING, commands[position]] if asking else [commands[position]]
        try:
            replies = await self._cluster.node(address).exchange([*words, *waits])
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            self._cluster.suspect()
            if waits:
                raise
            return [error] * len(sent), []
        own = [reply for reply, command in zip(replies, words, strict=False) if command is not _ASKING]
        return own, replies[len(words) :]


def key_of(words: Sequence[Any]) -> str | bytes | None:
    """Return the first key of a command; None for a command without keys."""
    if words[0] == "FCALL":
        key = words[3]
    elif words[0] == "XREAD":
        key = words[words.index(b"STREAMS") + 1]
    elif words[0] in _KEYLESS:
        return None
    else:
        key = words[1]
    return key if isinstance(key, (str, bytes)) else str(key)


async def _all(exchanges: Sequence[Awaitable[T]]) -> list[T]:
    """Await all; then raise the first error."""
    if len(exchanges) == 1:
        return [await exchanges[0]]
    results = await asyncio.gather(*exchanges, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]


def _weakest(replies: Sequence[Any]) -> Any:
    """Return the weakest reply to a wait: an error, or the fewest disks and replicas of each node."""
    for reply in replies:
        if isinstance(reply, Exception):
            return reply
    if isinstance(replies[0], list):
        return [min(each) for each in zip(*replies, strict=True)]
    return min(replies)

"""The connection to Redis of all commands: translates errors and waits until writes are durable.

A lost connection and a server that takes no writes raise `ServiceUnavailable`, a full server `NoRoom`. Acknowledged
writes go through `run_durably`, which waits for the server's confirmation on the same connection, and raises
`NotDurable` without one. A repeated write writes something too, so that its wait covers the first try.

One client serves all calls. The blocking read of new entries has its own. Payloads are read by a blocking client in a
thread: asyncio streams copy each byte four more times and need three times the processor time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry as BlockingRetry

from replaybuf.errors import Invalid, NotDurable, ReplaybufError, ServiceUnavailable, Unreadable
from replaybuf.store import keys
from replaybuf.store.chunks import READ_BYTES
from replaybuf.store.known_ends import Ends, KnownEnds, read_known
from replaybuf.store.redis.awake import keep_awake
from replaybuf.store.redis.cluster import Cluster
from replaybuf.store.redis.cluster_pipeline import Router
from replaybuf.store.redis.durability import STRICT, Barrier, WritePolicy
from replaybuf.store.redis.faults import (
    fenced,
    known_error,
    lacks_functions,
    older,
    replaced,
    starting,
    translate,
    unavailable,
    without_password,
)
from replaybuf.store.redis.inspection import (
    build_report,
    check_servers,
    inspect_servers,
    load_library,
    load_on_cluster,
)
from replaybuf.store.redis.pipeline import ExchangeClient, FastPipeline, IdleConnections, send_all
from replaybuf.store.redis.server import ServerReport, check_version
from replaybuf.store.redis.server import text as text
from replaybuf.store.redis.topology import URL_FORMS, parse_topology

COMMAND_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
STALL_PAUSE_S = 1.0
"""After a timeout, calls fail at once for this long."""


class Connection:
    """A connection to one Redis or Valkey server, the primary of a topology. Raises `Invalid` for a wrong address.

    - `url`: the address without its password, for messages
    - `policy`: what every acknowledged write must reach
    - `private`: no other service uses this server, so known ends are not shown to others
    - `known`: ends of each run's streams; functions change nothing on a server that holds less
    - `unconfirmed`: writes that were not confirmed in time
    - `replicas_confirmed`: replicas that confirmed the last write that waited for any
    - `process_id`: of the Redis process that was asked last; another one may lack what was not written durably
    - `explain_outage`: returns why the server is down, if the caller knows better than Sentinel
    - `cluster`: the nodes, if the keys are spread over several
    """

    def __init__(
        self,
        url: str,
        policy: WritePolicy = STRICT,
        *,
        command_timeout_s: float | None = None,
        connect_timeout_s: float | None = None,
        private: bool = False,
        explain_outage: Callable[[], str | None] | None = None,
    ) -> None:
        self.url = without_password(url)
        self.command_timeout_s = COMMAND_TIMEOUT_S if command_timeout_s is None else command_timeout_s
        self.policy = policy
        self.known = KnownEnds()
        self._shown = "" if private or policy.level == "relaxed" else "1"
        self.unconfirmed = self.replicas_confirmed = 0
        self.process_id = ""
        self._topology = parse_topology(url, self._switch)
        self.cluster = self._topology if isinstance(self._topology, Cluster) else None
        self._explain_outage = explain_outage or self._topology.explain
        self._prepared, self._preparing = False, asyncio.Lock()
        self._stalled_until_s = 0.0
        self._barrier: Barrier | None = None
        self._reads_durable = True
        common: dict[str, Any] = {
            "protocol": 3,
            "legacy_responses": False,
            "socket_read_size": READ_BYTES,
            "socket_connect_timeout": CONNECT_TIMEOUT_S if connect_timeout_s is None else connect_timeout_s,
            "health_check_interval": 0,
            # With these notifications redis-py does not check whether a pooled connection was closed.
            "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        }
        retry, timeouts_s = Retry(NoBackoff(), 0), (None, self.command_timeout_s)  # a cluster's nodes have the last
        try:
            clients = [self._topology.open_client(socket_timeout=each, retry=retry, **common) for each in timeouts_s]
        except ValueError:  # its message may hold a part of the password
            detail = f"redis_url is {self.url!r}; use {URL_FORMS}"
            raise Invalid(detail, name="redis_url", value=self.url, bound=URL_FORMS) from None
        pools = [client.connection_pool for client in clients]
        self._idle = [IdleConnections(pool) for pool in pools]
        self._send = Router(self.cluster).exchange if self.cluster else self._idle[1].exchange
        self.client = ExchangeClient(pools[1], self._send)
        self._blocking = ExchangeClient(pools[0], self._idle[0].exchange)
        self.payload_client = self._topology.open_blocking_client(
            socket_timeout=self.command_timeout_s, retry=BlockingRetry(NoBackoff(), 0), **common
        )

    async def close(self) -> None:
        """Close all connections, and the files of known ends."""
        self.known.close()
        await self._topology.close()
        await self.client.aclose()
        await self._blocking.aclose()
        self.payload_client.close()

    # ------------------------------------------------------------------ commands

    def pipeline(self) -> FastPipeline:
        """Start a pipeline; it is not a transaction."""
        return FastPipeline(self.client, self._send)

    async def client_of(self, key: str) -> aioredis.Redis:
        """Return a client whose connections lead to the server of this key."""
        if self.cluster is None:
            return self.client
        return (await self._answer(self.cluster.find_owner(key))).client  # type: ignore[no-any-return]

    async def run(self, command: Awaitable[Any]) -> Any:
        """Await a command on a prepared server, and translate its errors."""
        try:
            if not self._prepared:
                await self.prepare()
            elif self._stalled_until_s:
                self._check_stall()
        except BaseException:
            if isinstance(command, Coroutine):
                command.close()  # it is never awaited
            raise
        return await self._answer(command)

    async def run_durably(self, pipe: FastPipeline, may_fail: int = 0) -> list[Any]:
        """Execute a pipeline of writes, as `write` does."""
        commands, pipe.command_stack = pipe.command_stack, []
        return await self.write([words for words, _ in commands], may_fail)

    async def write(self, commands: Sequence[Sequence[Any]], may_fail: int = 0) -> list[Any]:
        """Send writes; return their replies, as the parser returns them, when the server has confirmed them.

        Errors of the first `may_fail` commands are returned in place of their replies.
        """
        if not self._prepared:  # now, not in `run`: how to wait follows from what the server says of itself
            await self.prepare()
        barrier = self._barrier
        waits = barrier.commands if barrier else ()
        command = send_all(self._send, [*commands, *waits], may_fail, len(waits))
        switches = self._topology.switches
        if barrier and barrier.in_background:
            async with keep_awake(self.pipeline):
                all_replies: list[Any] = await self.run(command)
        else:
            all_replies = await self.run(command)
        if switches != self._topology.switches:  # replicas of the old primary have confirmed what the new one may lack
            raise unavailable(self.url, "has another primary since the write began; send it again")
        if barrier is None:
            return all_replies
        replies, waited = all_replies[: -len(waits)], all_replies[-len(waits) :]
        try:
            confirmed = barrier.check(waited)
        except NotDurable:
            self.unconfirmed += 1
            raise
        if barrier.replicas:
            self.replicas_confirmed = confirmed
        return replies

    def words_of(
        self, run: str, function: str, names: Sequence[str] = (), arguments: Sequence[Any] = (), token: str = ""
    ) -> list[Any]:
        """Return the command that calls a function for a run; `check_reply` checks its reply.

        The function does nothing unless Redis holds all that this process knows of the run, and on a shared strict
        server all that others know, and unless `token` (if given) is the newest.
        """
        known, first = self.known.of(run), keys.guarded(run)
        group = known.group, known.payload_key
        guard = [token, known.entry, known.entry_key, *group, known.incarnation, self._shown]
        return ["FCALL", function, len(first) + len(names), *first, *names, *guard, *arguments]

    def check_reply(self, run: str, token: str, reply: Sequence[Any] | RedisError) -> tuple[str, Any]:
        """Return outcome and detail of a function.

        Raises the translated error of a command, and `NotLeader` if the token is old. If Redis holds less than it
        acknowledged, raises `DataLost`, or `LedgerGap` with relaxed durability. Raises `LedgerGap` for a caller that
        knows a deleted run of this name.
        """
        if isinstance(reply, (RedisError, OSError)):
            raise self.explain(reply)
        outcome = text(reply[0])
        if outcome == "older":
            # Another server may know more than we do. It may end; we go on.
            self.known.advance(run, read_known(reply))
            known, shown = self.known.of(run), Ends(int(reply[1]), int(reply[2]), "", int(reply[3]))
            raise older(run, known, shown, relaxed=self.policy.level == "relaxed")
        if outcome == "fenced":
            raise fenced(run, token, text(reply[1]))
        if outcome == "starting":
            raise starting(self.url, int(reply[1]) / 1000)
        if outcome == "replaced":  # the ends stay until the state that was read with them is dropped
            raise replaced(run, self.known.of(run).incarnation, int(reply[1]))
        if reply[2] and not self.known.of(run):
            self.known.begin(run, int(reply[2]))
        return outcome, reply[1]

    async def run_each(self, pipe: FastPipeline) -> list[Any]:
        """Execute a pipeline for several runs; errors of commands stay in place of their replies.

        Raises what keeps all of them from being answered. In a cluster some may be answered while a node is away.
        """
        replies: list[Any] = await self.run(pipe.execute(raise_on_error=False))
        errors = [reply for reply in replies if isinstance(reply, (RedisError, OSError))]
        for error in errors:
            explained = self.explain(error)
            partly = self.cluster and isinstance(explained, ServiceUnavailable) and len(errors) < len(replies)
            if not partly and not isinstance(explained, Unreadable):
                raise self._failed(error) from error
        return replies

    async def call(
        self,
        run: str,
        function: str,
        names: Sequence[str] = (),
        arguments: Sequence[Any] = (),
        token: str = "",
        *,
        durably: bool = False,
    ) -> tuple[str, Any]:
        """Call a function for a run; return outcome and detail. Raises what `check_reply` raises."""
        words = self.words_of(run, function, names, arguments, token)
        (reply,) = await (self.write([words]) if durably else self.run(send_all(self._send, [words])))
        return self.check_reply(run, token, reply)

    async def read(self, run: str, pipe: FastPipeline) -> list[Any]:
        """Execute a pipeline of reads of a run. Raises what `check_reply` raises.

        What an older Redis lacks must not look like what was never stored: groups would become dead letters.
        """
        pipe.execute_command(*self.words_of(run, "rb_ends"))  # on the same connection, so by the same server
        replies: list[Any] = await self.run(pipe.execute())
        self.check_reply(run, "", replies.pop())
        return replies

    async def read_one(self, run: str, *words: Any) -> Any:
        """Execute one read of a run. Raises what `check_reply` raises."""
        return (await self.read(run, self.pipeline().execute_command(*words)))[0]

    async def write_one(self, *words: Any) -> Any:
        """Execute one write, durably."""
        return (await self.write([words]))[0]

    def explain(self, error: RedisError | OSError) -> ReplaybufError:
        """Translate an error of the Redis client."""
        return translate(error, self.url, self.command_timeout_s, self._explain_outage())

    async def read_blocking(self, streams: Mapping[Any, Any], timeout_s: float) -> Any:
        """Read one entry of each stream, or block until there is one; None after `timeout_s`."""
        words = ("XREAD", "BLOCK", int(timeout_s * 1000), "COUNT", 1, "STREAMS", *streams, *streams.values())
        read = self._blocking.execute_command(*words)  # the coroutine of `xread` holds another: `run` closes one only
        within_s = timeout_s + self.command_timeout_s
        try:
            async with asyncio.timeout(within_s):
                return await self.run(read)
        except TimeoutError:
            self._start_stall()
            raise unavailable(self.url, f"did not answer a blocking read within {within_s} s") from None

    @property
    def trouble(self) -> str | None:
        """Why the primary, or one of them, cannot be used; None if nothing is known."""
        return self._topology.explain()

    async def check_writable(self) -> None:
        """Raise `ServiceUnavailable` while Redis cannot be reached or takes no writes."""
        if self.cluster and self.trouble:
            raise unavailable(self.url, f"cannot be used: {self.trouble}")
        await self.run(self.client.srem(keys.RUNS, ""))  # a write that changes nothing

    # ------------------------------------------------------------------ the server

    @property
    def reads_are_durable(self) -> bool:
        """Check whether readers see durable entries only."""
        return self._barrier is None or self._reads_durable

    async def check_role(self) -> None:
        """Raise `UnsupportedServer` unless a primary of its own answers, `Invalid` for a name unknown to Sentinel."""
        await self._topology.check()
        await check_servers(self.client, self._topology, self._answer, self.policy, self.url)

    async def prepare(self) -> None:
        """Check the server's version and load the function library, unless the prepared server still answers.

        After each lost connection another server may answer, with no functions or with those of another release.
        Raises `UnsupportedServer` if the server is too old.
        """
        if self._prepared:
            return
        self._check_stall(claim=False)
        async with self._preparing:
            if not self._prepared:
                self._check_stall()
                check_version((await self._inspect()).version, self.url)
                cluster, answer = self.cluster, self._answer
                await (load_on_cluster(cluster, answer) if cluster else load_library(self.client, answer))
                self._prepared = True

    async def report(self) -> ServerReport:
        """Read the server's version and persistence; later writes wait accordingly."""
        self._check_stall()
        return await self._inspect()

    async def _inspect(self) -> ServerReport:
        inspection = await inspect_servers(self.client, self.cluster, self._answer, self._topology.fails_over)
        report, durability = build_report(inspection, self.policy)
        self.process_id = " ".join(sorted(str(server.info.get("run_id", "")) for server in inspection))
        self._barrier, self._reads_durable = durability.barrier, durability.reads_durable
        return report

    async def _answer(self, command: Awaitable[Any]) -> Any:
        try:
            reply = await command
        except (RedisError, OSError, RuntimeError) as error:
            raise self._failed(known_error(error)) from error
        self._stalled_until_s = 0.0
        return reply

    def _failed(self, error: RedisError | OSError) -> ReplaybufError:
        """Note what an error says of the server; return the translated one."""
        if isinstance(error, (MovedError, RedisConnectionError, OSError)) and self.cluster:
            self.cluster.suspect()  # its map says which nodes are to be prepared
        elif isinstance(error, RedisTimeoutError):
            self._start_stall()
        elif isinstance(error, (RedisConnectionError, OSError)):
            self._forget_server()  # a refused connection fails at once: no caller has to be spared
        elif lacks_functions(error):
            self._prepared = False
        return self.explain(error)

    def _switch(self) -> None:
        """Cut the connections to a primary that is down or was replaced; a cluster cuts those to its nodes itself."""
        for connections in self._idle:
            connections.cut()
        self.payload_client.connection_pool.disconnect()
        self._forget_server()

    def _forget_server(self) -> None:
        """Prepare the next server that answers: another one may have become the primary."""
        self._stalled_until_s = 0.0
        self._prepared = False

    def _start_stall(self) -> None:
        """Record that Redis did not answer in time."""
        self._stalled_until_s = time.monotonic() + STALL_PAUSE_S
        self._prepared = False

    def _check_stall(self, *, claim: bool = True) -> None:
        """Fail at once while Redis is silent, but let one call at a time (which `claim`s it) find out.

        Otherwise callers that wait for each other's locks would each wait the whole timeout, one after another.
        """
        now_s = time.monotonic()
        if now_s < self._stalled_until_s:
            raise unavailable(self.url, f"does not answer; the next try is within {self.command_timeout_s} s")
        if self._stalled_until_s and claim:
            self._stalled_until_s = now_s + self.command_timeout_s

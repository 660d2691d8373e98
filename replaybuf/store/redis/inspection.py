"""Examines the servers behind a connection: version, persistence, functions, and what is true of all together."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import redis.asyncio as aioredis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from replaybuf.errors import ReplaybufError, ServiceUnavailable, UnsupportedServer
from replaybuf.store.redis.cluster import Cluster, ClusterNode
from replaybuf.store.redis.cluster_map import name
from replaybuf.store.redis.durability import Barrier, Durability, ServerSettings, WritePolicy, assess
from replaybuf.store.redis.faults import known_error, translate, unavailable
from replaybuf.store.redis.sentinel import SentinelPrimary
from replaybuf.store.redis.sentinel_answers import Address
from replaybuf.store.redis.server import (
    CONFIG_NAMES,
    LIBRARY,
    LIBRARY_CODE,
    ServerReport,
    check_cluster_mode,
    check_role,
    check_version,
    read_name,
    read_replicas,
    read_settings,
    read_version,
    text,
)
from replaybuf.store.redis.topology import Topology

logger = logging.getLogger(__name__)

NODE_TIMEOUT_S = 2.0
"""Time for one node of a cluster: the others must not wait for one that is silent."""
Answer = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Awaits a command, and raises its translated error."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inspection:
    """What a server said of itself. `address`: of a node of a cluster, else ""."""

    address: str
    info: dict[str, Any]
    settings: ServerSettings


async def inspect(client: aioredis.Redis, answer: Answer, fails_over: bool, address: str = "") -> Inspection:
    """Read how a server persists."""
    info: dict[str, Any] = await answer(client.info())
    config, refusal = await _read_config(client, answer)
    settings = read_settings(info, config, await _has_waitaof(client, answer), refusal, fails_over)
    return Inspection(address, info, settings)


async def inspect_servers(
    client: aioredis.Redis, cluster: Cluster | None, answer: Answer, fails_over: bool
) -> list[Inspection]:
    """Read how the server persists, or each primary of a cluster that answers."""
    return await inspect_cluster(cluster, answer) if cluster else [await inspect(client, answer, fails_over)]


async def load_library(client: aioredis.Redis, answer: Answer) -> None:
    """Load the function library, unless the server has it."""
    listed = await answer(client.function_list(LIBRARY, withcode=True))
    if any(entry[b"library_code"] == LIBRARY_CODE.encode() for entry in listed):
        return  # loading needs memory, which a full server does not have
    await answer(client.function_load(LIBRARY_CODE, replace=True))


async def inspect_cluster(cluster: Cluster, answer: Answer) -> list[Inspection]:
    """Read how each primary persists; skip those that do not answer, unless none does."""
    await answer(cluster.find())

    async def inspect_node(node: ClusterNode) -> Inspection:
        async with asyncio.timeout(NODE_TIMEOUT_S):
            return await inspect(node.client, answer, fails_over=True, address=name(node.address))

    results = await asyncio.gather(*map(inspect_node, cluster.primaries), return_exceptions=True)
    _raise_unexpected(results)
    answered = [result for result in results if isinstance(result, Inspection)]
    if not answered:
        raise unavailable("the cluster", f"cannot be used: {cluster.explain() or 'no primary answers'}")
    return answered


async def load_on_cluster(cluster: Cluster, answer: Answer) -> None:
    """Load the function library on every primary that answers; replicas get it from them."""

    async def load_node(node: ClusterNode) -> None:
        async with asyncio.timeout(NODE_TIMEOUT_S):
            await load_library(node.client, answer)

    _raise_unexpected(await asyncio.gather(*map(load_node, cluster.primaries), return_exceptions=True))


def _raise_unexpected(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, (ServiceUnavailable, TimeoutError)):
            raise result


async def check_servers(
    client: aioredis.Redis, topology: Topology, answer: Answer, policy: WritePolicy, url: str
) -> None:
    """Refuse servers that cannot be used; under `strict` also those that lose data or differ, replicas included.

    Raises `UnsupportedServer`, `ServiceUnavailable`.
    """
    if isinstance(topology, Cluster):
        await _check_cluster(topology, answer, policy, url)
    elif isinstance(topology, SentinelPrimary):
        await _check_sentinel(client, topology, answer, policy, url)
    else:
        check_role(await answer(client.info()), url)


async def _check_cluster(cluster: Cluster, answer: Answer, policy: WritePolicy, url: str) -> None:
    """Refuse a cluster with slots that nobody serves as well. Each replica may become a primary."""
    await answer(cluster.find())
    if trouble := cluster.explain():
        raise unavailable(url, f"cannot be used: {trouble}")
    nodes = [*cluster.primaries, *cluster.replicas]
    inspections = await asyncio.gather(*(inspect(each.client, answer, True, name(each.address)) for each in nodes))
    for each in inspections:
        check_cluster_mode(each.info, each.address)
        check_version(read_version(each.info), each.address)
    _check_nodes(inspections, policy, f"the cluster at {url}", url)


async def _check_sentinel(
    client: aioredis.Redis, sentinels: SentinelPrimary, answer: Answer, policy: WritePolicy, url: str
) -> None:
    """Refuse a server that is not a primary as well. A warning names a replica that does not answer."""
    primary = await inspect(client, answer, True, name(await answer(sentinels.find())))
    check_role(primary.info, url)

    async def inspect_replica(address: Address) -> Inspection | None:
        try:
            async with asyncio.timeout(NODE_TIMEOUT_S), sentinels.open_replica(address, NODE_TIMEOUT_S) as replica:
                return await inspect(replica, functools.partial(_answer_of, name(address)), True, name(address))
        except (ReplaybufError, TimeoutError) as error:
            logger.warning("replica %s cannot be checked: %s", name(address), error or "it does not answer")
            return None

    replicas = await asyncio.gather(*map(inspect_replica, read_replicas(primary.info)))
    _check_nodes([primary, *filter(None, replicas)], policy, f"Redis at {url}", url)


async def _answer_of(address: str, command: Awaitable[Any]) -> Any:
    try:
        return await command
    except (RedisError, OSError, RuntimeError) as error:
        raise translate(known_error(error), address, NODE_TIMEOUT_S) from error


def _check_nodes(nodes: Sequence[Inspection], policy: WritePolicy, what: str, url: str) -> None:
    if policy.level == "strict" and (faults := find_faults(nodes)):
        detail = (
            f"{what} does not keep acknowledged writes: {'; '.join(faults)}. Change this on every node, "
            "replicas too, or serve with --durability relaxed"
        )
        raise UnsupportedServer(detail, name="redis_url", value=url, bound="strict")


def find_faults(nodes: Sequence[Inspection]) -> list[str]:
    """Return why a primary and its replicas, or nodes of a cluster, do not keep acknowledged writes together."""
    faults = [f"{node.address}: {fault}" for node in nodes for fault in _faults(node.settings)]
    versions = {read_name(node.info): node.address for node in nodes}
    if len(versions) > 1:
        faults.append("mixed versions: " + ", ".join(f"{address} has {own}" for own, address in versions.items()))
    return faults


def _faults(node: ServerSettings) -> list[str]:
    faults = []
    if node.appendonly is False:
        faults.append("appendonly is 'no': set appendonly yes")
    if node.policy not in ("noeviction", None):
        faults.append(f"maxmemory-policy is {node.policy!r}: set noeviction")
    return faults


def build_report(inspections: Sequence[Inspection], policy: WritePolicy) -> tuple[ServerReport, Durability]:
    """Build the report of one server, or of all primaries of a cluster: the weakest counts."""
    each = [assess(inspection.settings, policy) for inspection in inspections]
    first, info = inspections[0], inspections[0].info
    weakest = next((assessed for assessed in each if assessed.level == "relaxed"), each[0])
    reasons = dict.fromkeys(
        _reason(inspection.address, text)
        for inspection, own in zip(inspections, each, strict=True)
        for text in own.reasons
    )
    names = sorted({read_name(inspection.info) for inspection in inspections})
    durability = dataclasses.replace(
        weakest,
        reasons=tuple(reasons),
        barrier=_common_barrier([own.barrier for own in each]),
        reads_durable=all(own.reads_durable for own in each),
    )
    report = ServerReport(
        version=read_version(info),
        name=", ".join(names),
        durability=durability.level,
        met_by=durability.met_by,
        reasons=durability.reasons,
        policy=policy,
        replicas=min(inspection.settings.replicas for inspection in inspections),
        used_memory_bytes=sum(int(inspection.info.get("used_memory", 0)) for inspection in inspections),
        max_memory_bytes=sum(int(inspection.info.get("maxmemory", 0)) for inspection in inspections),
        max_memory_policy=first.settings.policy or "unknown",
    )
    return report, durability


def _reason(address: str, text: str) -> str:
    return f"{address}: {text}" if address and not text.startswith("wait_replicas") else text


def _common_barrier(barriers: Sequence[Barrier | None]) -> Barrier | None:
    """Return the wait that every node can answer."""
    waits = [barrier for barrier in barriers if barrier]
    if not waits:
        return None
    common = dataclasses.replace(
        waits[0],
        local=len(waits) == len(barriers) and all(wait.local for wait in waits),
        in_background=any(wait.in_background for wait in waits),
    )
    return common if common.commands else None


async def _read_config(client: aioredis.Redis, answer: Answer) -> tuple[dict[str, str], str | None]:
    """Return the server's configuration, or why the server refuses it."""
    try:
        raw = await answer(client.config_get(*CONFIG_NAMES))
    except ReplaybufError as error:  # some Redis services refuse CONFIG; INFO holds a part of it
        cause = error.__cause__
        refused = isinstance(cause, NoPermissionError)
        if not refused and (not isinstance(cause, ResponseError) or isinstance(error, ServiceUnavailable)):
            raise
        return {}, str(cause)
    return {text(key): text(value) for key, value in raw.items()}, None


async def _has_waitaof(client: aioredis.Redis, answer: Answer) -> bool:
    try:
        await answer(client.execute_command("WAITAOF", 0, 0, 0))  # type: ignore[no-untyped-call]
    except ReplaybufError as error:
        if isinstance(error.__cause__, ResponseError):  # unknown or not allowed; a primary may just be a replica now
            return "replica" in str(error.__cause__)
        raise
    return True

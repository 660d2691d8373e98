"""Translate errors of the Redis client and of Redis servers to `ReplaybufError`s."""

from __future__ import annotations

import re

from redis.exceptions import BusyLoadingError, InvalidResponse, NoPermissionError, OutOfMemoryError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from replaybuf.errors import DataLost, LedgerGap, NoRoom, NotLeader, ReplaybufError, ServiceUnavailable, Unreadable
from replaybuf.store.known_ends import Ends, Loss

# Error codes of writes that the server may take later: it cannot save, is a replica, lost its replicas, ...
_RETRY_CODES = "MISCONF|READONLY|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY|UNBLOCKED|MOVED|ASK"
# WAIT and WAITAOF have no code of their own for a primary that has just become a replica.
_TAKES_NO_WRITES = re.compile(
    rf"(?:^|caused error: )\W*(?:{_RETRY_CODES})\b|^\W*(?:ERR )?WAIT(?:AOF)? cannot be used with replica instances"
)


def without_password(url: str) -> str:
    """Return a Redis address without its password, for answers and logs."""
    shown = re.sub(r"(?<=://)([^:@/?]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&](?:\w+_)?password=)[^&]*", r"\1***", shown)


def translate(error: RedisError | OSError, url: str, timeout_s: float, outage: str | None = None) -> ReplaybufError:
    """Return our error for `error` of a command sent to `url` with this timeout.

    `outage`: why the server is down, if known.
    """
    match error:
        case RedisTimeoutError():
            return unavailable(url, f"did not answer within {timeout_s} s")
        case OutOfMemoryError():
            return NoRoom(f"Redis at {url} is out of memory: {error}", name="maxmemory")
        case BusyLoadingError():
            return unavailable(url, f"takes no writes for now: {error}")
        case RedisConnectionError() | OSError():
            return unavailable(url, f"cannot be reached: {outage or error or type(error).__name__}")
        case InvalidResponse():  # another program has its port, or a proxy stands before it
            return unavailable(url, f"does not answer as a Redis: {error}")
        case NoPermissionError():  # an operator changes rights, or a new primary has other ones
            return unavailable(url, f"refuses a command: {error}; docs/security.md lists the rights that are needed")
    if _TAKES_NO_WRITES.search(f"{getattr(error, 'status_code', None) or ''} {error}"):
        return unavailable(url, f"takes no writes for now: {error}")
    if lacks_functions(error):
        return unavailable(url, "was replaced: it lacked our functions, which the next command loads")
    if "WRONGTYPE" in str(error):
        detail = f"a key has a type that no service gives it: {error}; delete the key, or restore it"
        return Unreadable(detail, name="redis")
    return ReplaybufError(f"Redis at {url} refused a command: {error}", name="redis")


def unavailable(url: str, how: str) -> ServiceUnavailable:
    """Build the error of a Redis that may answer later."""
    return ServiceUnavailable(f"Redis at {url} {how}", name="redis", value=url)


def starting(url: str, left_s: float) -> ServiceUnavailable:
    """Build the error of a Redis that has just begun to serve, and may be an older copy."""
    how = "has just started or become the primary; before anything is written, every server shows what it knows of it"
    return ServiceUnavailable(f"Redis at {url} {how}", name="redis", value=url, retry_after_s=left_s)


def dropped_payload(url: str) -> ServiceUnavailable:
    """Build the error of a Redis that evicted what was just written."""
    return unavailable(url, "dropped a payload; set maxmemory-policy noeviction")


def lacks_functions(error: Exception) -> bool:
    """Check whether the server does not have our functions: it is not the server that was prepared."""
    return "Function not found" in str(error)


def data_lost(run: str, cause: str, **missing: int) -> DataLost:
    """Build the error of a Redis that lacks acknowledged data: `missing` entries and groups."""
    detail = (
        f"run {run}: {cause}; Redis was emptied, or replaced by an older copy. The service writes nothing more for "
        "this run. Restore Redis from its append-only file; the service then continues. To go on without what is "
        f"missing: replaybuf runs accept-loss {run}"
    )
    return DataLost(detail, name="redis", value=run, **missing)


def older(run: str, known: Ends, shown: Ends, *, relaxed: bool) -> DataLost | LedgerGap:
    """Build the error of a Redis whose streams end at `found`, before what is `known`.

    A relaxed Redis may lose its last second; the run continues from what it has.
    """
    missing = [
        f"{name} {first + 1} to {last}"
        for name, first, last in (("ledger entries", shown.entry, known.entry), ("groups", shown.group, known.group))
        if first < last
    ]
    if known.incarnation > shown.incarnation:
        missing = ["the deletion of the run and what followed it"]
    if not missing:
        missing = [f"ledger entry {known.entry} or group {known.group} as it was acknowledged (another has its number)"]
    lacks = " and ".join(missing)
    if relaxed and shown.entry:
        return LedgerGap(f"run {run}: Redis lost {lacks}; durability is relaxed", name="redis", value=run)
    seen = f"the ledger ends at entry {shown.entry} and the index at group {shown.group}"
    loss = Loss(shown, known)
    return data_lost(run, f"{seen}; missing: {lacks}", entries=loss.entries, groups=loss.groups)


def replaced(run: str, known: int, shown: int) -> LedgerGap:
    """Build the error of a process that knows an older incarnation of a run."""
    detail = (
        f"run {run} was deleted, or a loss accepted: Redis has incarnation {shown} of the name, this process knows "
        f"incarnation {known}. A service reads the run again; start a producer that writes to Redis itself again"
    )
    return LedgerGap(detail, name="run", value=run)


def fenced(run: str, token: str, newest: str) -> NotLeader:
    """Build the error of a write with an old fencing token."""
    detail = (
        f"run {run}: our fencing token is {token or 'missing'}, the newest is {newest or 'missing'}; another server "
        "leads"
    )
    return NotLeader(detail, name="leader", bound=newest)


def known_error(error: RedisError | OSError | RuntimeError) -> RedisError | OSError:
    """Return an error of redis-py for what a command raised. Raises any other `RuntimeError`.

    uvloop raises RuntimeError for a write on a connection that the other side has just closed.
    """
    if not isinstance(error, RuntimeError):
        return error
    if "handler is closed" in str(error):
        return RedisConnectionError("the connection was closed")
    raise error

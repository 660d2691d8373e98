"""What goes wrong with Redis, in our own words: errors of the client and of servers become `ReplaybufError`s."""

from __future__ import annotations

import re

from redis.exceptions import BusyLoadingError, OutOfMemoryError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from replaybuf.errors import DataLost, NoRoom, NotLeader, ReplaybufError, ServiceUnavailable

# Words with which a server refuses writes that it may take later: it cannot save, is a replica, lost its replicas, ...
_NOT_NOW = "MISCONF|READONLY|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY|UNBLOCKED"
_TAKES_NO_WRITES = re.compile(rf"(?:^|caused error: )\W*(?:{_NOT_NOW})\b")


def without_password(url: str) -> str:
    """Return the address of a Redis as it may be shown to callers and in logs."""
    shown = re.sub(r"(?<=://)([^:@/?]*):.*@", r"\1:***@", url)
    return re.sub(r"(?<=[?&]password=)[^&]*", "***", shown)


def told(error: RedisError | OSError, url: str, timeout_s: float, why_away: str | None = None) -> ReplaybufError:
    """Tell what `error`, of a command sent to `url` with this timeout, means for whoever sent it.

    `why_away`: what is known of why the server cannot be reached.
    """
    match error:
        case RedisTimeoutError():
            return unavailable(url, f"did not answer within {timeout_s} s")
        case OutOfMemoryError():
            return NoRoom(f"Redis at {url} is out of memory: {error}", name="maxmemory")
        case BusyLoadingError():
            return unavailable(url, f"takes no writes for now: {error}")
        case RedisConnectionError() | OSError():
            return unavailable(url, f"cannot be reached: {why_away or error or type(error).__name__}")
    if _TAKES_NO_WRITES.search(f"{getattr(error, 'status_code', None) or ''} {error}"):
        return unavailable(url, f"takes no writes for now: {error}")
    if lacks_functions(error):
        return unavailable(url, "did not have our functions: it was replaced; they are loaded before the next command")
    return ReplaybufError(f"Redis at {url} refused a command: {error}", name="redis")


def unavailable(url: str, how: str) -> ServiceUnavailable:
    """Build the error of a Redis that may answer later."""
    return ServiceUnavailable(f"Redis at {url} {how}", name="redis", value=url)


def lacks_functions(error: Exception) -> bool:
    """Say whether the server does not know our functions: another one than that which was prepared answers."""
    return "Function not found" in str(error)


def data_lost(run: str, seen: str) -> DataLost:
    """Build the error of a Redis that does not hold what it acknowledged."""
    return DataLost(
        f"run {run}: {seen}; Redis was emptied, or replaced by an older copy, under the running service, which writes "
        "nothing more for this run. Restore Redis from its append-only file; the service goes on once all is there",
        name="redis",
        value=run,
    )


def fenced(run: str, token: str, newest: str) -> ReplaybufError:
    """Build the error of a write with an old fencing token; "" as the newest means that Redis was emptied."""
    if not newest:
        return data_lost(run, f"the fencing token is gone, and {token} was acknowledged")
    return NotLeader(
        f"run {run}: our fencing token is {token}, the newest is {newest}; another server leads",
        name="leader",
        bound=newest,
    )

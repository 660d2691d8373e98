"""Every error of replaybuf, in one table.

::

    ReplaybufError
    ├── Invalid             422  a value outside its bound (configuration, parameter, group)
    │   ├── GroupRejected   422  one group may not enter; `reason` is what it is counted by
    │   └── InvalidGroups   422  every group of an append was rejected
    ├── Malformed           400  bytes that do not decode to the declared shape
    │   └── BrokenFrame     400  a group frame with a wrong magic, length, checksum or column
    ├── Unauthorized        401  no token, or one that is not known
    ├── Forbidden           403  a token whose role may not make this call
    ├── NotFound            404  unknown run, ticket, group, step
    ├── NotAcceptable       406  a coding that a body does not come in
    ├── Conflict            409  the change would break a guarantee
    │   ├── Fenced          409  an epoch that a newer one replaced
    │   └── WrongStep       409  a step out of order
    ├── Gone                410  bytes that a checkpoint freed
    │   └── RunFinished     410  no further batch will come
    ├── TooLarge            413  body or group above its limit
    ├── UnsupportedMedia    415  unknown media type
    ├── NoRoom              429  capacity or memory used up; retry after a while
    ├── ServiceUnavailable  503  service or Redis not reachable; retry after a while
    │   ├── NotDurable      503  written, but not confirmed on disk or replicas in time; send it again
    │   ├── NotLeader       503  this server follows another one; ask that one, or again after its lease
    │   ├── LedgerGap       503  a stream that does not go on where it was folded to; its run is read anew
    │   └── UnsupportedServer    a Redis that is too old or lacks what we need
    ├── DataLost            500  Redis does not hold what it acknowledged; the service refuses to go on
    │   └── Unreadable      500  what Redis holds of a run cannot be read; the other runs are served
    ├── StrategyFault       500  a strategy broke its contract
    ├── EngineFault              an inference engine gave no usable answer to one request
    │   ├── EngineAway           an engine that is not reachable, too late or broken; another try may help
    │   └── EngineUnfit          an engine that serves something else or lacks what is needed
    ├── PromptFault              a ticket whose prompt could not be made or used
    ├── RewardFault              a reward that raised, hung or was not a finite number
    └── MissingExtra             an optional dependency that is not installed

Messages give the name, the value and the bound; the same three travel in the problem document (RFC 9457).
"""

from __future__ import annotations

from typing import Any, ClassVar


class ReplaybufError(Exception):
    """Report that something did not go as asked: `name` had `value`, the bound was `bound`."""

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, *, name: str | None = None, value: Any = None, bound: Any = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.name = name
        self.value = value
        self.bound = bound
        self.retry_after_s: float | None = None

    def problem(self) -> dict[str, Any]:
        """Render the problem document: type, title, status, detail and the machine fields."""
        document: dict[str, Any] = {
            "type": f"urn:replaybuf:problem:{self.slug}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if self.name is not None:
            document |= {"name": self.name, "value": self.value, "bound": self.bound}
        return document


class Invalid(ReplaybufError):
    """A value outside its bound."""

    status, slug, title = 422, "invalid", "Invalid value"


class GroupRejected(Invalid):
    """One group that may not enter the run; `reason` is the word it is counted by."""

    slug, title = "group-rejected", "Group rejected"

    def __init__(self, reason: str, detail: str, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.reason = reason


class InvalidGroups(Invalid):
    """Every group of an append was rejected; `results` says why for each."""

    slug, title = "invalid-groups", "All groups were rejected"

    def __init__(self, detail: str, results: list[Any], **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.results = results

    def problem(self) -> dict[str, Any]:
        return super().problem() | {"results": self.results}


class Malformed(ReplaybufError):
    """Bytes that do not decode to the declared shape."""

    status, slug, title = 400, "malformed", "Malformed request"


class BrokenFrame(Malformed):
    """A group frame whose magic, lengths, checksum or columns are wrong."""

    slug, title = "broken-frame", "Broken frame"


class Unauthorized(ReplaybufError):
    """No bearer token, or one that is not known."""

    status, slug, title = 401, "unauthorized", "Unauthorized"


class Forbidden(ReplaybufError):
    """A bearer token whose role may not make this call."""

    status, slug, title = 403, "forbidden", "Forbidden"


class NotFound(ReplaybufError):
    """No such run, ticket, group, record or page."""

    status, slug, title = 404, "not-found", "Not found"


class NotAcceptable(ReplaybufError):
    """A request that accepts no coding in which the answer comes."""

    status, slug, title = 406, "not-acceptable", "Not acceptable"


class Conflict(ReplaybufError):
    """A change that would break a guarantee."""

    status, slug, title = 409, "conflict", "Conflict"


class Fenced(Conflict):
    """The epoch of a trainer that a newer one replaced."""

    slug, title = "fenced", "Fenced by a newer owner"


class WrongStep(Conflict):
    """A step that is out of order."""

    slug, title = "wrong-step", "Wrong step"


class Gone(ReplaybufError):
    """Bytes that were freed after a checkpoint."""

    status, slug, title = 410, "gone", "Gone"


class RunFinished(Gone):
    """No further batch will come from this run."""

    slug, title = "finished", "Run finished"


class TooLarge(ReplaybufError):
    """A body or a group above its limit."""

    status, slug, title = 413, "too-large", "Too large"


class UnsupportedMedia(ReplaybufError):
    """A media type this call does not take."""

    status, slug, title = 415, "unsupported-media-type", "Unsupported media type"


class NoRoom(ReplaybufError):
    """Capacity or memory is used up; try again after `retry_after_s`."""

    status, slug, title = 429, "no-room", "No room"

    def __init__(self, detail: str, *, retry_after_s: float = 1.0, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.retry_after_s = retry_after_s


class ServiceUnavailable(ReplaybufError):
    """The service or its Redis cannot be reached; try again after `retry_after_s`."""

    status, slug, title = 503, "unavailable", "Service unavailable"

    def __init__(self, detail: str, *, retry_after_s: float = 1.0, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.retry_after_s = retry_after_s


class NotDurable(ServiceUnavailable):
    """A write that Redis took, but did not confirm on its disk or on enough replicas in time.

    It may become durable yet. Sent again it is recognised, and answered once it is confirmed.
    """

    slug, title = "not-durable", "Not confirmed as durable"


class NotLeader(ServiceUnavailable):
    """This server follows another one, which alone decides for the run; `value` is its address, where it is known."""

    slug, title = "not-leader", "Not the leader"


class LedgerGap(ServiceUnavailable):
    """A stream does not go on where it was folded to: the state is read anew from what there is."""

    slug, title = "ledger-gap", "Gap in a stream"


class UnsupportedServer(ServiceUnavailable):
    """A Redis that is too old or lacks what the storage needs; retrying does not help."""

    slug, title = "unsupported-server", "Unsupported Redis server"


class DataLost(ReplaybufError):
    """Redis does not hold what it acknowledged: it was emptied or replaced under a running service."""

    slug, title = "data-lost", "Redis lost data"


class Unreadable(DataLost):
    """What Redis holds of a run that cannot be read: it was spoiled, or another release wrote it."""

    slug, title = "unreadable", "Run cannot be read"


class StrategyFault(ReplaybufError):
    """A strategy that raised or returned something its contract forbids."""

    slug, title = "strategy-fault", "Strategy broke its contract"


class EngineFault(ReplaybufError):
    """An inference engine that gave no usable answer to one request; `reason` is what it is counted by."""

    status, slug, title = 502, "engine-fault", "Engine gave no usable answer"

    def __init__(self, reason: str, detail: str, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.reason = reason


class EngineAway(EngineFault):
    """An engine that is not reachable, answered too late or is broken; another try may help."""

    slug, title = "engine-away", "Engine is away"


class EngineUnfit(EngineFault):
    """An engine that serves something else or lacks what is needed; only an operator can help."""

    slug, title = "engine-unfit", "Engine does not fit"


class RewardFault(ReplaybufError):
    """A reward that raised, hung or was not a finite number; `reason` is what it is counted by."""

    slug, title = "reward-fault", "Reward failed"

    def __init__(self, reason: str, detail: str, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.reason = reason


class PromptFault(ReplaybufError):
    """A ticket whose prompt could not be made or cannot be used; `reason` is what it is counted by."""

    slug, title = "prompt-fault", "Prompt failed"

    def __init__(self, reason: str, detail: str, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.reason = reason


class MissingExtra(ReplaybufError):
    """An optional dependency that is not installed; the message holds the command that installs it."""

    slug, title = "missing-extra", "Missing optional dependency"

    def __init__(self, needed_for: str, extra: str) -> None:
        super().__init__(
            f"{needed_for} needs an optional dependency; install it with: pip install 'replaybuf[{extra}]'"
        )


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Unpack the error that task groups wrapped; of several the first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _tree(cls: type[ReplaybufError]) -> list[type[ReplaybufError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _tree(child))]


def from_problem(status: int, document: dict[str, Any], retry_after_s: float | None = None) -> ReplaybufError:
    """Rebuild the error that a problem document describes, as the nearest known class."""
    slug = str(document.get("type", "")).rpartition(":")[2]
    detail = str(document.get("detail") or document.get("title") or f"HTTP status {status}")
    known = _tree(ReplaybufError)
    local = (MissingExtra, GroupRejected, EngineFault, EngineAway, EngineUnfit, PromptFault, RewardFault)
    known = [cls for cls in known if cls not in local]  # these never travel
    by_slug = {cls.slug: cls for cls in reversed(known)}
    by_status = {cls.status: cls for cls in reversed(known)}
    cls = by_slug.get(slug) or by_status.get(status, ReplaybufError)
    fields = {key: document.get(key) for key in ("name", "value", "bound")}
    error: ReplaybufError
    if cls is InvalidGroups:
        error = InvalidGroups(detail, list(document.get("results") or []), **fields)
    else:
        error = cls(detail, **fields)
    if retry_after_s is not None:
        error.retry_after_s = retry_after_s
    return error

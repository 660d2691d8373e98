"""All errors of replaybuf, as one tree.

    ReplaybufError
    ├── Invalid             422  a value outside its bound (configuration, parameter, group)
    │   ├── GroupRejected   422  one rejected group; `reason` is the word it is counted by
    │   └── InvalidGroups   422  every group of an append was rejected
    ├── Malformed           400  bytes that do not decode to the declared shape
    │   └── BrokenFrame     400  a group frame with a wrong magic, length, checksum or column
    ├── Unauthorized        401  no token, or an unknown token
    ├── Forbidden           403  a token whose role may not make this call
    ├── NotFound            404  unknown run, ticket, group, step
    ├── NotAcceptable       406  no content coding that both sides support
    ├── Conflict            409  the change would break a guarantee
    │   ├── Fenced          409  an epoch that a newer one replaced
    │   └── WrongStep       409  a step out of order
    ├── Gone                410  bytes that a checkpoint freed
    │   └── RunFinished     410  no further batch will come
    ├── TooLarge            413  body or group above its limit
    ├── UnsupportedMedia    415  unknown media type
    ├── HeadTooLarge        431  request line and headers above their limits
    ├── NoRoom              429  capacity or memory is used up; retry later
    │   └── RateLimited     429  a token made more calls or sent more bytes than it may; retry later
    ├── ServiceUnavailable  503  service or Redis is unreachable; retry later
    │   ├── RequestTimeout  408  a request that arrives too slowly; send it again
    │   ├── NotDurable      503  written, but not confirmed in time; send it again
    │   ├── NotLeader       503  another server leads; ask that server, or retry after its lease
    │   ├── CheckOutdated   503  the rules of a run changed while groups were stored; send them again
    │   ├── LedgerGap       503  entries of a stream are missing; the service reads the run again
    │   ├── SpillAway       503  the spill folder of a run cannot be read or written; retry later
    │   └── UnsupportedServer    a Redis that is too old or lacks a needed feature
    ├── DataLost            500  Redis lacks acknowledged data; the service stops writing
    │   └── Unreadable      500  a run's data in Redis cannot be decoded; other runs are served
    ├── StrategyFault       500  a strategy broke its contract
    ├── GenerationFault          one ticket failed in the generator; `reason` is the word it is counted by
    │   ├── EngineFault          an inference engine gave no usable answer to one request
    │   │   ├── EngineAway       an unreachable, slow or broken engine; retry
    │   │   ├── EngineUnfit      an engine with the wrong model, or without a needed feature
    │   │   └── GroupAborted     a group ended before its last token, because no batch could use it
    │   ├── PromptFault          a ticket whose prompt could not be built or used
    │   └── RewardFault          a reward that raised, hung or was not a finite number
    ├── BatchOverdue             a reader waited for a batch longer than its deadline; `waiting` says why
    └── MissingExtra             an optional dependency that is not installed

Messages give name, value and bound. The problem document (RFC 9457) has the same three fields.
"""

from __future__ import annotations

from typing import Any, ClassVar

LONGEST_DETAIL = 4000
LONGEST_VALUE = 1000
"""Characters of a message, and of a value in it: a caller's string of megabytes must not fill answers and logs."""


class ReplaybufError(Exception):
    """Base of all errors: `name` had `value`, the bound was `bound`.

    `retry_after_s`: when a retry may succeed; None = a retry does not help.
    """

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(
        self,
        detail: str,
        *,
        name: str | None = None,
        value: Any = None,
        bound: Any = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.detail = _shortened(detail, LONGEST_DETAIL)
        super().__init__(self.detail)
        self.name = name
        self.value: Any = _shortened(value, LONGEST_VALUE) if isinstance(value, str) else value
        self.bound = bound
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s

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


def counted(number: int, noun: str, shown: str | None = None) -> str:
    """Write a number with a noun in singular or plural: "1 group", "2 groups"; `shown` replaces the digits."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number if shown is None else shown} {noun}{ending}"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


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
    """Every group of an append was rejected; `results` has the reason of each."""

    slug, title = "invalid-groups", "All groups were rejected"

    def __init__(self, detail: str, results: list[Any], **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.results = results

    def problem(self) -> dict[str, Any]:
        """Render the problem document, with the results."""
        return super().problem() | {"results": self.results}


class Malformed(ReplaybufError):
    """Bytes that do not decode to the declared shape."""

    status, slug, title = 400, "malformed", "Malformed request"


class BrokenFrame(Malformed):
    """A group frame whose magic, lengths, checksum or columns are wrong."""

    slug, title = "broken-frame", "Broken frame"


class Unauthorized(ReplaybufError):
    """No bearer token, or an unknown one."""

    status, slug, title = 401, "unauthorized", "Unauthorized"


class Forbidden(ReplaybufError):
    """A bearer token whose role may not make this call."""

    status, slug, title = 403, "forbidden", "Forbidden"


class NotFound(ReplaybufError):
    """No such run, ticket, group, record or page."""

    status, slug, title = 404, "not-found", "Not found"


class NotAcceptable(ReplaybufError):
    """A request that accepts no content coding of the answer."""

    status, slug, title = 406, "not-acceptable", "Not acceptable"


class Conflict(ReplaybufError):
    """A change that would break a guarantee."""

    status, slug, title = 409, "conflict", "Conflict"


class Fenced(Conflict):
    """The epoch of a trainer that a newer trainer replaced."""

    slug, title = "fenced", "Fenced by a newer owner"


class WrongStep(Conflict):
    """A step that is out of order."""

    slug, title = "wrong-step", "Wrong step"


class Gone(ReplaybufError):
    """Bytes that were freed after a checkpoint."""

    status, slug, title = 410, "gone", "Gone"


class RunFinished(Gone):
    """No further batch will come from this run, and it takes no groups."""

    slug, title = "finished", "Run finished"


class TooLarge(ReplaybufError):
    """A body or a group above its limit."""

    status, slug, title = 413, "too-large", "Too large"


class UnsupportedMedia(ReplaybufError):
    """A media type this call does not take."""

    status, slug, title = 415, "unsupported-media-type", "Unsupported media type"


class HeadTooLarge(ReplaybufError):
    """A request line and headers above their limits."""

    status, slug, title = 431, "head-too-large", "Request head too large"


class NoRoom(ReplaybufError):
    """Capacity or memory is used up; retry after `retry_after_s`."""

    status, slug, title = 429, "no-room", "No room"
    default_retry_after_s = 1.0


class RateLimited(NoRoom):
    """A token made more calls, or sent more bytes, than it may; retry after `retry_after_s`."""

    slug, title = "rate-limited", "Rate limit of the token"


class ServiceUnavailable(ReplaybufError):
    """The service or its Redis cannot be reached; retry after `retry_after_s`."""

    status, slug, title = 503, "unavailable", "Service unavailable"
    default_retry_after_s = 1.0


class RequestTimeout(ServiceUnavailable):
    """A request whose head or body arrived too slowly; the service did nothing."""

    status, slug, title = 408, "request-timeout", "Request timeout"


class NotDurable(ServiceUnavailable):
    """A write that Redis did not confirm in time on its disk or on enough replicas.

    It may still become durable. A repeat is recognised, and answered when it is confirmed.
    """

    slug, title = "not-durable", "Not confirmed as durable"


class NotLeader(ServiceUnavailable):
    """Another server leads the run; `value` is its address, if known."""

    slug, title = "not-leader", "Not the leader"


class CheckOutdated(ServiceUnavailable):
    """What groups are checked against has changed before they were stored, again and again; nothing is stored."""

    slug, title = "check-outdated", "The rules have changed"


class LedgerGap(ServiceUnavailable):
    """Entries of a stream are missing; the service reads the state again."""

    slug, title = "ledger-gap", "Gap in a stream"


class SpillAway(ServiceUnavailable):
    """The spill folder of a run cannot be read or written; nothing is lost, and it goes on when the folder is back."""

    slug, title = "spill-away", "Spill folder not available"


class UnsupportedServer(ServiceUnavailable):
    """A Redis that is too old or lacks a needed feature; a retry does not help."""

    slug, title = "unsupported-server", "Unsupported Redis server"


class DataLost(ReplaybufError):
    """Redis lacks acknowledged data: `entries` of the ledger and `groups`, where that is known."""

    slug, title = "data-lost", "Redis lost data"

    def __init__(self, detail: str, *, entries: int | None = None, groups: int | None = None, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.entries, self.groups = entries, groups

    def problem(self) -> dict[str, Any]:
        """Render the problem document, with what is missing."""
        return super().problem() | ({} if self.entries is None else {"entries": self.entries, "groups": self.groups})


class Unreadable(DataLost):
    """Data of a run in Redis that cannot be decoded: it is damaged, or another release wrote it."""

    slug, title = "unreadable", "Run cannot be read"


class StrategyFault(ReplaybufError):
    """A strategy that raised or returned something its contract forbids."""

    slug, title = "strategy-fault", "Strategy broke its contract"


class GenerationFault(ReplaybufError):
    """One ticket that failed in the generator; `reason` is the word it is counted by."""

    slug, title = "generation-fault", "Generation failed"

    def __init__(self, reason: str, detail: str, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.reason = reason


class EngineFault(GenerationFault):
    """An inference engine that gave no usable answer to one request."""

    status, slug, title = 502, "engine-fault", "Engine gave no usable answer"


class EngineAway(EngineFault):
    """An engine that is unreachable, slow or broken; a retry may help."""

    slug, title = "engine-away", "Engine is away"


class EngineUnfit(EngineFault):
    """An engine with the wrong model, or without a needed feature; only an operator can help."""

    slug, title = "engine-unfit", "Engine does not fit"


class GroupAborted(EngineFault):
    """A group that ended before its last token was sampled, because no batch could use it."""

    slug, title = "group-aborted", "Group was aborted"


class RewardFault(GenerationFault):
    """A reward that raised, hung or was not a finite number."""

    slug, title = "reward-fault", "Reward failed"


class PromptFault(GenerationFault):
    """A ticket whose prompt could not be built or used."""

    slug, title = "prompt-fault", "Prompt failed"


class BatchOverdue(ReplaybufError):
    """No batch came within the deadline of a reader; `waiting` is the service's last answer, None without any."""

    slug, title = "batch-overdue", "No batch within the deadline"

    def __init__(self, detail: str, waiting: Any, **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.waiting = waiting


class MissingExtra(ReplaybufError):
    """An optional dependency that is not installed; the message has the install command."""

    slug, title = "missing-extra", "Missing optional dependency"

    def __init__(self, needed_for: str, extra: str | None = None, *, adapter: str | None = None) -> None:
        """`extra` of replaybuf, or a package of the folder `adapters`."""
        command = f"pip install 'replaybuf[{extra}]'"
        if adapter is not None:
            command = f"pip install replaybuf-{adapter} (in a checkout: pip install ./adapters/{adapter})"
        super().__init__(f"{needed_for} needs an optional dependency; install it with: {command}")


def first_error(error: BaseException) -> BaseException:
    """Return the first error inside nested exception groups; any other error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

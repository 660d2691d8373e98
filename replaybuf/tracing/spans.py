"""Spans of calls, groups and batches. Until `enable` they cost one comparison each and import nothing.

Every group has a trace of its own, and so has every batch. Both ids follow from names (`run` and `group_id`; `run`,
generation and step), so every process knows the id of a trace that another process began, and nothing is stored::

    trace of a group   group generate (one per ticket) ─► engine request, score, append
                       group store ◄──────────────┐
    trace of a batch   batch assemble ──links to──┘ ◄─ batch deliver, batch ack, batch publish

Spans of calls (`POST groups`) connect client and service by the header `traceparent`. The spans above link to the call
in which they happened.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from replaybuf.errors import MissingExtra
from replaybuf.tracing import Headers, Value

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from replaybuf.tracing.recorder import Recorder

CALLS = frozenset(
    {
        "POST /tickets",
        "POST /groups",
        "POST /attach",
        "GET /batches/{step}",
        "POST /batches/{step}/ack",
        "POST /policy",
        "POST /checkpoints",
    }
)
"""Calls below the path of a run that have spans: those in the life of groups and batches."""
_RUN = "/v1/runs/{run}"
_STEP, _STEP_NAME = re.compile(r"(?<=^/batches/)\d+"), "{step}"

_NO_HEADERS: contextlib.nullcontext[Headers] = contextlib.nullcontext({})
_NOTHING: contextlib.nullcontext[None] = contextlib.nullcontext()
_recorder: Recorder | None = None


def enable(service: str, run: str = "") -> None:
    """Record spans from now on and export them by OTLP/HTTP, as the `OTEL_...` variables of the environment say.

    `service`: the default of `OTEL_SERVICE_NAME`. `run`: the run that this process works for, "" for several. Raises
    `MissingExtra` without OpenTelemetry.
    """
    global _recorder
    try:
        from replaybuf.tracing.recorder import Recorder
    except ImportError as error:
        raise MissingExtra("--traces", "otel") from error
    _recorder = Recorder(service, run)


def disable() -> None:
    """Export what is recorded, for at most a few seconds, and record nothing more."""
    global _recorder
    if _recorder is not None:
        _recorder.close()
    _recorder = None


def enabled() -> bool:
    """Return whether spans are recorded."""
    return _recorder is not None


# ---------------------------------------------------------------------- calls


def request(method: str, path: str, url: str) -> contextlib.AbstractContextManager[Headers]:
    """Record a request to a service, if it is one of `CALLS`; gives the headers to send with it."""
    if _recorder is None or (name := f"{method} {_STEP.sub(_STEP_NAME, path)}") not in CALLS:
        return _NO_HEADERS
    return _recorder.request(name, url + path)


def answer(method: str, path: str, headers: Headers, run: str) -> contextlib.AbstractContextManager[object]:
    """Record the answer to a request with these headers, if it is one of `CALLS`; `path` is that of the route."""
    if _recorder is None or (name := f"{method} {path.removeprefix(_RUN)}") not in CALLS:
        return _NOTHING
    return _recorder.answer(name, headers, run)


def subrequest(method: str, path: str, url: str) -> contextlib.AbstractContextManager[Headers]:
    """Record a request as part of the current span; nothing outside of spans. Gives the headers to send with it."""
    return _NO_HEADERS if _recorder is None else _recorder.subrequest(f"{method} {path}", url + path)


def operation(name: str, spans: Iterable[Span | None] = ()) -> contextlib.AbstractContextManager[object]:
    """Record work for several groups in a trace of its own, with links to their spans."""
    return _NOTHING if _recorder is None else _recorder.operation(name, spans)


def part(name: str) -> contextlib.AbstractContextManager[object]:
    """Record a part of the current span; nothing outside of spans."""
    return _NOTHING if _recorder is None else _recorder.part(name)


# ---------------------------------------------------------------------- groups


def begin_group(group_id: str, **attributes: Value) -> Span | None:
    """Begin the span of a group that is generated; None while no spans are recorded."""
    return None if _recorder is None else _recorder.begin_group(group_id, attributes)


def within(span: Span | None) -> contextlib.AbstractContextManager[object]:
    """Make a span of `begin_group` the current one."""
    return _NOTHING if _recorder is None or span is None else _recorder.within(span)


def end_group(span: Span | None, outcome: str) -> None:
    """End a span of `begin_group`; `outcome` is `stored` or the reason why it is not. A second call is ignored."""
    if span is not None and span.is_recording():
        span.set_attribute("replaybuf.outcome", outcome)
        span.end()


def store_groups(run: str, group_ids: Iterable[str], began_ns: int) -> None:
    """Record that groups were stored; `began_ns` is the Unix time at which their check began."""
    if _recorder is not None:
        _recorder.store_groups(run, group_ids, began_ns)


# ---------------------------------------------------------------------- batches


def assemble(run: str, generation: int, step: int, group_ids: Sequence[str], began_ns: int) -> None:
    """Record that a batch was assembled, with links to its groups."""
    if _recorder is not None:
        _recorder.assemble(run, generation, step, group_ids, began_ns)


def batch(
    name: str, run: str, generation: int | None, step: int, **attributes: Value
) -> contextlib.AbstractContextManager[object]:
    """Record what happens to a batch: `deliver`, `ack`, `publish`. Without a generation there is no such batch."""
    if _recorder is None or generation is None:
        return _NOTHING
    return _recorder.batch(name, run, generation, step, attributes)

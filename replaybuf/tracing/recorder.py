"""Records spans with OpenTelemetry and exports them by OTLP/HTTP. Only `spans.enable` imports this module."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler, SamplingResult
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from replaybuf.tracing import Headers, Value

MOST_LINKS = 128
"""Links per span, the default bound of OpenTelemetry; a batch with more groups has child spans with the others."""
CLOSE_S = 3.0
LONGEST_ATTRIBUTE_CHARS = 1024
_LENGTH_LIMIT = "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"
_BATCH = "batch "
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_PROPAGATOR = TraceContextTextMapPropagator()
_NOWHERE = Context()


class Recorder:
    """Spans of one process. Standard variables decide where they go and which groups are sampled."""

    def __init__(self, service: str, run: str) -> None:
        self._run = run
        self._ids = _NamedIds()
        version = importlib.metadata.version("replaybuf")
        named = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or service, "service.version": version}
        resource = Resource.create(named | ({"replaybuf.run": run} if run else {}))
        limits = SpanLimits(max_attribute_length=int(os.environ.get(_LENGTH_LIMIT) or LONGEST_ATTRIBUTE_CHARS))
        self._provider = TracerProvider(
            resource=resource, id_generator=self._ids, span_limits=limits, shutdown_on_exit=False
        )
        self._provider.sampler = _EveryBatch(self._provider.sampler)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("replaybuf", version)

    def close(self) -> None:
        """Export what is left, for at most `CLOSE_S`: a collector that hangs must not keep the process."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    # ------------------------------------------------------------------ calls

    @contextlib.contextmanager
    def request(self, name: str, url: str) -> Iterator[Headers]:
        """See `spans.request`."""
        headers: dict[str, str] = {}
        with self._span(name, SpanKind.CLIENT, {"url.full": url}):
            _PROPAGATOR.inject(headers)
            yield headers

    def subrequest(self, name: str, url: str) -> contextlib.AbstractContextManager[Headers]:
        """See `spans.subrequest`."""
        return self.request(name, url) if _current() else contextlib.nullcontext({})

    @contextlib.contextmanager
    def answer(self, name: str, headers: Headers, run: str) -> Iterator[None]:
        """See `spans.answer`."""
        parent = _PROPAGATOR.extract(headers, _NOWHERE)
        with self._span(name, SpanKind.SERVER, {"replaybuf.run": run}, parent=parent):
            yield

    def part(self, name: str) -> contextlib.AbstractContextManager[object]:
        """See `spans.part`."""
        return self._span(name, SpanKind.INTERNAL, {}) if _current() else contextlib.nullcontext()

    def operation(self, name: str, spans: Iterable[Span | None]) -> contextlib.AbstractContextManager[object]:
        """See `spans.operation`."""
        links = [Link(span.get_span_context()) for span in spans if span is not None][:MOST_LINKS]
        return self._span(name, SpanKind.INTERNAL, {"replaybuf.run": self._run}, parent=_NOWHERE, links=links)

    @contextlib.contextmanager
    def _span(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, Value],
        *,
        parent: Context | None = None,
        links: Sequence[Link] = (),
    ) -> Iterator[Span]:
        """Record a span around the body. An error is named, without its text: that has no bound."""
        opened = self._tracer.start_span(name, parent, kind, attributes, links)
        with trace.use_span(opened, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield opened
            except BaseException as error:
                opened.set_status(Status(StatusCode.ERROR, type(error).__name__))
                raise

    # ------------------------------------------------------------------ groups

    def begin_group(self, group_id: str, attributes: Mapping[str, Value]) -> Span:
        """See `spans.begin_group`."""
        named = {"replaybuf.run": self._run, "replaybuf.group_id": group_id, **_prefixed(attributes)}
        with self._ids.use(_trace_id(self._run, group_id)):
            return self._tracer.start_span("group generate", _NOWHERE, attributes=named, links=_current())

    def within(self, span: Span) -> contextlib.AbstractContextManager[Span]:
        """See `spans.within`."""
        return trace.use_span(span, record_exception=False, set_status_on_exception=False)

    def store_groups(self, run: str, group_ids: Iterable[str], began_ns: int) -> None:
        """See `spans.store_groups`."""
        links = _current()
        for group_id in group_ids:
            named = {"replaybuf.run": run, "replaybuf.group_id": group_id}
            with self._ids.use(*_group_ids(run, group_id)):
                self._tracer.start_span(
                    "group store", _NOWHERE, attributes=named, links=links, start_time=began_ns
                ).end()

    # ------------------------------------------------------------------ batches

    def assemble(self, run: str, generation: int, step: int, group_ids: Sequence[str], began_ns: int) -> None:
        """See `spans.assemble`."""
        named = {**_batch_attributes(run, generation, step), "replaybuf.groups": len(group_ids)}
        contexts = (SpanContext(*_group_ids(run, name), is_remote=True, trace_flags=_SAMPLED) for name in group_ids)
        links = map(Link, contexts)
        ended_ns = time.time_ns()
        with self._ids.use(*_batch_ids(run, generation, step)):
            first = self._tracer.start_span(
                _BATCH + "assemble",
                _NOWHERE,
                attributes=named,
                links=list(itertools.islice(links, MOST_LINKS)),
                start_time=began_ns,
            )
        parent = trace.set_span_in_context(first, _NOWHERE)
        while more := list(itertools.islice(links, MOST_LINKS)):
            span = self._tracer.start_span(_BATCH + "groups", parent, links=more, start_time=began_ns)
            span.end(ended_ns)
        first.end(ended_ns)

    @contextlib.contextmanager
    def batch(self, name: str, run: str, generation: int, step: int, attributes: Mapping[str, Value]) -> Iterator[None]:
        """See `spans.batch`."""
        named = {**_batch_attributes(run, generation, step), **_prefixed(attributes)}
        assembled = SpanContext(*_batch_ids(run, generation, step), is_remote=True, trace_flags=_SAMPLED)
        parent = trace.set_span_in_context(trace.NonRecordingSpan(assembled), _NOWHERE)
        with self._span(_BATCH + name, SpanKind.INTERNAL, named, parent=parent, links=_current()):
            yield


class _NamedIds(RandomIdGenerator):
    """Random ids, but for spans whose ids follow from names."""

    def __init__(self) -> None:
        self._next = threading.local()

    @contextlib.contextmanager
    def use(self, trace_id: int, span_id: int = 0) -> Iterator[None]:
        """Give the next span of this thread these ids; 0 = a random one."""
        self._next.ids = trace_id, span_id
        try:
            yield
        finally:
            self._next.ids = 0, 0

    def generate_trace_id(self) -> int:
        """Return the id of a new trace."""
        return self._given()[0] or super().generate_trace_id()

    def generate_span_id(self) -> int:
        """Return the id of a new span."""
        return self._given()[1] or super().generate_span_id()

    def is_trace_id_random(self) -> bool:
        """Return whether the id of the trace is random."""
        return not self._given()[0]

    def _given(self) -> tuple[int, int]:
        ids: tuple[int, int] = getattr(self._next, "ids", (0, 0))
        return ids


class _EveryBatch(Sampler):
    """Samples every batch, and all else as the environment says.

    Samplers by ratio decide by the id of the trace, so every process samples the same groups. A sampled group would
    often be in a batch that is not.
    """

    def __init__(self, chosen: Sampler) -> None:
        self._chosen = chosen

    def should_sample(self, parent_context: Context | None, trace_id: int, name: str, *rest: Any) -> SamplingResult:
        """Return whether to sample a span."""
        sampler = ALWAYS_ON if name.startswith(_BATCH) else self._chosen
        return sampler.should_sample(parent_context, trace_id, name, *rest)

    def get_description(self) -> str:
        """Describe the sampler."""
        return f"EveryBatch{{{self._chosen.get_description()}}}"


def _current() -> list[Link]:
    """Return a link to the current span, if there is one."""
    context = trace.get_current_span().get_span_context()
    return [Link(context)] if context.is_valid else []


def _prefixed(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"replaybuf.{name}": value for name, value in attributes.items()}


def _batch_attributes(run: str, generation: int, step: int) -> dict[str, Value]:
    return {"replaybuf.run": run, "replaybuf.generation": generation, "replaybuf.step": step}


def _group_ids(run: str, group_id: str) -> tuple[int, int]:
    """Return the ids of the trace of a group and of its span `group store`."""
    return _trace_id(run, group_id), _span_id(run, group_id)


def _batch_ids(run: str, generation: int, step: int) -> tuple[int, int]:
    """Return the ids of the trace of a batch and of its span `batch assemble`."""
    name = str(generation), str(step)
    return _trace_id(run, *name), _span_id(run, *name)


def _trace_id(*names: str) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(names).encode(), digest_size=16, person=b"trace").digest()) or 1


def _span_id(*names: str) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(names).encode(), digest_size=8, person=b"span").digest()) or 1

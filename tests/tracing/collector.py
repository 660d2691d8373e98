"""An OTLP/HTTP collector: decodes the spans that processes export, as any backend does."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import http.server
import threading
from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclasses.dataclass(frozen=True)
class Received:
    """One span; `links` are pairs of trace and span, `process` is the name of its service."""

    process: str
    resource: dict[str, Any]
    name: str
    trace: bytes
    span: bytes
    parent: bytes
    links: tuple[tuple[bytes, bytes], ...]
    attributes: dict[str, Any]
    error: str


class Collector:
    """Spans that came so far, and the address to send them to."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Received] = []

    @property
    def environment(self) -> dict[str, str]:
        """Standard variables that send the spans of a process here, and ask it for them."""
        return {"REPLAYBUF_TRACES": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def add(self, content: bytes) -> None:
        """Decode one export."""
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            named = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_received(span, named) for span in scope.spans]

    def named(self, name: str, **attributes: Any) -> list[Received]:
        """Return the spans with this name and these attributes, without their prefix."""
        wanted = {f"replaybuf.{key}": value for key, value in attributes.items()}
        return [span for span in self.spans if span.name == name and wanted.items() <= span.attributes.items()]

    def only(self, name: str, **attributes: Any) -> Received:
        """Return the only such span."""
        (span,) = self.named(name, **attributes)
        return span

    def at(self, trace: bytes, span: bytes) -> Received:
        """Return the span with these ids."""
        (match,) = [candidate for candidate in self.spans if (candidate.trace, candidate.span) == (trace, span)]
        return match


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        process=resource["service.name"],
        resource=resource,
        name=span.name,
        trace=span.trace_id,
        span=span.span_id,
        parent=span.parent_span_id,
        links=tuple((link.trace_id, link.span_id) for link in span.links),
        attributes=_attributes(span.attributes),
        error=span.status.message,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on loopback."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            collector.add(gzip.decompress(content) if self.headers.get("content-encoding") == "gzip" else content)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()

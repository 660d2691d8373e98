"""A server that metrics are pushed to: it keeps each request, and decodes it as a Pushgateway or a collector does."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.parser import text_string_to_metric_families


class Pushed(NamedTuple):
    """One request."""

    method: str
    path: str
    authorization: str | None
    body: bytes

    def samples(self) -> dict[str, float]:
        """Return the samples of a text by name and labels."""
        families = text_string_to_metric_families(self.body.decode())
        return {_named(sample.name, sample.labels): sample.value for family in families for sample in family.samples}

    def request(self) -> Any:
        """Decode an export."""
        return ExportMetricsServiceRequest.FromString(self.body)


class Receiver:
    """Requests that came so far; `status` is the answer to the next ones. `gate`: each waits until it is set."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self.status = 200
        self.came: list[Pushed] = []
        self.gate = threading.Event()
        self.gate.set()

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def up(self) -> Iterator[Receiver]:
        """Listen, on the same port each time."""
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def _take(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
                receiver.came.append(Pushed(self.command, self.path, self.headers.get("authorization"), body))
                receiver.gate.wait(60.0)
                with contextlib.suppress(OSError):  # who pushed has left
                    self.send_response(receiver.status)
                    self.send_header("content-length", "0")
                    self.end_headers()

            do_PUT = do_POST = _take  # noqa: N815 - the names of the library

            def log_message(self, *_: Any) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler) as server:
            self.port = server.server_address[1]
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            try:
                yield self
            finally:
                self.gate.set()
                server.shutdown()
                thread.join()


def points(pushed: list[Pushed]) -> dict[str, Any]:
    """Return the points of exports by name and labels, the newest of each."""
    return {
        _named(metric.name, {pair.key: pair.value.string_value for pair in point.attributes}): point
        for push in pushed
        for resource in push.request().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in getattr(metric, metric.WhichOneof("data")).data_points
    }


def _named(name: str, labels: dict[str, str]) -> str:
    return name + "".join(f",{label}={labels[label]}" for label in sorted(labels))

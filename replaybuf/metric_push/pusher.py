"""Pushes the metrics of a process at an interval, in a thread of its own; a failure is logged and never fatal."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit

from prometheus_client.exposition import basic_auth_handler, default_handler

from replaybuf.errors import Invalid, MissingExtra

logger = logging.getLogger(__name__)

CLOSE_S = 3.0
"""Time limit of the last push: a server that hangs must not keep the process."""
FORMS = "http[s]://[USER:PASSWORD@]HOST:PORT of a Pushgateway, or otlp+http[s]://HOST:4318 of a collector"
_OTLP = "otlp+"
TIMEOUT_S = 10.0
_TYPE = ("Content-Type", "text/plain; version=0.0.4; charset=utf-8")


class Identity(NamedTuple):
    """What the metrics are of: the kind of process, and its name among these, which a restart keeps."""

    job: str
    instance: str


class Pusher:
    """Pushes what `read` returns, Prometheus text, every `every_s` seconds and at `close`.

    `read` is called in the thread of the pusher. Raises `Invalid` for a URL that is neither of `FORMS`, `MissingExtra`
    for OTLP without OpenTelemetry.
    """

    def __init__(self, url: str, identity: Identity, read: Callable[[], bytes], every_s: float) -> None:
        parts = _split(url)
        self._shown = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
        self._read = read
        self._send = _open(parts, identity)
        self._every_s = every_s
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replaybuf-push", daemon=True)
        self._thread.start()
        logger.info("pushing metrics to %s every %g s", self._shown, every_s)

    def close(self) -> None:
        """Push once more, for at most `CLOSE_S`."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            self._push()
        self._push()

    def _push(self) -> None:
        try:
            self._send(self._read())
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: a push must not end the process
            level = logging.DEBUG if self._failing else logging.WARNING
            logger.log(level, "cannot push metrics to %s, trying every %g s: %s", self._shown, self._every_s, error)
            self._failing = True
            return
        if self._failing:
            logger.info("metrics are pushed to %s again", self._shown)
        self._failing = False


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme.removeprefix(_OTLP) in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is not a number, half an IPv6 address
        usable = False
    if not usable or parts.query or parts.fragment:
        # The URL is not repeated: it may hold a password.
        raise Invalid(f"push_metrics is not a URL to push to; use {FORMS}", name="push_metrics", bound=FORMS)
    return parts


def _open(parts: SplitResult, identity: Identity) -> Callable[[bytes], None]:
    if not parts.scheme.startswith(_OTLP):
        return Gateway(parts, *identity).send
    try:
        from replaybuf.metric_push.otlp import Collector
    except ImportError as error:
        raise MissingExtra("--push-metrics otlp+http://...", "otel") from error
    return Collector(parts._replace(scheme=parts.scheme.removeprefix(_OTLP)), *identity).send


class Gateway:
    """A Pushgateway at `address`, which may have user and password; its path is a prefix.

    Each push replaces the group of this job and instance.
    """

    def __init__(self, address: SplitResult, job: str, instance: str) -> None:
        user, _, host = address.netloc.rpartition("@")
        path = f"{address.path.rstrip('/')}/metrics/job/{quote(job, safe='')}/instance/{quote(instance, safe='')}"
        self._url = f"{address.scheme}://{host}{path}"
        self._handler = default_handler
        if user:
            name, password = unquote(address.username or ""), unquote(address.password or "")
            self._handler = functools.partial(basic_auth_handler, username=name, password=password)

    def send(self, text: bytes) -> None:
        """Replace what the Pushgateway has. Raises `OSError`."""
        # Not `push_to_gateway`: it renders the metrics of a registry, and this text is there already.
        self._handler(self._url, "PUT", TIMEOUT_S, [_TYPE], text)()

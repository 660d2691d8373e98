"""Target of pushes: a Prometheus Pushgateway. Each push replaces the group of this job and instance."""

from __future__ import annotations

import functools
from urllib.parse import SplitResult, quote, unquote

from prometheus_client.exposition import basic_auth_handler, default_handler

TIMEOUT_S = 10.0
_TYPE = ("Content-Type", "text/plain; version=0.0.4; charset=utf-8")


class Gateway:
    """A Pushgateway at `address`, which may have user and password; its path is a prefix."""

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

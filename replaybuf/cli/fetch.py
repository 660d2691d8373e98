"""One GET without a retry, so that a command reports at once that a service does not answer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeVar

from replaybuf.client.addresses import authorization
from replaybuf.client.http_reply import NoReply
from replaybuf.client.replies import answer_of, error_of
from replaybuf.client.transport import Sending, transport_to
from replaybuf.errors import ServiceUnavailable

T = TypeVar("T")

TIMEOUT_S = 10.0
READINESS = "/readyz"


def fetch(address: str, path: str, token: str | None, shape: type[T]) -> T:
    """Return the answer of a call. Raises the service's error, `ServiceUnavailable` without an answer."""
    request = Sending(
        method="GET", path=path, headers={"accept": "*/*"}, content=b"", connect_s=TIMEOUT_S, read_s=TIMEOUT_S
    )
    try:
        with contextlib.closing(transport_to(address, authorization(token))) as transport:
            reply = transport.send(request)
    except NoReply as error:
        raise ServiceUnavailable(f"no answer from {address}: {error}", name="url", value=address) from error
    if not reply.is_success and path != READINESS:  # 503 there is an answer
        raise error_of(reply)
    return answer_of(reply, shape)


def fetch_first(addresses: Sequence[str], path: str, token: str | None, shape: type[T]) -> tuple[str, T]:
    """Return the first address that serves, with its answer. Raises the error of the last one if none serves."""
    *others, last = addresses
    for address in others:
        with contextlib.suppress(ServiceUnavailable):
            return address, fetch(address, path, token, shape)
    return last, fetch(last, path, token, shape)

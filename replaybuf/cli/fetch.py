"""One GET without a retry, so that a command reports at once that a service does not answer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeVar

import httpx

from replaybuf.client.addresses import authorization, base_url, unix_mounts
from replaybuf.client.replies import answer_of, error_of
from replaybuf.client.transport import needs_certificates
from replaybuf.errors import ServiceUnavailable

T = TypeVar("T")

TIMEOUT_S = 10.0
READINESS = "/readyz"


def fetch(address: str, path: str, token: str | None, shape: type[T]) -> T:
    """Return the answer of a call. Raises the service's error, `ServiceUnavailable` without an answer."""
    try:
        mounts = unix_mounts([address], lambda path: httpx.HTTPTransport(uds=path, verify=False))
        verify = needs_certificates([address])  # reading them takes 20 ms, and `top` asks every 2 s
        with httpx.Client(headers=authorization(token), timeout=TIMEOUT_S, mounts=mounts, verify=verify) as http:
            response = http.get(base_url(address) + path)
    except httpx.HTTPError as error:
        raise ServiceUnavailable(
            f"no answer from {address}: {error or type(error).__name__}", name="url", value=address
        ) from error
    if response.is_error and path != READINESS:  # 503 there is an answer
        raise error_of(response)
    return answer_of(response, shape)


def fetch_first(addresses: Sequence[str], path: str, token: str | None, shape: type[T]) -> tuple[str, T]:
    """Return the first address that serves, with its answer. Raises the error of the last one if none serves."""
    *others, last = addresses
    for address in others:
        with contextlib.suppress(ServiceUnavailable):
            return address, fetch(address, path, token, shape)
    return last, fetch(last, path, token, shape)

"""Where weights are downloaded from: an HTTP server, or an object store by fsspec. Every call blocks, in any thread.

httpx is not used for HTTP: with four threads it reads 0.1 GB/s where `http.client` reads 0.4 GB/s, because it copies
every body in pieces of 64 KiB under Python's lock.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from replaybuf.errors import Gone, Invalid, MissingExtra, ServiceUnavailable, Unauthorized
from replaybuf_trainer.weight_download.manifest import LARGEST_MANIFEST_BYTES, MANIFEST

TIMEOUT_S = 20.0
"""Longest pause between two bytes."""
PIECE_TIMEOUT_S = 120.0
"""Longest time for one read, so that a server which sends a byte now and then holds no thread."""

ACCEPT = "--tls-ca names the file with the certificate of its authority; without it those of the system are trusted"


class Source(Protocol):
    """The files below one address."""

    def manifest(self) -> bytes:
        """Read the manifest. Raises as `read`, and `Invalid` for one that is too large."""

    def read(self, name: str, start: int, end: int) -> bytes | bytearray:
        """Read exactly the bytes from `start` up to `end` of a file.

        Raises `ServiceUnavailable` where a retry may succeed, `Gone` for a missing file, and `Unauthorized`.
        """

    def close(self) -> None:
        """Close all connections."""


def open_source(uri: str, token: str | None, tls: ssl.SSLContext) -> Source:
    """Open the folder at a weights_uri; `token` is for HTTP, and `tls` verifies servers of https.

    Raises `Invalid`, and `MissingExtra` without fsspec.
    """
    scheme = urlsplit(uri).scheme
    if not scheme:
        raise Invalid(
            f"weights_uri is {uri!r}; it must be an address", name="weights_uri", value=uri, bound="http://, s3://, ..."
        )
    return HttpSource(uri, token, tls) if scheme in ("http", "https") else StoreSource(uri)


class HttpSource:
    """A server that answers ranges of bytes. Each thread has a connection of its own."""

    def __init__(self, uri: str, token: str | None, tls: ssl.SSLContext) -> None:
        self._uri = uri if uri.endswith("/") else f"{uri}/"
        parts = urlsplit(self._uri)
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise Invalid(f"weights_uri is {uri!r}: {error}", name="weights_uri", value=uri) from error
        self._path = parts.path
        self._tls = tls if parts.scheme == "https" else None
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._own = threading.local()
        self._open: list[HTTPConnection] = []

    def manifest(self) -> bytes:
        """Read the manifest."""
        with self._response(MANIFEST, {}) as response:
            if response.status != 200 or response.length is None:
                raise self._away(MANIFEST, f"answered {response.status} without a length")
            if response.length > LARGEST_MANIFEST_BYTES:
                detail = f"the manifest of {self._uri} has {response.length} bytes; at most {LARGEST_MANIFEST_BYTES}"
                raise Invalid(detail, name="manifest", value=response.length, bound=LARGEST_MANIFEST_BYTES)
            return bytes(_read(response, response.length))

    def read(self, name: str, start: int, end: int) -> bytearray:
        """Read a part of a file. A server that ignores the range is refused before its body is read."""
        with self._response(name, {"range": f"bytes={start}-{end - 1}"}) as response:
            sent = response.getheader("content-range", "").partition("/")[0]
            if response.status != 206 or response.length != end - start or sent != f"bytes {start}-{end - 1}":
                raise self._away(name, f"answered {response.status} with {sent!r} for bytes {start}-{end - 1}")
            return _read(response, end - start)

    def close(self) -> None:
        """Close all connections."""
        while self._open:
            self._open.pop().close()

    @contextlib.contextmanager
    def _response(self, name: str, headers: dict[str, str]) -> Any:
        """Yield the answer to a GET. Raises `ServiceUnavailable` also for what the block reads."""
        connection = self._connection()
        whole = False
        try:
            connection.request("GET", self._path + quote(name), headers=self._headers | headers)
            response = connection.getresponse()
            if response.status in (401, 403):
                detail = f"{self._uri} answered {response.status}; --publish-token must be that of the trainer"
                raise Unauthorized(detail, name="publish_token")
            if response.status in (404, 410):
                raise Gone(f"{self._uri}{name} is gone", name="weights_uri", value=self._uri)
            yield response
            whole = response.isclosed() and not response.will_close
        except ssl.SSLCertVerificationError as error:
            detail = f"the certificate of {self._uri} is not accepted: {error.verify_message}; {ACCEPT}"
            raise Invalid(detail, name="tls_ca", value=self._uri) from error
        except (OSError, HTTPException) as error:
            raise self._away(name, str(error) or type(error).__name__) from error
        finally:
            if not whole:  # what is left of the answer would be read as the next one
                connection.close()

    def _connection(self) -> HTTPConnection:
        """Return the connection of this thread; it opens itself again after `close`."""
        existing: HTTPConnection | None = getattr(self._own, "connection", None)
        if existing is None:
            existing = (
                HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=self._tls)
                if self._tls
                else HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
            )
            self._own.connection = existing
            self._open.append(existing)
        return existing

    def _away(self, name: str, why: str) -> ServiceUnavailable:
        return ServiceUnavailable(f"{self._uri}{name}: {why}", name="weights_uri", value=self._uri)


class StoreSource:
    """A folder of an object store, or of a file system, by fsspec."""

    def __init__(self, uri: str) -> None:
        try:
            import fsspec  # an extra, and it takes 50 ms

            self._store: Any = fsspec.filesystem(urlsplit(uri).scheme, use_listings_cache=False)
        except ImportError as error:
            raise MissingExtra("weights from an object store", "spill") from error
        except ValueError as error:
            raise Invalid(f"weights_uri is {uri!r}: {error}", name="weights_uri", value=uri) from error
        self._uri = uri.rstrip("/")
        self._root = self._store._strip_protocol(self._uri).rstrip("/")

    def manifest(self) -> bytes:
        """Read the manifest."""
        # One byte more than the bound, so that the check of the bound sees it.
        return bytes(self._cat(MANIFEST, 0, LARGEST_MANIFEST_BYTES + 1))

    def read(self, name: str, start: int, end: int) -> bytes:
        """Read a part of a file."""
        content = self._cat(name, start, end)
        if len(content) != end - start:
            detail = f"{self._uri}/{name} has {len(content)} of the bytes {start} to {end}"
            raise ServiceUnavailable(detail, name="weights_uri", value=self._uri)
        return content

    def close(self) -> None:
        """Do nothing: fsspec keeps its connections."""

    def _cat(self, name: str, start: int, end: int) -> bytes:
        try:
            content: bytes = self._store.cat_file(f"{self._root}/{name}", start=start, end=end)
        except FileNotFoundError as error:
            raise Gone(f"{self._uri}/{name} is gone", name="weights_uri", value=self._uri) from error
        except Exception as error:  # a store's library has errors of its own
            detail = f"{self._uri}/{name}: {error or type(error).__name__}"
            raise ServiceUnavailable(detail, name="weights_uri", value=self._uri) from error
        return content


def _read(response: HTTPResponse, size: int) -> bytearray:
    """Read a body of a known size. Raises `OSError`."""
    content = bytearray(size)
    view, filled = memoryview(content), 0
    deadline_s = time.monotonic() + PIECE_TIMEOUT_S
    while filled < size:
        count = response.readinto(view[filled:])
        if not count:
            raise ConnectionError(f"the connection ended after {filled} of {size} bytes")
        filled += count
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{filled} of {size} bytes came in {PIECE_TIMEOUT_S:g} s")
    return content

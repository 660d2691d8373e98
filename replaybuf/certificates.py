"""Certificates of TLS: that of a server, which can be renewed without a restart, and those that a client trusts."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from replaybuf.errors import Invalid

logger = logging.getLogger(__name__)


class Certificate:
    """Certificate chain and key of a server; `context` is what connections use, also after `reload`.

    Methods are called in the thread that accepts connections.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        """Read the files. Raises `Invalid`."""
        self._chain, self._key = chain, key
        self._tried = self._changed()
        self.context = _server_context(chain, key)

    def reload(self) -> None:
        """Read the files again for new connections; if they are broken, log that and keep the certificate."""
        self._tried = self._changed()
        try:
            # OpenSSL keeps the half that it has read, so both files are tried elsewhere first: a new chain beside the
            # old key would leave a context without a key.
            _server_context(self._chain, self._key)
            self.context.load_cert_chain(self._chain, self._key)
        except (Invalid, OSError) as error:
            logger.error("the certificate is not reloaded; the one before stays: %s", error)
        else:
            logger.info("certificate reloaded path=%s", self._chain)

    def renew(self) -> None:
        """Reload the files if they have changed."""
        if self._changed() != self._tried:
            self.reload()

    def _changed(self) -> tuple[int, ...]:
        """Return when each file was changed, in ns; 0 = it is not there."""
        times_ns = []
        for path in (self._chain, self._key):
            try:
                times_ns.append(path.stat().st_mtime_ns)
            except OSError:
                times_ns.append(0)
        return tuple(times_ns)


def open_certificate(chain: Path | str | None, key: Path | str | None) -> Certificate | None:
    """Return the certificate of a server; None without files. Raises `Invalid`."""
    if chain is not None and key is not None:
        return Certificate(Path(chain), Path(key))
    if chain is None and key is None:
        return None
    missing = "tls_cert" if chain is None else "tls_key"
    raise Invalid(f"{missing} is not set; TLS needs tls_cert and tls_key", name=missing, value=None)


def client_context(authorities: Path | str | None) -> ssl.SSLContext:
    """Return what verifies servers: by the authorities in a PEM file, else by those of the system. Raises `Invalid`."""
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:
        detail = f"tls_ca is {authorities}: {error}; it must be a PEM file with certificates of authorities"
        raise Invalid(detail, name="tls_ca", value=str(authorities)) from error


def _server_context(chain: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(chain, key)
    except OSError as error:  # an ssl.SSLError too
        raise Invalid(
            f"certificate {chain} with key {key} cannot be used: {error}; both must be PEM files, and the key without "
            "a password",
            name="tls_cert",
            value=str(chain),
        ) from error
    return context

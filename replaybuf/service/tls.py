"""The certificate of a server, which can be renewed without a restart."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from replaybuf.errors import Invalid
from replaybuf.service.options import ServeOptions

logger = logging.getLogger(__name__)


class Certificate:
    """Certificate chain and key of a server; `context` is what connections use, also after `reload`."""

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain, self._key = chain, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load()

    def reload(self) -> None:
        """Read the files again for new connections; if they are broken, log that and keep the certificate."""
        try:
            self._load()
        except Invalid as error:
            logger.error("the certificate is not reloaded; the one before stays: %s", error.detail)
        else:
            logger.info("certificate reloaded path=%s", self._chain)

    def _load(self) -> None:
        try:
            self.context.load_cert_chain(self._chain, self._key)
        except (OSError, ssl.SSLError) as error:
            raise Invalid(
                f"certificate {self._chain} with key {self._key} cannot be used: {error}; both must be PEM files, and "
                "the key without a password",
                name="tls_cert",
                value=str(self._chain),
            ) from error


def open_certificate(options: ServeOptions) -> Certificate | None:
    """Return the certificate that the options name, or None. Raises `Invalid`."""
    chain, key = options.tls_cert, options.tls_key
    if chain is None and key is None:
        return None
    if chain is None or key is None:
        missing = "tls_key" if key is None else "tls_cert"
        raise Invalid(f"{missing} is not set; TLS needs --tls-cert and --tls-key", name=missing, value=None)
    if options.uds:
        raise Invalid(
            f"uds is {options.uds}; with TLS a server listens on TCP only. Start another server for the socket",
            name="uds",
            value=str(options.uds),
            bound=None,
        )
    return Certificate(chain, key)

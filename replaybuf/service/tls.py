"""The certificate that the options of `replaybuf serve` name."""

from __future__ import annotations

from replaybuf.certificates import Certificate, open_certificate
from replaybuf.errors import Invalid
from replaybuf.service.options import ServeOptions


def certificate_of(options: ServeOptions) -> Certificate | None:
    """Return the certificate of a server, or None. Raises `Invalid`."""
    if options.uds and options.tls_cert and options.tls_key:
        raise Invalid(
            f"uds is {options.uds}; with TLS a server listens on TCP only. Start another server for the socket",
            name="uds",
            value=str(options.uds),
            bound=None,
        )
    return open_certificate(options.tls_cert, options.tls_key)

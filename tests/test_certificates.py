"""Certificates of servers: what new connections are shown after the files have changed."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
import trustme

from replaybuf.certificates import Certificate, client_context


def issue(authority: trustme.CA, folder: Path, *names: str) -> None:
    """Write the files `names`, of chain.pem and key.pem, of a new certificate, with a time of change that is new."""
    issued = authority.issue_cert("127.0.0.1")
    for name, blob in (("chain.pem", issued.cert_chain_pems[0]), ("key.pem", issued.private_key_pem)):
        if name in names:
            path = folder / name
            later_ns = path.stat().st_mtime_ns + 1_000_000_000 if path.exists() else 0
            blob.write_to_path(str(path))
            if later_ns:
                os.utime(path, ns=(later_ns, later_ns))


def shown(certificate: Certificate, authority: trustme.CA) -> bytes:
    """Return the certificate that a client sees in a handshake."""
    client_side = ssl.create_default_context()
    authority.configure_trust(client_side)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    server = certificate.context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    certificate_bytes = client.getpeercert(binary_form=True)
    assert certificate_bytes
    return certificate_bytes


def test_a_new_chain_beside_the_old_key_leaves_the_old_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A renewal replaces two files, so a reload may come between them. The next one takes both."""
    authority = trustme.CA()
    issue(authority, tmp_path, "chain.pem", "key.pem")
    certificate = Certificate(tmp_path / "chain.pem", tmp_path / "key.pem")
    before = shown(certificate, authority)
    issue(authority, tmp_path, "chain.pem")
    certificate.reload()
    assert "the one before stays" in caplog.text
    assert shown(certificate, authority) == before
    issue(authority, tmp_path, "chain.pem", "key.pem")
    certificate.reload()
    assert shown(certificate, authority) != before


def test_renew_reads_the_files_after_a_change_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Broken files are logged once, not every time."""
    authority = trustme.CA()
    issue(authority, tmp_path, "chain.pem", "key.pem")
    certificate = Certificate(tmp_path / "chain.pem", tmp_path / "key.pem")
    before = shown(certificate, authority)
    (tmp_path / "key.pem").unlink()
    for _ in range(3):
        certificate.renew()
    assert caplog.text.count("is not reloaded") == 1
    assert shown(certificate, authority) == before
    issue(authority, tmp_path, "chain.pem", "key.pem")
    certificate.renew()
    assert shown(certificate, authority) != before


def test_without_a_file_a_client_trusts_the_authorities_of_the_system() -> None:
    assert client_context(None).verify_mode is ssl.CERT_REQUIRED

"""Archives that somebody else made: what `replaybuf backup` does not write is refused before it takes memory."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from replaybuf.backup import archive
from replaybuf.backup.archive import MANIFEST, read_manifest
from replaybuf.errors import Invalid


def write_tar(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    return path


@pytest.mark.parametrize("kind", ["long name", "extended header"])
def test_a_long_header_is_refused_before_it_is_read(tmp_path: Path, kind: str) -> None:
    """1 MB of a compressed file may become 1 GB."""
    member = tarfile.TarInfo("00000000.msgpack")
    if kind == "long name":
        member.type, member.size = tarfile.GNUTYPE_LONGNAME, 1 << 20
    else:
        member.pax_headers = {"comment": "x" * (1 << 20)}
    with pytest.raises(Invalid, match=r"cannot be restored: .* has 1048\d{3} bytes; the maximum is 65536"):
        read_manifest(write_tar(tmp_path / "a.tar.gz", member, tarfile.TarInfo(MANIFEST)))


def test_a_chain_of_headers_is_one_error(tmp_path: Path) -> None:
    """Each refers to the next one, and tarfile follows them by recursion."""
    header = tarfile.TarInfo("x")
    header.type = tarfile.GNUTYPE_LONGNAME
    with pytest.raises(Invalid, match="cannot be restored"):
        read_manifest(write_tar(tmp_path / "a.tar.gz", *[header] * 2000))


def test_an_archive_has_a_bounded_number_of_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_MEMBERS", 10)
    path = write_tar(tmp_path / "a.tar.gz", *(tarfile.TarInfo(f"{number:08d}.msgpack") for number in range(11)))
    with pytest.raises(Invalid, match="more than 10 members"):
        read_manifest(path)

"""URLs of spill folders, and stubs of spilled frames."""

from __future__ import annotations

import pytest

from replaybuf.errors import BrokenFrame, Invalid
from replaybuf.wire.frame import encode_frame
from replaybuf.wire.spill import MAGIC, check_spill_url, encode_stub, number_in, path_of, stub_path
from tests.builders import group


@pytest.mark.parametrize("url", ["file:///data/spill", "s3://bucket/spill", "gs://bucket", "abfs://container/a"])
def test_a_durable_store_is_accepted(url: str) -> None:
    assert check_spill_url(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/data/spill",
        "file://host/data",
        "file:data",
        "file:///data/../etc",
        "file:///data?x=1",
        "memory://x",
        "http://host/x",
        "simplecache::s3://bucket/x",
        "s3:///x",
        "s3://key:secret@bucket/x",
        "file:///a\nb",
    ],
)
def test_another_url_is_rejected_by_name(url: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_spill_url(url)
    assert refused.value.name == "spill.url"


def test_a_stub_holds_the_path_and_a_frame_is_none() -> None:
    path = path_of("run-0123456789abcdef", 12345, "rb:p:{run:a}:1")
    assert path.startswith("run-0123456789abcdef/12/12345-") and number_in(path) == 12345
    assert stub_path("run", encode_stub(path)) == path
    assert stub_path("run", encode_frame(group())) is None and stub_path("run", None) is None
    assert path != path_of("run-0123456789abcdef", 12345, "rb:p:{run:a}:2")


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "run-0123456789abcdef/1/../../x", "a/0/1-0", "\ud800"])
def test_a_stub_that_no_spill_wrote_names_no_file(path: str) -> None:
    """A producer that writes to Redis itself must not make the service read other files."""
    with pytest.raises(BrokenFrame):
        stub_path("run", MAGIC + path.encode(errors="surrogatepass"))


@pytest.mark.parametrize("run", ["other", "run-0123456789abcdef", "ru", ""])
def test_a_stub_that_names_the_folder_of_another_run_names_no_file(run: str) -> None:
    """The name of a run may look like the folder of another one."""
    stub = encode_stub(path_of("run-0123456789abcdef", 1, "rb:p:{run:a}:1"))
    with pytest.raises(BrokenFrame):
        stub_path(run, stub)

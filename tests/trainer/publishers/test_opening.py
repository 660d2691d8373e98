"""Publishers by name, and their options."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replaybuf.errors import Invalid
from replaybuf.plugins import entry_points as plugins
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.publishers.folder import FolderPublisher
from replaybuf_trainer.publishers.opening import open_publisher
from replaybuf_trainer.publishers.publisher import Confirm, Publisher, Weights
from replaybuf_trainer.publishers.reload import ReloadPublisher


class Bucket(Publisher):
    """Plug-in that announces an address in an object store."""

    class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`bucket`: name of the bucket."""

        bucket: str

    def prepare(self, version: int, weights: Weights) -> None:
        """Upload nothing."""

    def commit(self, version: int, confirm: Confirm) -> str:
        """Return the address."""
        return f"s3://{self.options.bucket}/{version}"


broken = 7


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_ins = EntryPoints(
        [EntryPoint(name, f"{__name__}:{value}", plugins.PUBLISHERS) for name, value in PLUGINS.items()]
    )
    cached = plugins.installed

    def entry_points(group: str) -> EntryPoints:
        return plug_ins if group == plugins.PUBLISHERS else cached(group)

    entry_points.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(plugins, "installed", entry_points)


PLUGINS = {"bucket": "Bucket", "broken": "broken"}


def opened(**options: Any) -> Publisher:
    """The publisher of these options of `train`."""
    return open_publisher(TrainOptions(run="r", model=Path("m"), **options))


def test_the_default_reloads_engines_and_writes_a_folder_without_engines() -> None:
    assert isinstance(opened(), FolderPublisher)
    assert isinstance(opened(engines=("http://e:8000",)), ReloadPublisher)
    assert isinstance(opened(engines=("http://e:8000",), publisher="folder"), FolderPublisher)


def test_a_plug_in_gets_its_own_options() -> None:
    publisher = opened(publisher="bucket", publisher_options={"bucket": "b"})
    assert publisher.commit(3, lambda: None) == "s3://b/3" and publisher.figures() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"publisher": "ftp"}, r"publisher is 'ftp'; installed: broken, bucket, folder, http, nccl, none, reload"),
        ({"publisher": "broken"}, r"plug-in 'broken' is 7; it must be a class that inherits"),
        ({"publisher": "reload"}, r"publisher reload needs at least one --engine"),
        ({"publisher_options": {"x": 1}}, r"of folder is \{'x': 1\}: .*field `x`; .* a JSON object without keys"),
        ({"publisher": "http", "publisher_options": {"port": 65536}}, r"<= 65535 .*`\$\.port`; .*the keys host, port"),
        ({"publisher": "bucket"}, r"missing required field `bucket`.* the keys bucket"),
    ],
)
def test_a_wrong_publisher_or_option_is_rejected_before_training(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        opened(**options)

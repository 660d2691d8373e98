"""The publisher of a training, by its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from replaybuf.errors import Invalid
from replaybuf.option_types import invalid_group
from replaybuf.plugins import entry_points as plugins
from replaybuf.wire.decoding import prepared
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.publishers.folder import FolderPublisher
from replaybuf_trainer.publishers.http import HttpPublisher
from replaybuf_trainer.publishers.nccl import NcclPublisher
from replaybuf_trainer.publishers.publisher import (
    Confirm,
    NeededVersions,
    Publisher,
    PublisherSetup,
    Weights,
    no_versions,
)
from replaybuf_trainer.publishers.reload import ReloadPublisher


class NoPublisher(Publisher):
    """The publisher `none`: writes nothing and announces no address, as in a training without a service."""

    takes_adapters = True

    def prepare(self, version: int, weights: Weights) -> None:
        """Do nothing."""

    def commit(self, version: int, confirm: Confirm) -> str | None:
        """Return no address."""
        return None

    def restore(self, version: int, confirm: Confirm, adapter: str = "") -> bool:
        """Return True: no engine needs the weights."""
        return True


BUILT_IN: dict[str, type[Publisher]] = {
    "folder": FolderPublisher,
    "http": HttpPublisher,
    "nccl": NcclPublisher,
    "none": NoPublisher,
    "reload": ReloadPublisher,
}


def open_publisher(options: TrainOptions, needed_versions: NeededVersions = no_versions) -> Publisher:
    """Return the publisher of `--publisher`; the default is reload with engines, none without a service, else folder.

    Raises `Invalid` for an unknown publisher, unknown options and values out of bounds.
    """
    names = {field.name for field in dataclasses.fields(PublisherSetup)} - {"needed_versions"}
    setup = PublisherSetup(
        needed_versions=needed_versions if options.keeps_checkpoints else no_versions,
        **{name: getattr(options, name) for name in names},
    )
    without_engines = "none" if options.offline else "folder"
    name = options.publisher or ("reload" if options.engines else without_engines)
    return load_publisher(name, options.publisher_options, setup)


def load_publisher(name: str, options: Mapping[str, Any], setup: PublisherSetup) -> Publisher:
    """Return a publisher by its name and its options. Raises `Invalid`."""
    kind = BUILT_IN.get(name) or _plugin(name)
    try:
        return kind(setup, msgspec.convert(dict(options), prepared(kind.Options)))
    except msgspec.ValidationError as error:
        known = kind.Options.__struct_fields__
        raise invalid_group(f"--publisher-options of {name}", options, error, known) from error


def _plugin(name: str) -> type[Publisher]:
    """Load a publisher by entry point. Raises `Invalid` with the known names."""
    if name not in plugins.names(plugins.PUBLISHERS):
        known = sorted([*BUILT_IN, *plugins.names(plugins.PUBLISHERS)])
        raise Invalid(
            f"publisher is {name!r}; installed: {', '.join(known)}", name="publisher", value=name, bound=known
        )
    plugin = plugins.load(plugins.PUBLISHERS, name)
    if not (isinstance(plugin, type) and issubclass(plugin, Publisher)):
        raise Invalid(
            f"publisher plug-in {name!r} is {plugin!r}; it must be a class that inherits "
            "replaybuf_trainer.publishers.publisher.Publisher",
            name="publisher",
            value=name,
        )
    return plugin

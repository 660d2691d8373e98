"""The interface of publishers: how new weights reach the engines. Plug-ins of `replaybuf.publishers` inherit it.

A publication has two phases, and the service hears of it last::

    prepare(v)              commit(v)                        the trainer announces v
    current ────► staged: nothing that engines ────► loaded: current engines ────► published
                  sample from has changed            serve v as v

- Both phases may be repeated until they succeed: `ServiceUnavailable` means that a later call may work.
- A fault in `prepare` leaves every engine on its version. A fault in `commit` leaves each engine on the old version,
  on the new one, or paused.
- Before weights reach an engine, `confirm` asks the service whether this trainer still has the run. It raises `Fenced`
  if not, because the engines belong to the other trainer.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import msgspec

from replaybuf_trainer.options import OnPublish

if TYPE_CHECKING:
    import torch  # the helper of an engine runs without it

Confirm: TypeAlias = Callable[[], object]
"""Asks the service once. Raises `Fenced` if another trainer has the run, and `ServiceUnavailable`."""


NeededVersions: TypeAlias = Callable[[str], Collection[int]]
"""Returns the versions of an adapter, "" = the whole model, that `restore` may be called with after a resume."""


def no_versions(_: str) -> Collection[int]:
    """Return none: there are no checkpoints."""
    return ()


class Weights(Protocol):
    """What a publisher reads of the policy; it does not change before `commit` has returned.

    `adapter`: name of a LoRA adapter of the run, whose folder is in PEFT's format; "" = a whole model.
    """

    @property
    def adapter(self) -> str:
        """Name of the adapter."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the weights by their names in a folder; tied weights once."""

    def save_weights(self, folder: Path) -> None:
        """Write a folder that engines can load; it appears complete or not at all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublisherSetup:
    """Options of `train` that all publishers share, see `TrainOptions`, and the versions that checkpoints need."""

    weights_dir: Path
    engines: tuple[str, ...] = ()
    engine_timeout_s: float = 60.0
    on_publish: OnPublish = "in-flight"
    publish_token: str | None = dataclasses.field(default=None, repr=False)
    needed_versions: NeededVersions = no_versions


class NoOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a publisher that has none."""


class Publisher(abc.ABC):
    """Brings versions of the weights to the engines, in two phases.

    `Options`: the keys of `--publisher-options`. A plug-in defines `prepare` and `commit`. `takes_adapters`: whether it
    publishes LoRA adapters of a run, each with its own versions; `commit` then follows the `prepare` of its adapter.
    """

    Options: ClassVar[type[msgspec.Struct]] = NoOptions
    takes_adapters: ClassVar[bool] = False

    def __init__(self, setup: PublisherSetup, options: Any) -> None:
        """Check setup and options. Raises `Invalid`."""
        self.setup = setup
        self.options = options

    @abc.abstractmethod
    def prepare(self, version: int, weights: Weights) -> None:
        """Stage a version. Raises `ServiceUnavailable`, and `TrainingFault` for a full disk."""

    @abc.abstractmethod
    def commit(self, version: int, confirm: Confirm) -> str | None:
        """Switch the engines to the staged version; return the weights_uri to announce, if there is one.

        Raises `ServiceUnavailable` if no engine has it, and what `confirm` raises.
        """

    def restore(self, version: int, confirm: Confirm, adapter: str = "") -> bool:
        """Switch the engines to a version that was published before, by its own weights; return whether they are kept.

        Called instead of `prepare` and `commit` by a trainer that resumes between two publications: the present weights
        are no published version. Raises as `commit`.
        """
        return False

    def watch(self, confirm: Confirm) -> None:  # noqa: B027 (a publisher without engines watches none)
        """Start to bring the published version to engines that lack it, until `close`."""

    def retire(self, adapters: frozenset[str]) -> None:  # noqa: B027 (a publisher without engines unloads nothing)
        """Serve these adapters no more. It is called with all adapters that the run has removed, after each change."""

    def close(self) -> None:  # noqa: B027 (a publisher may hold nothing)
        """End the watch, and close connections."""

    def figures(self) -> dict[str, Any]:
        """Return figures for the metrics file, such as the number of engines that are behind."""
        return {}

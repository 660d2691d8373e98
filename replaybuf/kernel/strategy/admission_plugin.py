"""Contract of admission plug-ins: they look at a whole group before it is stored and may refuse it.

An example is the check of a proof that a producer sends with each rollout. Unlike strategies and filters, they see
tokens and proofs, may take seconds, and run in a process beside the service.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

import msgspec

from replaybuf.wire.group import Group


class AdmissionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the options of an admission plug-in: immutable; unknown names are errors."""


AdmissionOptionsT = TypeVar("AdmissionOptionsT", bound=msgspec.Struct)


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a group is refused: one of the plug-in's `reasons`, and a sentence with name, value and bound."""

    reason: str
    detail: str = ""


class Admission(ABC, Generic[AdmissionOptionsT]):
    """Decides whether a group may be stored: an entry point of `replaybuf.admissions`.

    - `Options`: struct of its options; the service checks them when a run is configured
    - `reasons`: all reasons that `check` gives, words of `a-z 0-9 _`; they label a metric
    - `requires`: optional columns, such as `proofs`; a group that lacks one is refused before `check` sees it

    The service imports the module to check the options, so import large libraries in `__init__`. It runs only in the
    process beside the service, as `check` does.
    """

    Options: ClassVar[type[msgspec.Struct]] = AdmissionOptions
    reasons: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: AdmissionOptionsT) -> None:
        self.options = options

    @abstractmethod
    def check(self, group: Group) -> Refusal | None:
        """Return why a group is refused, None = it is admitted. Its columns are read-only.

        The group has its id, the prompt index of its ticket, and advantages.
        """

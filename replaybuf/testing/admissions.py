"""The rules of admission plug-ins. A `StrategyFault` names the rule that is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from replaybuf.kernel.strategy.admission_plugin import Admission, Refusal
from replaybuf.testing.scenes import require
from replaybuf.wire.column.columns import OPTIONAL
from replaybuf.wire.frame import decode_frame, encode_frame
from replaybuf.wire.group import Group, GroupJson, RolloutJson, group_from_json
from replaybuf.wire.names import REASON_WORD

BuildAdmission = Callable[[], Admission[Any]]

_PROOFS = (b"", b"\0", bytes(66), bytes(range(256)), b"\xff" * 4098)
"""Proofs that a hostile producer may send."""


class AdmissionContract:
    """Tests of an admission plug-in: subclass it in a test module and define `build`."""

    def build(self) -> Admission[Any]:
        """Return a new instance of the plug-in."""
        raise NotImplementedError

    def test_it_keeps_the_contract_of_an_admission_plug_in(self) -> None:
        """Check reasons, columns and answers for groups that an untrusted producer may send."""
        check_admission(self.build)


def check_admission(build: BuildAdmission) -> None:
    """Check the rules of an admission plug-in. Raises `StrategyFault` with the broken rule, and what it raises."""
    plugin = build()
    reasons, requires = plugin.reasons, plugin.requires
    words = isinstance(reasons, tuple) and all(
        isinstance(reason, str) and REASON_WORD.fullmatch(reason) for reason in reasons
    )
    require(words, "reasons are a tuple of words that can label a metric", reasons)
    require(isinstance(requires, tuple) and OPTIONAL.issuperset(requires), "requires names optional columns", requires)
    for group in _groups():
        if any(getattr(group, name) is None for name in requires):
            continue  # the service refuses it before `check`
        before = encode_frame(group)
        first = _checked(plugin, group)
        require(encode_frame(group) == before, "check leaves the group unchanged", group.group_id)
        require(_checked(plugin, group) == first, "check gives the same answer again", first)
        require(_checked(build(), group) == first, "check gives the same answer as another instance", first)


def _checked(plugin: Admission[Any], group: Group) -> Refusal | None:
    verdict = plugin.check(group)
    require(verdict is None or isinstance(verdict, Refusal), "check returns Refusal or None", verdict)
    if verdict is not None:
        require(verdict.reason in plugin.reasons, "check gives only its reasons", verdict.reason)
    return verdict


def _groups() -> Iterator[Group]:
    """Yield small groups as the service passes them: with and without each optional column, and with odd proofs."""
    for tokens in (1, 3, 70):
        for proof in (None, *_PROOFS):
            rollouts = [
                RolloutJson(
                    prompt_ids=[1, 2][: 1 + number],
                    completion_ids=[3 + number] * tokens,
                    inference_logprobs=[-0.5] * tokens,
                    reward=float(number),
                    proof=proof,
                )
                for number in range(2)
            ]
            group = group_from_json(GroupJson(group_id="g", prompt_id="p", policy_version=0, rollouts=rollouts))
            yield _read_only(msgspec.structs.replace(group, advantages=np.array([-1.0, 1.0])))
            scores = np.full(2 * tokens, -0.5, np.float32)
            names = ("ref_logprobs", "old_logprobs", "teacher_logprobs", "token_advantages")
            full = msgspec.structs.replace(group, **dict.fromkeys(names, scores), advantages=np.array([-1.0, 1.0]))
            yield _read_only(full)


def _read_only(group: Group) -> Group:
    """Return a group with its id and read-only columns, as the process of the service decodes it."""
    return decode_frame(encode_frame(group))

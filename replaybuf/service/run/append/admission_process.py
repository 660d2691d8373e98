"""Process that runs the admission plug-ins of one run: `python -m replaybuf.service.run.append.admission_process FD`.

The socket FD brings a `Question` with one file, and an `Answer` goes back. The first question brings the plug-ins of
the run, each later one the frame of a group. The process ends when the service closes the socket, and by its own timer
when a plug-in never returns and the service is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from replaybuf.errors import LONGEST_DETAIL, Invalid, ReplaybufError
from replaybuf.kernel.strategy.admission_plugin import Admission, Refusal
from replaybuf.kernel.strategy.options import check_options
from replaybuf.plugins.entry_points import ADMISSIONS, load
from replaybuf.plugins.time_limit import PLUGIN_ERRORS
from replaybuf.service.shared_bytes import MESSAGE_BYTES, SharedBytes
from replaybuf.wire.config import AdmissionSpec
from replaybuf.wire.frame import decode_frame

NICENESS = 5
"""The service and its Valkey come first where both want a processor."""
_GRACE_S = 30.0
"""The service kills a process in time; the timer is for one whose service is gone."""


class Question(msgspec.Struct, frozen=True):
    """Build the plug-ins of the file (`plugin` is None), or ask one of them about the group of the file."""

    timeout_s: float
    plugin: int | None = None
    group_id: str = ""
    prompt_index: int | None = None


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """All is well, or the `reason` of a refusal; `fault`: the plug-in broke its contract."""

    reason: str = ""
    detail: str = ""
    fault: bool = False


def main() -> None:
    """Answer question after question."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the service
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.nice(NICENESS)
    plugins: list[Admission[Any]] = []
    with socket.socket(fileno=int(sys.argv[1])) as service:
        while True:
            message, fds, _, _ = socket.recv_fds(service, MESSAGE_BYTES, 1)
            if not message:
                return
            question = msgspec.json.decode(message, type=Question)
            signal.setitimer(signal.ITIMER_REAL, question.timeout_s + _GRACE_S)
            answer = _answer(question, SharedBytes(*fds), plugins)
            signal.setitimer(signal.ITIMER_REAL, 0)
            service.sendall(msgspec.json.encode(answer) + b"\n")


def _answer(question: Question, file: SharedBytes, plugins: list[Admission[Any]]) -> Answer:
    try:
        if question.plugin is not None:
            return _check(plugins[question.plugin], question, file)
        for spec in msgspec.msgpack.decode(file.view(), type=list[AdmissionSpec]):
            plugins.append(_build(spec))
    except ReplaybufError as error:
        return Answer(detail=error.detail, fault=True)
    except PLUGIN_ERRORS as error:
        return Answer(detail=f"it raised {error!r}"[:LONGEST_DETAIL], fault=True)
    return Answer()


def _build(spec: AdmissionSpec) -> Admission[Any]:
    cls = load(ADMISSIONS, spec.name)
    options = check_options(spec.name, spec.options, cls.Options, kind="admission")
    try:
        plugin: Admission[Any] = cls(options)
    except PLUGIN_ERRORS as error:
        raise Invalid(f"admission {spec.name!r} raised {error!r} when it was built", name="admissions") from error
    return plugin


def _check(plugin: Admission[Any], question: Question, file: SharedBytes) -> Answer:
    group = decode_frame(file.view())
    missing = [name for name in plugin.requires if getattr(group, name) is None]
    if missing:
        return Answer("missing_columns", f"the group lacks {', '.join(missing)}, which the check needs")
    group = msgspec.structs.replace(group, group_id=question.group_id, prompt_index=question.prompt_index)
    return answer_of(plugin.check(group), plugin.reasons)


def answer_of(verdict: object, reasons: Sequence[str]) -> Answer:
    """Return what a plug-in said, or that it broke its contract."""
    if verdict is None:
        return Answer()
    if not isinstance(verdict, Refusal):
        return Answer(detail=f"it returned {verdict!r}; it must return Refusal or None"[:LONGEST_DETAIL], fault=True)
    if verdict.reason not in reasons:
        detail = f"its reason is {verdict.reason!r}; its reasons are {', '.join(reasons) or 'none'}"
        return Answer(detail=detail[:LONGEST_DETAIL], fault=True)
    return Answer(verdict.reason, str(verdict.detail)[:LONGEST_DETAIL])


if __name__ == "__main__":
    main()

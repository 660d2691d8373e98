"""Process that decodes JSON bodies: `python -m replaybuf.service.http.body.decoder_process FD`.

A JSON decoder in C holds Python's lock until it is done, seconds for a hostile body, so a thread of the service cannot
run it. The socket FD brings a `Job` with two files: the body, and an empty one for the frames of its groups, or for
an ack. An `Answer` goes back. The process ends when the service closes the socket.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from replaybuf.errors import Invalid, Malformed, ReplaybufError, TooLarge, counted
from replaybuf.service.shared_bytes import MESSAGE_BYTES, SharedBytes
from replaybuf.wire.column.metadata import check_metadata
from replaybuf.wire.contract import AckRequest
from replaybuf.wire.decoding import decode_request
from replaybuf.wire.frame import encode_frame
from replaybuf.wire.group_json import Body, DecodedGroup, decode_json_groups

MEMORY_BYTES = 120 << 20
"""Memory to decode one body, with the file of its frames, besides the file of its bytes: with both 3 x 64 MiB."""
ERRORS: dict[str, type[ReplaybufError]] = {error.__name__: error for error in (Malformed, Invalid, TooLarge)}
"""Errors that a body may have as a whole, by name."""


class Job(msgspec.Struct, frozen=True):
    """What one body is: groups within limits, or an ack."""

    max_group_bytes: int = 0
    max_groups: int = 0
    ack: bool = False


class Failure(msgspec.Struct, frozen=True):
    """An error; `kind` is the name of its type, or the reason of a rejection."""

    kind: str
    detail: str
    name: str | None = None
    value: Any = None
    bound: Any = None


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """One group: the length of its frame, or why it is rejected."""

    frame_bytes: int = 0
    rejection: Failure | None = None
    group_id: str | None = None
    ticket: str | None = None


class Answer(msgspec.Struct, frozen=True):
    """The file begins with `frames_bytes` of frames; the outcomes follow. An ack is alone in its file.

    `failure`: the body as a whole is wrong.
    """

    frames_bytes: int = 0
    failure: Failure | None = None


def main() -> None:
    """Decode body after body."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the service
    memory = Memory()
    with socket.socket(fileno=int(sys.argv[1])) as service:
        while True:
            message, fds, _, _ = socket.recv_fds(service, MESSAGE_BYTES, 2)
            if not message:
                return
            memory.leave(MEMORY_BYTES)
            body, frames = map(SharedBytes, fds)
            answer = _answer(msgspec.json.decode(message, type=Job), body, frames, memory)
            del body, frames
            service.sendall(msgspec.json.encode(answer) + b"\n")


class Memory:
    """Bound of the memory of this process, where the system reports and bounds it."""

    def __init__(self) -> None:
        self._before_bytes: int | None = None
        with contextlib.suppress(OSError):
            self._before_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()

    def leave(self, room_bytes: int) -> None:
        """Allow this process so much more than it had at its start. Raises `MemoryError` if that is nothing."""
        if room_bytes <= 0:
            raise MemoryError
        if self._before_bytes is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (self._before_bytes + room_bytes, hard))


def _answer(job: Job, body: SharedBytes, frames: SharedBytes, memory: Memory) -> Answer:
    try:
        return _decode_ack(body.view(), frames) if job.ack else _decode(job, body.view(), frames, memory)
    except (Malformed, Invalid, TooLarge) as error:
        return Answer(failure=_failure(type(error).__name__, error))
    except MemoryError:
        detail = (
            f"the body needs more than {MEMORY_BYTES} bytes of memory to decode; send fewer groups per call, or frames"
        )
        return Answer(failure=Failure("TooLarge", detail, "body", None, MEMORY_BYTES))


def _decode(job: Job, body: Body, frames: SharedBytes, memory: Memory) -> Answer:
    """Write the frame of each group, and then the outcomes of all. Each frame leaves less memory to decode the rest."""
    outcomes: list[Outcome] = []
    frames_bytes = 0
    for decoded in decode_json_groups(body, job.max_group_bytes):
        if len(outcomes) == job.max_groups:
            raise too_many_groups(job.max_groups)
        frame, rejection = _frame(decoded)
        frames.append(frame)
        frames_bytes += len(frame)
        memory.leave(MEMORY_BYTES - frames_bytes)
        source = decoded.group or decoded
        outcomes.append(Outcome(len(frame), rejection, source.group_id, source.ticket))
    frames.append(msgspec.msgpack.encode(outcomes))
    return Answer(frames_bytes)


def _decode_ack(body: Body, file: SharedBytes) -> Answer:
    """Write a valid ack as msgpack, which the service decodes in a fraction of the time."""
    ack = decode_request(body, AckRequest)
    check_metadata("feedback", ack.feedback or {})
    file.append(msgspec.msgpack.encode(ack))
    return Answer()


def too_many_groups(bound: int) -> TooLarge:
    """Return the error of a body with too many groups."""
    detail = f"the body has more than {counted(bound, 'group')}; send fewer per call"
    return TooLarge(detail, name="groups", bound=bound)


def _frame(decoded: DecodedGroup) -> tuple[bytes, Failure | None]:
    """Return the frame of a group, or why it has none."""
    if decoded.group is None:
        return b"", _failure(decoded.rejection.reason, decoded.rejection) if decoded.rejection else None
    try:
        check_metadata("metadata", decoded.group.metadata)
        return encode_frame(decoded.group), None
    except Invalid as error:
        return b"", Failure("bad_metadata", error.detail)
    except TooLarge as error:
        return b"", _failure("too_large", error)


def _failure(kind: str, error: ReplaybufError) -> Failure:
    return Failure(kind, error.detail, error.name, error.value, error.bound)


if __name__ == "__main__":
    main()

"""The call that lists samples of trained steps."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from replaybuf.service.http.body.requests import Number, Text, number, optional_number, text
from replaybuf.service.http.reply.json_pieces import json_in_pieces

_STEP, _BEFORE = Number("step"), Number("before")
_CONTAINS = Text("contains")
_LIMIT = Number("limit", 25, 1, 250)
PARAMETERS: tuple[Number | Text, ...] = (_STEP, _BEFORE, _CONTAINS, _LIMIT)


async def get_samples(request: Request) -> Response:
    """List rollouts of trained steps that stay readable."""
    run = await request.app.state.service.run(request.path_params["run"])
    step, before = optional_number(request, _STEP), optional_number(request, _BEFORE)
    listed = await run.samples.list_newest(
        number(request, _LIMIT), step=step, before=before, contains=text(request, _CONTAINS)
    )
    samples = [msgspec.to_builtins(sample) for sample in listed.samples]
    return await json_in_pieces(msgspec.structs.asdict(listed) | {"samples": samples})

"""Handlers of the cursor calls: pages of groups with their content for readers beside the trainer."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from replaybuf.errors import Gone
from replaybuf.kernel.state.cursors import Page
from replaybuf.kernel.state.lookups import steps_by_group
from replaybuf.service.http.body.requests import (
    LIMIT,
    WAIT_MS,
    Number,
    Text,
    number,
    optional_number,
    read_json,
    text,
    wait_s,
)
from replaybuf.service.http.call.browse import fetch_frames, read_content, summarize
from replaybuf.service.http.call.handlers import json_response, leaves, led_run_of, service_of
from replaybuf.service.http.reply.json_pieces import json_in_pieces
from replaybuf.service.run.served_run import Run
from replaybuf.wire.answer.cursors import CursorGap, CursorRequest
from replaybuf.wire.names import check_string
from replaybuf.wire.text.model_tokenizer import Tokenizer

_KIND = Text("kind", choices=("stored", "trained"))
_LIFETIME_S = Number("lifetime_s", None, 120, 86_400)
"""More than the longest wait of a call."""
PARAMETERS = (_KIND, LIMIT, WAIT_MS, _LIFETIME_S)


async def _led(request: Request) -> tuple[Run, str]:
    name: str = request.path_params["name"]
    check_string("name", name)
    return await led_run_of(request), name


async def get_cursor(request: Request) -> Response:
    """Return the groups behind a cursor, with their content; the first call creates it."""
    run, name = await _led(request)
    kind: Any = text(request, _KIND)
    limit, longest_s = number(request, LIMIT), wait_s(request)
    await run.cursors.open(name, kind, optional_number(request, _LIFETIME_S))
    page = await run.cursors.page(name, limit, longest_s, functools.partial(leaves, request))
    groups = await _read_groups(run, page, service_of(request).tokenizer)
    freed = sum(group["rollouts"] is None for group in groups)
    trimmed = page.gap.groups + len(page.items) - len(groups)
    gap = msgspec.structs.replace(page.gap, groups=trimmed, freed=freed)
    run.cursors.count_missed(name, page.position, gap)
    answer = {
        "groups": groups,
        "position": page.position.render(page.kind),
        "gap": None if gap == CursorGap() else msgspec.to_builtins(gap),
        "rewound_to": page.rewound_to,
    }
    return await json_in_pieces(answer)


async def _read_groups(run: Run, page: Page, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Return the groups of a page; rollouts of freed ones are None, and groups trimmed meanwhile are left out."""
    groups, numbers = run.journal.store.groups, list(dict.fromkeys(item.number for item in page.items))
    entries = {entry.number: entry for entry in await groups.read_entries(run.name, numbers)}
    frames = await fetch_frames(run, list(entries.values()))
    steps = steps_by_group(run.state, numbers)
    described: list[dict[str, Any]] = []
    for item in page.items:
        with contextlib.suppress(KeyError, Gone):
            entry = entries[item.number]
            content = await read_content(frames[item.number], tokenizer)
            described.append(summarize(run, entry, steps[item.number]) | {"step": item.step} | content)
    return described


async def post_cursor(request: Request) -> Response:
    """Report that all groups up to a position are done."""
    body = await read_json(request, CursorRequest)
    run, name = await _led(request)
    return json_response(await run.cursors.advance(name, body.position))


async def delete_cursor(request: Request) -> Response:
    """Forget a cursor."""
    run, name = await _led(request)
    await run.cursors.delete(name)
    return Response(status_code=204)


async def get_cursors(request: Request) -> Response:
    """List the cursors of a run with their lag."""
    run = await led_run_of(request)
    return json_response(await run.cursors.list_all())

"""Handler of late columns: JSON lists, or one frame of columns."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from replaybuf.errors import Invalid, TooLarge
from replaybuf.service.http.body.requests import media_type, read_body, read_json
from replaybuf.service.http.call.handlers import json_response, led_run_of
from replaybuf.wire.contract import ColumnsRequest, StoredColumns
from replaybuf.wire.frame import MEDIA_TYPE
from replaybuf.wire.late_columns import LateColumns, decode_columns, late_columns
from replaybuf.wire.names import check_string


async def put_columns(request: Request) -> Response:
    """Add columns to a stored group before a batch draws it."""
    run, group_id = await led_run_of(request), request.path_params["group_id"]
    check_string("group_id", group_id)
    late = await _read(request, group_id, run.journal.config.limits.max_group_bytes)
    added = await run.late_columns.add(late)
    return json_response(StoredColumns(group_id=group_id, added=added))


async def _read(request: Request, group_id: str, largest_bytes: int) -> LateColumns:
    if media_type(request, {"application/json", MEDIA_TYPE}) != MEDIA_TYPE:
        try:
            columns = await read_json(request, ColumnsRequest)
        except TooLarge as error:
            detail = f"{error.detail}; send larger columns as a frame, {MEDIA_TYPE}"
            raise TooLarge(detail, name=error.name, value=error.value, bound=error.bound) from None
        return late_columns(group_id, columns.columns)
    # In a thread: the checksum of 64 MB takes a while, and its work releases Python's lock.
    late = await asyncio.to_thread(decode_columns, await read_body(request, largest_bytes))
    if late.group_id != group_id:
        detail = f"the frame is for group {late.group_id!r}; the path names {group_id!r}"
        raise Invalid(detail, name="group_id", value=late.group_id, bound=group_id)
    return late

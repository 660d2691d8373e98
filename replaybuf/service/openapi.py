"""`/openapi.json`: the table of calls, described."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from replaybuf.plan import MEDIA_TYPE as PLAN_TYPE
from replaybuf.plan import Plan
from replaybuf.service.answers import WaitingAnswer

if TYPE_CHECKING:
    from replaybuf.service.http import Call

_PROBLEM = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "name": {"type": "string"},
        "value": {},
        "bound": {},
    },
}
_MEANING = {
    "200": "Done",
    "201": "Created",
    "202": "Not yet; the answer says why",
    "404": "Unknown",
    "304": "The body is the one that If-None-Match names",
    "406": "Accept-Encoding leaves neither identity nor zstd",
    "409": "Would break a guarantee, or fenced by a newer owner",
    "410": "Finished, or freed by a checkpoint",
    "413": "Too large",
    "422": "Outside its bound",
    "429": "No room; Retry-After says when to ask again",
}


def describe(calls: Sequence[Call]) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of these calls."""
    described = [shape for call in calls for shape in (call.body, call.result) if shape is not None]
    described += [WaitingAnswer, Plan]
    schemas, components = msgspec.json.schema_components(described, ref_template="#/components/schemas/{name}")
    shapes = dict(zip([shape.__name__ for shape in described], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for call in calls:
        paths.setdefault(call.template, {})[call.method.lower()] = _operation(call, call.template, shapes)
    return {
        "openapi": "3.1.0",
        "info": {"title": "replaybuf", "version": "1", "description": "Replay buffer for asynchronous RL, contract 1."},
        "paths": paths,
        "components": {
            "schemas": {**components, "Problem": _PROBLEM},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(call: Call, path: str, shapes: dict[str, Any]) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{call.method.lower()}{path.removeprefix('/v1')}").strip("_")
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": call.summary,
        "security": [{"bearer": []}, {}],
        "parameters": [
            *({"name": p, "in": "path", "required": True, "schema": {"type": "string"}} for p in _names(path)),
            *({"name": q.name, "in": "query", "schema": {"type": "string"}} for q in call.query or ()),
        ],
        "responses": {status: _answer(call, status, shapes) for status in call.answers}
        | {
            "default": {
                "description": "A problem document (RFC 9457)",
                "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
            }
        },
    }
    if call.body is not None:
        content: dict[str, Any] = {"application/json": {"schema": shapes[call.body.__name__]}}
        if path.endswith("/groups"):
            content["application/vnd.replaybuf.frames"] = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _answer(call: Call, status: str, shapes: dict[str, Any]) -> dict[str, Any]:
    if status == "202":
        return {"description": _MEANING[status], "content": {"application/json": {"schema": shapes["WaitingAnswer"]}}}
    if status == "304":
        return {"description": _MEANING[status]}
    if status.startswith("4"):
        return {
            "description": _MEANING[status],
            "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
    if "202" in call.answers:
        forms = {
            "application/vnd.safetensors": {"schema": {"type": "string", "format": "binary"}},
            PLAN_TYPE: {"schema": shapes["Plan"]},
        }
        return {"description": "One safetensors file, or the plan of it", "content": forms}
    schema = shapes[call.result.__name__] if call.result else {"type": "object"}
    return {"description": _MEANING[status], "content": {"application/json": {"schema": schema}}}


def _names(path: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", path)

"""`/openapi.json`: the table of calls, described."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from replaybuf.service.http.requests import STEP, Number, Text
from replaybuf.wire.config import RUN_NAME
from replaybuf.wire.contract import GroupsRequest, WaitingAnswer
from replaybuf.wire.frame import MEDIA_TYPE as FRAMES_TYPE
from replaybuf.wire.group import GroupJson

if TYPE_CHECKING:
    from replaybuf.service.http.routes import Call

_JSON = "application/json"
_BYTES = {"type": "string", "format": "binary"}
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
        "results": {"type": "array", "items": {"type": "object"}},
    },
}
_A_PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
_MEANING = {
    "200": "Done",
    "201": "Created",
    "202": "Not yet; the answer says why",
    "404": "Unknown",
    "304": "The body is the one that If-None-Match names",
    "406": "Accept-Encoding leaves neither identity nor zstd",
    "409": "Would break a guarantee, or fenced by a newer owner",
    "410": "Finished, freed by a checkpoint, or trimmed",
    "413": "Too large",
    "422": "Outside its bound",
    "429": "No room; Retry-After says when to ask again",
    "503": "Not ready; the answer says why",
}


def describe(calls: Sequence[Call], unguarded: Sequence[Call]) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of these calls; those that are `unguarded` take no token."""
    table = [*calls, *unguarded]
    described = {shape for call in table for shape in (call.body, call.result) if shape is not None}
    described |= {WaitingAnswer, GroupJson}
    shapes = sorted(described, key=lambda shape: shape.__name__)
    schemas, components = msgspec.json.schema_components(shapes, ref_template="#/components/schemas/{name}")
    known = dict(zip(shapes, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for call in table:
        security: list[dict[str, Any]] = [] if call in unguarded else [{"bearer": []}, {}]
        paths.setdefault(call.template, {})[call.method.lower()] = _operation(call, known, security)
    return {
        "openapi": "3.1.0",
        "info": {"title": "replaybuf", "version": "1", "description": "Replay buffer for asynchronous RL, contract 1."},
        "paths": paths,
        "components": {
            "schemas": {**components, "Problem": _PROBLEM},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(call: Call, known: dict[Any, Any], security: list[dict[str, Any]]) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{call.method.lower()}{call.template.removeprefix('/v1')}").strip("_")
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": call.summary,
        "security": security,
        "parameters": [
            *({"name": p, "in": "path", "required": True, "schema": _path_schema(p)} for p in _names(call.template)),
            *(_query_parameter(parameter) for parameter in call.query or ()),
        ],
        "responses": {status: _answer(call, status, known) for status in call.answers}
        | {"default": {"description": "A problem document (RFC 9457)", "content": _A_PROBLEM}},
    }
    if call.body is not None:
        content: dict[str, Any] = {_JSON: {"schema": known[call.body]}}
        if call.body is GroupsRequest:
            content = {
                _JSON: {"schema": {"oneOf": [known[GroupsRequest], known[GroupJson]]}},
                FRAMES_TYPE: {"schema": _BYTES},
            }
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _answer(call: Call, status: str, known: dict[Any, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"description": _MEANING[status]}
    if status == "304":
        return described
    if status == "202":
        return described | {"content": {_JSON: {"schema": known[WaitingAnswer]}}}
    if status.startswith("4"):
        return described | {"content": _A_PROBLEM}
    return described | {"content": {form: {"schema": _schema(call, form, known)} for form in call.media_types}}


def _schema(call: Call, media_type: str, known: dict[Any, Any]) -> Any:
    if media_type.endswith("json"):
        return known[call.result] if call.result else {"type": "object"}
    return {"type": "string"} if media_type.startswith("text/") else _BYTES


def _query_parameter(parameter: Number | Text) -> dict[str, Any]:
    required = isinstance(parameter, Number) and parameter.required
    return {"name": parameter.name, "in": "query", "required": required, "schema": _parameter_schema(parameter)}


def _parameter_schema(parameter: Number | Text) -> dict[str, Any]:
    if isinstance(parameter, Text):
        return {"type": "string", "enum": list(parameter.choices)} if parameter.choices else {"type": "string"}
    schema: dict[str, Any] = {"type": "integer", "minimum": parameter.low, "maximum": parameter.high}
    return schema if parameter.default is None else schema | {"default": parameter.default}


def _path_schema(name: str) -> dict[str, Any]:
    if name == STEP.name:
        return _parameter_schema(STEP)
    return {"type": "string", "pattern": f"^{RUN_NAME.pattern}$"} if name == "run" else {"type": "string"}


def _names(path: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", path)

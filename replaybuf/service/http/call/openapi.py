"""The OpenAPI document, generated from the table of calls and the shapes of the contract."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from msgspec import UNSET
from msgspec.structs import fields

from replaybuf.errors import ReplaybufError
from replaybuf.kernel.strategy.options import StrategyOptions
from replaybuf.plugins.entry_points import ADMISSIONS, FILTERS, STRATEGIES, load, names
from replaybuf.plugins.time_limit import PLUGIN_ERRORS
from replaybuf.service.http.body.requests import STEP, Number, Real, Text
from replaybuf.service.http.call.calls import Call
from replaybuf.wire.config import RUN_NAME
from replaybuf.wire.contract import Answer, GroupsRequest, WaitingAnswer
from replaybuf.wire.frame import MEDIA_TYPE as FRAMES_TYPE
from replaybuf.wire.group import GroupJson
from replaybuf.wire.ledger import AnyRecord

_JSON = "application/json"
_BYTES = {"type": "string", "format": "binary"}
_SCHEMAS = "#/components/schemas/"
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
        "entries": {"type": "integer"},
        "groups": {"type": "integer"},
    },
}
_PROBLEM_CONTENT = {"application/problem+json": {"schema": {"$ref": f"{_SCHEMAS}Problem"}}}
_MEANING = {
    "200": "Done",
    "201": "Created",
    "204": "Done, without content",
    "202": "Not yet; the answer gives the reason",
    "404": "Unknown",
    "304": "The caller has this body already (If-None-Match)",
    "406": "Accept-Encoding allows neither identity nor zstd",
    "409": "Would break a guarantee, or fenced by a newer epoch",
    "410": "Finished, freed by a checkpoint, or trimmed",
    "413": "Too large",
    "422": "A value outside its bound",
    "429": "No capacity; ask again after Retry-After",
    "503": "Not ready; the answer gives the reason",
}


def describe(calls: Sequence[Call], open_calls: Sequence[Call]) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of these calls; `open_calls` need no token."""
    shapes = {shape for call in (*calls, *open_calls) for shape in (call.body, call.result) if shape is not None}
    shapes |= {WaitingAnswer, GroupJson, *get_args(AnyRecord)}
    in_order = sorted(shapes, key=lambda shape: shape.__name__)
    _, components = msgspec.json.schema_components(in_order, ref_template=_SCHEMAS + "{name}")
    for shape in shapes:
        if issubclass(shape, Answer) and not shape.__struct_config__.omit_defaults:
            always = [field.encode_name for field in fields(shape) if field.default is not UNSET]
            components[shape.__name__]["required"] = always
    paths: dict[str, dict[str, Any]] = {}
    for call in (*calls, *open_calls):
        security: list[dict[str, Any]] = [] if call in open_calls else [{"bearer": []}, {}]
        paths.setdefault(call.template, {})[call.method.lower()] = _operation(call) | {"security": security}
    return {
        "openapi": "3.1.0",
        "info": {"title": "replaybuf", "version": "1", "description": "Replay buffer for asynchronous RL, contract 1."},
        "paths": paths,
        "components": {
            "schemas": {**components, "Problem": _PROBLEM},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(call: Call) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{call.method.lower()}{call.template.removeprefix('/v1')}").strip("_")
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": call.summary,
        "parameters": [
            *(
                {"name": place, "in": "path", "required": True, "schema": _path_schema(place)}
                for place in re.findall(r"\{(\w+)\}", call.template)
            ),
            *(_query_parameter(parameter) for parameter in call.query or ()),
        ],
        "responses": {status: _response(call, status) for status in call.answers}
        | {"default": {"description": "A problem document (RFC 9457)", "content": _PROBLEM_CONTENT}},
    }
    if call.body is GroupsRequest:
        several = {"oneOf": [_ref(GroupsRequest), _ref(GroupJson)]}
        content: dict[str, Any] = {_JSON: {"schema": several}, FRAMES_TYPE: {"schema": _BYTES}}
        operation["requestBody"] = {"required": True, "content": content}
    elif call.body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(call.body)}}}
    return operation


def _response(call: Call, status: str) -> dict[str, Any]:
    response: dict[str, Any] = {"description": _MEANING[status]}
    if status in ("204", "304"):
        return response
    if status == "202":
        return response | {"content": {_JSON: {"schema": _ref(WaitingAnswer)}}}
    if status.startswith("4"):
        return response | {"content": _PROBLEM_CONTENT}
    return response | {"content": {form: {"schema": _answer_schema(call, form)} for form in call.media_types}}


def _answer_schema(call: Call, media_type: str) -> dict[str, Any]:
    if media_type.endswith("json"):
        return _ref(call.result) if call.result else {"type": "object"}
    return {"type": "string"} if media_type.startswith("text/") else _BYTES


def _ref(shape: type) -> dict[str, Any]:
    return {"$ref": _SCHEMAS + shape.__name__}


def _query_parameter(parameter: Number | Real | Text) -> dict[str, Any]:
    required = isinstance(parameter, Number) and parameter.required
    return {"name": parameter.name, "in": "query", "required": required, "schema": _parameter_schema(parameter)}


def _parameter_schema(parameter: Number | Real | Text) -> dict[str, Any]:
    if isinstance(parameter, Text):
        if parameter.choices:
            return {"type": "string", "enum": list(parameter.choices)}
        return {"type": "string", "maxLength": parameter.most_bytes}
    if isinstance(parameter, Real):
        return {"type": "number", "minimum": -parameter.high, "maximum": parameter.high}
    schema: dict[str, Any] = {"type": "integer", "minimum": parameter.low, "maximum": parameter.high}
    return schema if parameter.default is None else schema | {"default": parameter.default}


def _path_schema(name: str) -> dict[str, Any]:
    if name == STEP.name:
        return _parameter_schema(STEP)
    return {"type": "string", "pattern": f"^{RUN_NAME.pattern}$"} if name == "run" else {"type": "string"}


def describe_plugins() -> dict[str, dict[str, Any]]:
    """Describe the options of each installed strategy, filter and admission, as properties of a JSON Schema.

    The result has them by kind and name.

    A plug-in that does not import is left out: the check of a configuration that names it says why. Imports plug-ins,
    so it is for a thread.
    """
    described: dict[str, dict[str, Any]] = {"strategies": {}, "filters": {}, "admissions": {}}
    for kind, group in (("strategies", STRATEGIES), ("filters", FILTERS), ("admissions", ADMISSIONS)):
        for name in names(group):
            with contextlib.suppress(ReplaybufError, *PLUGIN_ERRORS):
                cls = load(group, name)
                options = msgspec.json.schema(cls.Options)["$defs"][cls.Options.__name__]["properties"]
                shown = {key: value for key, value in options.items() if key not in StrategyOptions.__struct_fields__}
                described[kind][name] = {"description": inspect.cleandoc(cls.__doc__ or ""), "properties": shown}
    return described

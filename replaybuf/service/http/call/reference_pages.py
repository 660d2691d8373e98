"""Write the tables in docs/ that follow from the code: metrics, HTTP calls, the configuration of a run.

    python -m replaybuf.service.http.call.reference_pages

`make docs` calls it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from replaybuf.service.http.call.calls import CALLS, OPEN_CALLS, Call
from replaybuf.service.http.call.metric_table import COUNTER, HISTOGRAM, METRICS, SINCE_START, MetricRow
from replaybuf.wire.config import LARGEST_INTEGER, RunConfig

METRICS_PAGE = Path("docs") / "metrics.md"
HTTP_PAGES = Path("docs") / "http"
HTTP_GROUPS = ("runs", "producers", "groups", "trainer", "figures", "browse", "cursors", "server")
"""Pages of HTTP calls, in the order of the index. Each call has a heading or a row of a table on one of them."""
_EXPANDED = ("batch", "tickets", "limits")
"""Parts of the configuration whose fields have rows of their own."""
_CALLS_HEAD = "| call | roles besides operator | |\n|---|---|---|\n"
_CONFIG_HEAD = "| field | values | meaning |\n|---|---|---|\n"
_HEAD = """\
# Metrics

`GET /metrics` has these metrics in the text format of Prometheus. This page is written from the table in
`replaybuf/service/http/call/metric_table.py` by `make docs`.

- "Since start" counts from the start of the process. Other values are stored in Redis: they survive a restart, and
  every server of a run has the same.
- After a rewind with `resample`, counts of dropped groups and failed prompts may fall. Prometheus treats this as a
  reset.
- `process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds`, `process_max_fds`,
  `process_virtual_memory_bytes` and `process_start_time_seconds` describe the process of the server.
- [Observe](observe.md#metrics) has dashboards and alerts, and pushes the metrics where
  [nobody scrapes](observe.md#pushed-metrics).
"""


def _section_of(row: MetricRow) -> str:
    if "adapter" in row.labels:
        return "Adapters of a run"
    return "Runs" if "run" in row.labels and "call" not in row.labels else "Calls and server"


def _line(name: str, row: MetricRow) -> str:
    shown = ",".join(label for label in row.labels if label != "run")
    title = f"replaybuf_{name}{'_total' if row.kind is COUNTER else ''}{f'{{{shown}}}' if shown else ''}"
    kind = "counter" if row.kind is COUNTER else "histogram" if row.kind is HISTOGRAM else "gauge"
    return f"| `{title}` | {kind}{', since start' if name in SINCE_START else ''} | {row.text} |\n"


def metrics_page() -> str:
    """Return docs/metrics.md: one table per section; every metric of a run also has the label `run`."""
    sections: dict[str, list[str]] = {}
    for name, row in METRICS.items():
        sections.setdefault(_section_of(row), []).append(_line(name, row))
    head = "| metric | kind | meaning |\n|---|---|---|\n"
    tables = (f"\n## {section}\n\n{head}{''.join(lines)}" for section, lines in sections.items())
    return _HEAD + "".join(tables)


def http_index(page: str, groups: dict[str, str]) -> str:
    """Return docs/http/index.md with a table of calls for each of `groups`, the texts of `HTTP_GROUPS` by name.

    Raises ValueError for a call that no page describes, and for a heading of an unknown call.
    """
    calls = {f"{call.method} {call.template}": call for call in (*CALLS, *OPEN_CALLS)}
    tables: list[str] = []
    for name, text in groups.items():
        title = text.partition("\n")[0].removeprefix("# ")
        lines = {route: mark for mark, route in re.findall(r"^(##|\|) `([A-Z]+ /[^\s`]*)`", text, re.MULTILINE)}
        if unknown := lines.keys() - calls.keys():
            raise ValueError(f"docs/http/{name}.md describes {', '.join(sorted(unknown))}: unknown or described twice")
        rows = (_call_line(route, calls.pop(route), name, mark) for route, mark in lines.items())
        tables.append(f"\n## [{title}]({name}.md)\n\n{_CALLS_HEAD}{''.join(rows)}")
    if calls:
        raise ValueError(f"no page in docs/http describes {', '.join(calls)}")
    return page.partition("\n## ")[0] + "".join(tables)


def _call_line(route: str, call: Call, page: str, mark: str) -> str:
    anchor = "#" + re.sub(r"[^\w\- ]", "", route.lower()).replace(" ", "-") if mark == "##" else ""
    roles = "open" if call in OPEN_CALLS else ", ".join(sorted(call.roles))
    return f"| [`{route}`]({page}.md{anchor}) | {roles} | {call.summary.partition('. ')[0]} |\n"


def run_page(page: str) -> str:
    """Return docs/http/runs.md with the table of the fields of a run's configuration, in their order."""
    schema = msgspec.json.schema(RunConfig)["$defs"]
    rows: list[str] = []
    for name, field in schema["RunConfig"]["properties"].items():
        if name in _EXPANDED:
            part = schema[field["$ref"].rpartition("/")[2]]["properties"]
            rows += [_row(f"{name}.{key}", value, schema) for key, value in part.items()]
        else:
            rows.append(_row(name, field, schema))
    before, head, rest = page.partition(_CONFIG_HEAD)
    return before + head + "".join(rows) + "\n" + rest.partition("\n\n")[2]


def _row(name: str, field: dict[str, Any], schema: dict[str, Any]) -> str:
    return f"| `{name}` | {_values(field, schema)} | {field['description']} |\n"


def _values(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """Say which values a field takes, from its JSON Schema."""
    match field:
        case {"anyOf": kinds}:
            return " or ".join(_values(kind, schema) for kind in kinds)
        case {"enum": words}:
            return ", ".join(f"`{word}`" for word in words)
        case {"$ref": reference}:
            return "`{" + ", ".join(schema[reference.rpartition("/")[2]]["properties"]) + "}`"
        case {"type": "array", "items": items, "maxItems": most}:
            return f"list of at most {most} {_values(items, schema)}"
        case {"type": "object", "additionalProperties": value, "maxProperties": most}:
            return f"at most {most} {_values(value, schema)} by name"
        case {"type": "integer", "minimum": least, "maximum": most}:
            return f"{least:,} and up" if most == LARGEST_INTEGER else f"{least:,} to {most:,}"
        case {"type": "number", "exclusiveMinimum": least, "maximum": most}:
            return f"above {least}, at most {most:,.0f}"
        case {"type": "number", "minimum": least, "exclusiveMaximum": most}:
            return f"{least} to below {most}"
    return {"null": "null", "boolean": "true, false", "string": "text"}[field["type"]]


if __name__ == "__main__":
    METRICS_PAGE.write_text(metrics_page())
    paths = {name: HTTP_PAGES / f"{name}.md" for name in ("index", *HTTP_GROUPS)}
    paths["runs"].write_text(run_page(paths["runs"].read_text()))
    texts = {name: path.read_text() for name, path in paths.items()}
    paths["index"].write_text(http_index(texts.pop("index"), texts))

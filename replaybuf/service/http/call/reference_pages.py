"""Write what docs/ says of the metrics and of the configuration of a run: from the table of metrics, from the structs.

    python -m replaybuf.service.http.call.reference_pages

`make docs` calls it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from replaybuf.service.http.call.metric_table import COUNTER, HISTOGRAM, METRICS, SINCE_START, MetricRow
from replaybuf.wire.config import LARGEST_INTEGER, RunConfig

METRICS_PAGE = Path("docs") / "metrics.md"
HTTP_PAGE = Path("docs") / "http.md"
_EXPANDED = ("batch", "tickets", "limits")
"""Parts of the configuration whose fields have rows of their own."""
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


def http_page(page: str) -> str:
    """Return docs/http.md with the table of the fields of a run's configuration, in their order."""
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
    HTTP_PAGE.write_text(http_page(HTTP_PAGE.read_text()))

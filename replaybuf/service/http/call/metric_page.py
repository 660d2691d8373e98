"""Write docs/metrics.md from the table of metrics.

    python -m replaybuf.service.http.call.metric_page

`make docs` calls it.
"""

from __future__ import annotations

from pathlib import Path

from replaybuf.service.http.call.metric_table import COUNTER, HISTOGRAM, METRICS, SINCE_START, MetricRow

PAGE = Path("docs") / "metrics.md"
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
- [Operate](operate.md#metrics) has dashboards and alerts, and pushes the metrics where
  [nobody scrapes](operate.md#pushed-metrics).
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


def write_page() -> str:
    """Return the page: one table per section; every metric of a run also has the label `run`."""
    sections: dict[str, list[str]] = {}
    for name, row in METRICS.items():
        sections.setdefault(_section_of(row), []).append(_line(name, row))
    head = "| metric | kind | meaning |\n|---|---|---|\n"
    tables = (f"\n## {section}\n\n{head}{''.join(lines)}" for section, lines in sections.items())
    return _HEAD + "".join(tables)


if __name__ == "__main__":
    PAGE.write_text(write_page())

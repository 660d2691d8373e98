"""Write dashboards/*.json of Grafana from the tables of boards.py.

python docker/grafana/dashboards.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from boards import DASHBOARDS
from panels import Panel

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = {"type": "prometheus", "uid": "replaybuf-prometheus"}
WIDTH = 24
CONSOLE = "http://127.0.0.1:8900"
"""Address of the console with the ports of the compose file."""


def _targets(panel: Panel) -> list[dict[str, Any]]:
    return [
        {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": query, "legendFormat": legend}
        | ({"instant": True} if panel.stat else {})
        for n, (query, legend) in enumerate(panel.queries)
    ]


def _links(panel: Panel) -> dict[str, Any]:
    """Return the link from a value to the console's page of its run, if every value of the panel has a run."""
    if not all("{{run}}" in legend for _, legend in panel.queries):
        return {}
    url = "${console}/#/runs/${__field.labels.run:percentencode}"
    return {"links": [{"title": "Run ${__field.labels.run} in the console", "url": url, "targetBlank": True}]}


def _stat_parts(panel: Panel) -> tuple[dict[str, Any], dict[str, Any]]:
    colours = [("red", None), ("green", 1)] if panel.texts else [("blue", None)]
    defaults: dict[str, Any] = {
        "color": {"mode": "thresholds"},
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": [{"color": name, "value": at} for name, at in colours]},
    }
    if panel.texts:
        shown = {str(value): {"text": text} for value, text in enumerate(panel.texts)}
        defaults["mappings"] = [{"type": "value", "options": shown}]
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return defaults, {"reduceOptions": reduce, "textMode": panel.shows, "colorMode": "value", "graphMode": "none"}


def _graph_parts(panel: Panel) -> tuple[dict[str, Any], dict[str, Any]]:
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 25 if panel.stacked else 5,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return {"unit": panel.unit, "custom": custom}, options


def _panels(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    written, x, y, below = [], 0, 0, 0
    for number, panel in enumerate(panels, 1):
        width, height = (4, 4) if panel.stat else (8, 8)
        if x + width > WIDTH or (x and height != below - y):
            x, y = 0, below
        defaults, options = _stat_parts(panel) if panel.stat else _graph_parts(panel)
        written.append(
            {
                "id": number,
                "type": "stat" if panel.stat else "timeseries",
                "title": panel.title,
                "description": panel.text,
                "datasource": SOURCE,
                "gridPos": {"h": height, "w": width, "x": x, "y": y},
                "fieldConfig": {"defaults": defaults | _links(panel), "overrides": []},
                "options": options,
                "targets": _targets(panel),
            }
        )
        x, below = x + width, y + height
    return written


def write_dashboard(name: str) -> dict[str, Any]:
    """Return a dashboard in Grafana's own format."""
    title, panels = DASHBOARDS[name]
    run = {
        "name": "run",
        "label": "run",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(replaybuf_step, run)", "refId": "run"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }
    # A person who opens the console at another address writes it once; links between dashboards carry it along.
    console = {
        "name": "console",
        "label": "console",
        "type": "textbox",
        "query": CONSOLE,
        "current": {"text": CONSOLE, "value": CONSOLE},
    }
    links = {"type": "dashboards", "tags": ["replaybuf"], "title": "replaybuf", "keepTime": True, "includeVars": True}
    return {
        "uid": f"replaybuf-{name}",
        "title": title,
        "tags": ["replaybuf"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [run, console]},
        "annotations": {"list": []},
        "links": [links],
        "panels": _panels(panels),
    }


if __name__ == "__main__":
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(json.dumps(write_dashboard(each), indent=1) + "\n")

"""docker/alerts.yml: each rule fires for its trouble, none fires for a healthy run, and each has a runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ALERTS = ROOT / "docker" / "alerts.yml"
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
RUNBOOKS = (ROOT / "docs" / "alerts.md").read_text()
RUN = '{run="r"}'
RUNNING = 'replaybuf_run_state{run="r",state="running"}'
TOO_STALE = 'replaybuf_groups_dropped_total{run="r",reason="too_stale"}'
WAITED = 'replaybuf_waiting_seconds_total{run="r",reason="no_groups"}'
HEALTHY = {
    'up{job="replaybuf",instance="a:8900"}': "1x240",
    "replaybuf_redis_up": "1x240",
    f"replaybuf_leading{RUN}": "1x240",
    "replaybuf_durability_met": "1x240",
    "replaybuf_redis_memory_used_bytes": "100x240",
    "replaybuf_redis_memory_max_bytes": "1000x240",
    'replaybuf_limit_used_ratio{run="r",limit="max_tokens_live"}': "0.5x240",
    'replaybuf_requests_total{run="r",call="GET /x",status="200"}': "0+60x240",
    'replaybuf_requests_total{run="r",call="GET /x",status="500"}': "0x240",
    f"replaybuf_trainer_last_seen_seconds{RUN}": "1x240",
    f"replaybuf_producers_last_seen_seconds{RUN}": "1x240",
    f"replaybuf_step_seconds{RUN}": "6x240",
    f"replaybuf_step_timestamp_seconds{RUN}": "0+60x240",
    f"replaybuf_step{RUN}": "0+10x240",
    f"replaybuf_checkpoint_step{RUN}": "0+10x240",
    RUNNING: "1x240",
    WAITED: "0+6x240",
    f"replaybuf_groups_stored_total{RUN}": "0+100x240",
    TOO_STALE: "0+10x240",
    f"replaybuf_groups_dead_lettered_total{RUN}": "0x240",
    f"replaybuf_prompts_failed_total{RUN}": "0x240",
    f"replaybuf_prompts_failed_alarm{RUN}": "0x240",
    "replaybuf_loop_hold_seconds_count": "0+6000x240",
    'replaybuf_loop_hold_seconds_bucket{le="0.05"}': "0+6000x240",
}
"""Four hours of one run, a sample per minute."""
TROUBLE: dict[str, dict[str, str]] = {
    "ReplaybufDown": {'up{job="replaybuf",instance="a:8900"}': "0x240"},
    "ReplaybufRedisDown": {"replaybuf_redis_up": "0x240"},
    "ReplaybufNoLeader": {f"replaybuf_leading{RUN}": "0x240"},
    "ReplaybufDurabilityWeak": {"replaybuf_durability_met": "0x240"},
    "ReplaybufRedisAlmostFull": {"replaybuf_redis_memory_used_bytes": "950x240"},
    "ReplaybufBufferAlmostFull": {'replaybuf_limit_used_ratio{run="r",limit="max_tokens_live"}': "0.99x240"},
    "ReplaybufFails": {'replaybuf_requests_total{run="r",call="GET /x",status="500"}': "0+1x240"},
    "ReplaybufTrainerGone": {f"replaybuf_trainer_last_seen_seconds{RUN}": "0+60x240"},
    "ReplaybufTrainerStarves": {WAITED: "0+40x240"},
    "ReplaybufStepStandsStill": {f"replaybuf_step_timestamp_seconds{RUN}": "60x240"},
    "ReplaybufProducersGone": {f"replaybuf_producers_last_seen_seconds{RUN}": "0+60x240"},
    "ReplaybufCheckpointTooOld": {f"replaybuf_checkpoint_step{RUN}": "10x240"},
    "ReplaybufWaste": {TOO_STALE: "0+40x240"},
    "ReplaybufDeadLetters": {f"replaybuf_groups_dead_lettered_total{RUN}": "0+1x240"},
    "ReplaybufPromptsFail": {f"replaybuf_prompts_failed_total{RUN}": "0+1x240"},
    "ReplaybufTooManyPromptsFail": {f"replaybuf_prompts_failed_alarm{RUN}": "1x240"},
    "ReplaybufLoopHeld": {'replaybuf_loop_hold_seconds_bucket{le="0.05"}': "0+5990x240"},
}
SILENT_WHILE_PAUSED = ("ReplaybufTrainerGone", "ReplaybufStepStandsStill", "ReplaybufProducersGone")


def fired(tmp_path: Path, series: dict[str, str]) -> list[str]:
    """Return the names of the alerts that `promtool` finds firing at the end of four hours of `series`."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: install Prometheus (Debian: apt-get install prometheus)")
    # A test that expects nothing prints what it got.
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "4h", "exp_samples": []}],
    }
    path = tmp_path / "alerts.test.yml"
    path.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": [test]}))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, timeout=60)
    matches = re.findall(r'alertname=\\?"(\w+)', done.stdout + done.stderr)
    assert (done.returncode != 0) == bool(matches), done.stdout + done.stderr
    return matches


def test_no_alert_fires_for_a_healthy_run(tmp_path: Path) -> None:
    assert fired(tmp_path, HEALTHY) == []


@pytest.mark.parametrize("alert", [rule["alert"] for rule in RULES])
def test_an_alert_fires_for_its_trouble_alone(alert: str, tmp_path: Path) -> None:
    assert fired(tmp_path, HEALTHY | TROUBLE[alert]) == [alert]


@pytest.mark.parametrize("alert", SILENT_WHILE_PAUSED)
def test_a_paused_run_may_stand_still(alert: str, tmp_path: Path) -> None:
    """Trainer and producers may be stopped meanwhile."""
    assert fired(tmp_path, HEALTHY | TROUBLE[alert] | {RUNNING: "0x240"}) == []


def test_every_alert_has_a_severity_and_a_runbook_with_a_section() -> None:
    """The link ends with the name of the section, as GitHub and mkdocs write it."""
    names = [rule["alert"] for rule in RULES]
    assert re.findall(r"^## (\w+)$", RUNBOOKS, re.MULTILINE) == names
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["runbook_url"].endswith(f"/docs/alerts.md#{rule['alert'].lower()}")
        section = RUNBOOKS.partition(f"## {rule['alert']}\n")[2].partition("\n## ")[0]
        assert all(f"- **{part}:**" in section for part in ("Means", "Look", "Do")), rule["alert"]

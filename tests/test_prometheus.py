"""A real Prometheus scrapes a real service: every query of every dashboard and alert finds its data."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.conftest import RunClient, group
from tests.test_docker import ALERTS, DASHBOARDS, DOCKER

START_TIMEOUT_S = 60.0
DATA_TIMEOUT_S = 120.0
ONLY_WHEN = {'replaybuf_requests_total{status="500"}': "a call failed inside the service"}
"""Selectors of alerts that find nothing on a healthy service."""


@pytest.fixture
def prometheus(run: RunClient, tmp_path: Path) -> Iterator[httpx.Client]:
    """Client of a Prometheus with the configuration of docker/, but a scrape every second and without a token."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus: install it (Debian: apt-get install prometheus)")
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DOCKER / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    del job["authorization"]
    job["static_configs"] = [{"targets": [f"{run.http.base_url.host}:{run.http.base_url.port}"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([binary, *options, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=30.0) as client:
            wait_until_ready(client, process, tmp_path / "log")
            yield client
    finally:
        process.terminate()
        process.wait(30)


def wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until Prometheus answers queries."""
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            if client.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail(log.read_text())


def expressions() -> set[str]:
    """Return the queries of panels and the selectors of alerts: a whole alert finds nothing when all is well."""
    panels = {
        target["expr"].replace("$__rate_interval", "1m").replace("$run", ".*")
        for dashboard in DASHBOARDS.values()
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    rules = "\n".join(rule["expr"] for rule in ALERTS["groups"][0]["rules"])
    return panels | set(re.findall(r"\b(?:replaybuf_\w+|up\b)(?:\{[^}]*\})?", rules)) - ONLY_WHEN.keys()


def without_data(prometheus: httpx.Client, queries: set[str]) -> set[str]:
    """Return the queries that find no sample."""
    missing = set()
    for query in queries:
        answer = prometheus.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", (query, answer)
        if not answer["data"]["result"]:
            missing.add(query)
    return missing


def start_run(run: RunClient) -> int:
    """Store, use, drop, reject, ack, publish and checkpoint, so that each metric of a run has a value."""
    run.put(batch={"groups_per_batch": 1}, tickets={"max_failed_share": 0.5}, limits={"max_tokens_live": 1000})
    run.append(group("used"), group("dropped", tokens=9), group("rejected", version=9))
    epoch = run.attach(seq_len=8)
    run.train(epoch, range(1))
    assert run.post("checkpoints", epoch=epoch, step=1).status_code == 200
    return epoch


def test_every_query_of_panels_and_alerts_finds_data(run: RunClient, prometheus: httpx.Client) -> None:
    """The trainer waits for step 1 meanwhile, so that waiting has a reason and a rate."""
    epoch = start_run(run)
    missing, until_s = expressions(), time.monotonic() + DATA_TIMEOUT_S
    assert len(missing) > 60
    while missing and time.monotonic() < until_s:
        assert run.batch(1, epoch, wait_ms=500).status_code == 202
        missing = without_data(prometheus, missing)
    assert not missing
    assert len(without_data(prometheus, set(ONLY_WHEN))) == len(ONLY_WHEN)
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    assert {rule["health"] for rule in groups[0]["rules"]} == {"ok"}

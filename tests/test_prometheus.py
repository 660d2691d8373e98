"""A real Prometheus scrapes real processes: every query of every dashboard and alert finds its data."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.conftest import STOP_TIMEOUT_S, ClockedServe, RunClient, ServeProcess, group
from tests.forked import ForkedProcess
from tests.metric_push.receiver import Pushed, Receiver
from tests.ports import free_port
from tests.service.test_evaluations import post, result
from tests.test_docker import ALERTS, COMPOSE, DASHBOARDS, DOCKER, SERVICES, words
from tests.waiting import eventually

START_TIMEOUT_S = 60.0
DATA_TIMEOUT_S = 120.0
ONLY_WHEN = {'replaybuf_requests_total{status="500"}': "a call failed inside the service"}
"""Selectors of alerts that find nothing on a healthy service."""


def find(program: str) -> str:
    """Return the path of a program of Prometheus; skip the test without it."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"no {program}: install Prometheus (Debian: apt-get install prometheus)")
    return path


def free_address() -> str:
    """Return a free port of this machine with its host."""
    return f"127.0.0.1:{free_port()}"


@contextlib.contextmanager
def scraping(folder: Path, *targets: str, alertmanager: str = "127.0.0.1:9") -> Iterator[httpx.Client]:
    """Run Prometheus with the configuration of docker/, but a scrape every second and without a token.

    `targets`: addresses of the service, then of generator and trainer if there are any. Nothing listens on the default
    of `alertmanager`.
    """
    binary = find("prometheus")
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DOCKER / name) for name in config["rule_files"]]
    config["alerting"]["alertmanagers"][0]["static_configs"] = [{"targets": [alertmanager]}]
    jobs = config["scrape_configs"] = config["scrape_configs"][: len(targets)]
    del jobs[0]["authorization"]
    for job, target in zip(jobs, targets, strict=True):
        job["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = free_address()
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    options.append("--enable-feature=exemplar-storage")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([binary, *options, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=30.0) as client:
            wait_until_ready(client, process, folder / "log")
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
    assert post(run, result(standard_error=0.125)).status_code == 200
    epoch = run.attach(seq_len=8)
    run.train(epoch, range(1))
    assert run.post("checkpoints", epoch=epoch, step=1).status_code == 200
    return epoch


@contextlib.contextmanager
def training(folder: Path, url: str) -> Iterator[list[str]]:
    """Train the run `main` with a real engine, generator and trainer; give the addresses of the metrics of both."""
    pytest.importorskip("torch")
    from tests.trainer.engine_process import engine_process
    from tests.trainer.served import write_model

    model, prompts = write_model(folder / "model", 0), folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": word, "answer": word[::-1]}) + "\n" for word in ("abc", "bcd")))
    ports = {"generate": free_port(), "train": free_port()}
    commands: dict[str, dict[str, Any]] = {
        "generate": {"environment": "exact-match", "prompts": prompts, "tokenizer": model, "max-tokens": 8},
        "train": {"model": model, "weights-dir": folder / "weights", "checkpoint-dir": folder / "checkpoints"},
    }
    with contextlib.ExitStack() as ends, (folder / "training.log").open("w") as log, engine_process(model) as engine:
        for command, options in commands.items():
            named = {"url": url, "run": "main", "engine": engine.url, "metrics-address": ports[command], **options}
            words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
            process = ForkedProcess("replaybuf", [command, *words], os.environ, log, trainer=command == "train")
            ends.enter_context(process)
            ends.callback(process.wait, STOP_TIMEOUT_S)
            ends.callback(process.kill)
        yield [f"127.0.0.1:{port}" for port in ports.values()]


def test_every_query_finds_data_of_a_training_and_a_run_with_all_rules(
    tmp_path: Path, own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """A healthy training drops nothing and has no limits, so a second run on its service does."""
    find("prometheus")
    main, rules = (connect(own_service.url, name) for name in ("main", "rules"))
    batch = {"groups_per_batch": 2, "seq_len": 64}
    assert main.put(batch=batch, group_size=4, strategy={"name": "one-step-off-policy"}).status_code == 201
    address = own_service.url.removeprefix("http://")
    with training(tmp_path, own_service.url) as targets, scraping(tmp_path, address, *targets) as prometheus:
        within_s, first_step = DATA_TIMEOUT_S, {'replaybuf_trainer_step{run="main"} > 0'}
        eventually(lambda: without_data(prometheus, first_step), within_s, operator.not_)
        epoch, missing = start_run(rules), expressions()
        assert len(missing) > 90
        seldom = {query for query in missing if "replaybuf_generator_waiting" in query}
        assert len(seldom) == 1

        def still_missing() -> set[str]:
            nonlocal missing
            assert rules.batch(1, epoch, wait_ms=500).status_code == 202
            missing = without_data(prometheus, missing)
            return missing

        eventually(still_missing, within_s, seldom.issuperset)
        # A scrape rarely meets a healthy generator that waits.
        assert main.http.patch("/v1/runs/main", json={"state": "paused"}).status_code == 200
        eventually(still_missing, within_s, operator.not_)
        of_steps: dict[str, str | float] = {"query": "replaybuf_trainer_step_seconds_bucket", "start": 0}
        of_steps["end"] = time.time() + 60
        buckets = prometheus.get("/api/v1/query_exemplars", params=of_steps).json()["data"]
        assert {int(exemplar["labels"]["step"]) for bucket in buckets for exemplar in bucket["exemplars"]}
        assert len(without_data(prometheus, set(ONLY_WHEN))) == len(ONLY_WHEN)
        groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
        assert {rule["health"] for rule in groups[0]["rules"]} == {"ok"}


# ---------------------------------------------------------------------- promtool


def promtool(*words: str, content: bytes | None = None) -> str:
    """Run promtool; return what it said if it found a fault."""
    done = subprocess.run([find("promtool"), *words], input=content, capture_output=True, timeout=60)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).decode()


def test_promtool_finds_no_fault_in_configuration_and_rules(tmp_path: Path) -> None:
    """The token file exists in the container only."""
    config = tmp_path / "prometheus.yml"
    config.write_text((DOCKER / "prometheus.yml").read_text().replace("/secrets/reader/token", str(config)))
    shutil.copy(DOCKER / "alerts.yml", tmp_path)
    assert not promtool("check", "config", str(config))
    assert not promtool("check", "rules", str(DOCKER / "alerts.yml"))


def test_promtool_finds_no_fault_in_the_metrics_of_a_service(run: RunClient) -> None:
    """It checks base units, `_total` and help texts."""
    start_run(run)
    assert not promtool("check", "metrics", content=run.http.get("/metrics").content)


def firing(prometheus: httpx.Client, name: str) -> set[str]:
    """Return the runs for which an alert fires."""
    alerts = prometheus.get("/api/v1/alerts").json()["data"]["alerts"]
    mine = [alert for alert in alerts if alert["labels"]["alertname"] == name and alert["state"] == "firing"]
    return {alert["labels"]["run"] for alert in mine}


def test_prometheus_calls_when_the_trainer_dies(tmp_path: Path) -> None:
    """The shipped rule fires for the run whose trainer is silent alone, and ends when the trainer is back."""
    find("prometheus")
    service = ClockedServe(tmp_path / "data", tmp_path / "clock").start()
    alive, dead = (RunClient(service.url, name) for name in ("alive", "dead"))
    try:
        for run in (alive, dead):
            run.put(batch={"groups_per_batch": 1})
            run.append(group("a"))
            run.train(run.attach(), range(1))
        with scraping(tmp_path, service.url.removeprefix("http://")) as prometheus:
            service.put_forward(900.0)
            alive.attach(1)  # a trainer that calls again is back
            wait_for_alerts(prometheus, {"dead"})
            dead.attach(1)
            wait_for_alerts(prometheus, set())
    finally:
        alive.http.close()
        dead.http.close()
        service.end()


def wait_for_alerts(prometheus: httpx.Client, runs: set[str]) -> None:
    """Wait until the alert on trainers fires for these runs."""
    until_s = time.monotonic() + DATA_TIMEOUT_S
    while (alerts := firing(prometheus, "ReplaybufTrainerGone")) != runs:
        assert time.monotonic() < until_s, alerts
        time.sleep(0.2)


# ---------------------------------------------------------------------- Alertmanager


def alertmanager_config(folder: Path, url: str) -> Path:
    """Write the configuration of compose with the URL of a receiver in place of the variable."""
    text, number = re.subn(r"\$\{ALERT_WEBHOOK:-[^}]*\}", url, COMPOSE["configs"]["alertmanager"]["content"])
    assert number == 1
    path = folder / "alertmanager.yml"
    path.write_text(text)
    return path


def find_alertmanager(*names: str) -> str:
    """Return the path of the first program that is there; skip the test without it."""
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no {names[0]}: install Alertmanager (Debian: apt-get install prometheus-alertmanager)")


@contextlib.contextmanager
def alerting(folder: Path, url: str) -> Iterator[str]:
    """Run Alertmanager with the options and the configuration of compose; give its address."""
    binary, address = find_alertmanager("prometheus-alertmanager", "alertmanager"), free_address()
    own = {
        "--config.file": str(alertmanager_config(folder, url)),
        "--storage.path": str(folder / "alerts"),
    }
    options = [word.partition("=")[::2] for word in words(SERVICES["alertmanager"]["command"])]
    command = [f"{name}={own.get(name, value)}" for name, value in options] + [f"--web.listen-address={address}"]
    log = folder / "alertmanager.log"
    with log.open("w") as written:
        process = subprocess.Popen([binary, *command], stdout=written, stderr=written)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=30.0) as client:
            wait_until_ready(client, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(30)


SILENT_TRAINER = "ReplaybufTrainerGone"


def read_call(call: Pushed) -> dict[str, Any]:
    """Decode a call of Alertmanager to its receiver."""
    decoded: dict[str, Any] = json.loads(call.body)
    return decoded


def names_of(call: dict[str, Any]) -> set[str]:
    """Return the names of the alerts of a call."""
    return {alert["labels"]["alertname"] for alert in call["alerts"]}


def test_amtool_finds_no_fault_in_the_configuration(tmp_path: Path) -> None:
    config = alertmanager_config(tmp_path, "http://127.0.0.1:9")
    command = [find_alertmanager("amtool"), "check-config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_receiver_is_called_when_a_shipped_alert_fires(tmp_path: Path) -> None:
    """The trainer of a run is silent for 15 minutes; rules, route and receiver are those that ship."""
    find("prometheus")
    service = ClockedServe(tmp_path / "data", tmp_path / "clock").start()
    run = RunClient(service.url, "dead")
    try:
        run.put(batch={"groups_per_batch": 1})
        run.append(group("a"))
        run.train(run.attach(), range(1))
        service.put_forward(900.0)
        with (
            Receiver().up() as receiver,
            alerting(tmp_path, f"http://{receiver.address}/alerts") as alertmanager,
            scraping(tmp_path, service.url.removeprefix("http://"), alertmanager=alertmanager),
        ):
            until_s = time.monotonic() + DATA_TIMEOUT_S
            while not (calls := [call for call in map(read_call, receiver.came) if names_of(call) == {SILENT_TRAINER}]):
                assert time.monotonic() < until_s, (tmp_path / "alertmanager.log").read_text()
                time.sleep(0.2)
    finally:
        run.http.close()
        service.end()
    (alert,) = calls[0]["alerts"]
    assert (calls[0]["receiver"], alert["status"]) == ("webhook", "firing")
    assert (alert["labels"]["run"], alert["labels"]["severity"]) == ("dead", "critical")
    assert alert["annotations"]["runbook_url"].endswith("#replaybuftrainergone")

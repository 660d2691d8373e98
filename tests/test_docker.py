"""docker/: compose file, images, alerts and dashboard, checked without a container engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from replaybuf.service.http.guard.origins import HostNames
from replaybuf.service.options import ServeOptions
from replaybuf.store import ServerReport, Store
from replaybuf.store.redis.embedded import valkey_binary
from tests.command_lines import calls, options_of
from tests.conftest import RunClient, ServeProcess, group
from tests.service.test_evaluations import post, result

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(path for path in DOCKER.glob("Dockerfile*") if path.suffix != ".dockerignore")
COMPOSE_TEXT = (DOCKER / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((DOCKER / "grafana" / "dashboards").iterdir())
}
ALERTS: dict[str, Any] = yaml.safe_load((DOCKER / "alerts.yml").read_text())
OURS = ("replaybuf:0.1.0", "replaybuf-trainer:0.1.0")


def words(value: str | list[str] | None) -> list[str]:
    """Split a command as compose does: a string like a shell, a list not at all."""
    return shlex.split(value) if isinstance(value, str) else list(value or [])


# ---------------------------------------------------------------------- compose


def test_without_a_profile_compose_brings_up_what_needs_no_gpu() -> None:
    """Generator and trainer are in the profile `train`."""
    plain = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert plain == {"valkey", "init", "serve", "prometheus", "alertmanager", "grafana"}
    assert {name for name, s in SERVICES.items() if s.get("profiles") == ["train"]} == {"generator", "trainer"}


def test_serve_has_every_name_under_which_compose_reaches_it() -> None:
    """Containers use the name of the service, users the published port, the health check loopback."""
    command = words(SERVICES["serve"]["command"])
    options = {name: command[command.index(f"--{name}") + 1] for name in ("host", "allowed-host")}
    names = HostNames(ServeOptions(host=options["host"], allowed_hosts=(options["allowed-host"],)))
    scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0]
    called = [*re.findall(r"--url http://(\S+)", COMPOSE_TEXT), *scraped["targets"]]
    assert len(called) == 3
    for host in (*called, "127.0.0.1:8900", "localhost:8900"):
        assert names.accept(host), host
    assert not names.accept("evil.example:8900")


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if service["image"] in OURS])
def test_every_option_in_compose_exists_in_the_command_line(name: str) -> None:
    """This covers flags and options set by environment variables."""
    service = SERVICES[name]
    if "entrypoint" in service:
        script = "\n".join(words(service["entrypoint"]))
        script = (DOCKER / "init.sh").read_text() if "/init.sh" in script else script.replace("\n", " ")
    else:
        script = shlex.join(["replaybuf", *words(service["command"])])
    commands = list(calls(script))
    assert commands
    for command, used in commands:
        assert used
        assert used <= options_of(command), (command, used - options_of(command))


def test_images_are_pinned_and_ports_are_published_on_loopback_only() -> None:
    """No image is `latest`; other machines can connect only after an operator allows it."""
    for service in SERVICES.values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))


def test_our_containers_run_hardened() -> None:
    """The root is read-only; there are no capabilities and no new privileges."""
    for service in SERVICES.values():
        if service["image"] in OURS:
            assert service["read_only"] and service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]


def test_mounted_files_exist_and_named_volumes_are_declared() -> None:
    """Docker makes an empty folder of a missing file."""
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", mount).split(":")[0]
            if source in ("./model", "./prompts.jsonl") or source.startswith("/"):
                continue  # the user's
            assert (DOCKER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], mount


def test_every_variable_is_explained_with_its_default() -> None:
    """The table at the top of the file has all variables."""
    head = COMPOSE_TEXT.partition("\nname:")[0]
    explained = set(re.findall(r"^# \| ([A-Z_]+) ", head, re.MULTILINE))
    assert explained == set(re.findall(r"\$\{([A-Z_]+):-", COMPOSE_TEXT))
    assert not re.search(r"\$\{[A-Z_]+\}|:\?", COMPOSE_TEXT)


def test_each_container_mounts_only_the_token_it_shows() -> None:
    """Only `init`, which makes the tokens, mounts all of them."""
    mounted = {
        name: {mount.split(":")[0] for mount in service.get("volumes", []) if "token" in mount}
        for name, service in SERVICES.items()
    }
    makes = mounted.pop("init")
    assert makes == {"serve-tokens", "operator-token", "producer-token", "trainer-token", "reader-token"}
    assert {name: tokens for name, tokens in mounted.items() if tokens} == {
        "serve": {"serve-tokens"},
        "generator": {"producer-token"},
        "trainer": {"trainer-token"},
        "prometheus": {"reader-token"},
    }


def test_compose_itself_accepts_the_file() -> None:
    """Runs if docker compose is installed."""
    docker = shutil.which("docker")
    known = docker and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0
    if not docker or not known:
        pytest.skip("docker compose is not installed")
    command = [docker, "compose", "-f", str(DOCKER / "compose.yaml"), "--profile", "train", "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


async def report_of(url: str) -> ServerReport:
    """Read the durability of a server."""
    store = await Store.open(url)
    try:
        return await store.connection.report()
    finally:
        await store.close()


def test_valkey_is_strict_with_the_options_of_compose(tmp_path: Path) -> None:
    """A real Valkey accepts the options, and the service reports `strict`."""
    command = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", SERVICES["valkey"]["command"])
    name, *options = shlex.split(command)
    assert name == "valkey-server"
    socket = tmp_path / "s"
    own = ["--port", "0", "--unixsocket", str(socket), "--dir", str(tmp_path)]
    with subprocess.Popen([valkey_binary(), *options, *own], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert any("eady to accept connections" in line for line in server.stdout)
            report = asyncio.run(report_of(f"unix://{socket}"))
        finally:
            server.terminate()
    assert (report.durability, report.reasons, report.max_memory_bytes) == ("strict", (), 4 << 30)


# ---------------------------------------------------------------------- tokens


def test_init_makes_one_token_per_role_once_and_they_work(tmp_path: Path) -> None:
    """A second start changes nothing; the reader token of Prometheus opens /metrics."""
    for folder in ("serve", "operator", "producer", "trainer", "reader"):
        (tmp_path / folder).mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def start() -> dict[str, str]:
        subprocess.run(["sh", DOCKER / "init.sh", tmp_path], check=True, env=os.environ | {"PATH": path})
        roles = ("operator", "producer", "trainer", "reader")
        return {role: (tmp_path / role / "token").read_text() for role in roles}

    tokens = start()
    assert start() == tokens
    modes = {path.parent.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("*/token*")}
    assert modes == {"serve": 0o600, "operator": 0o600, "producer": 0o600, "trainer": 0o600, "reader": 0o444}
    server = ServeProcess(tmp_path / "data", "--tokens-file", str(tmp_path / "serve" / "tokens")).start()
    try:
        for role, expected in {"reader": 200, "producer": 403, "operator": 200}.items():
            answer = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {tokens[role]}"})
            assert answer.status_code == expected
    finally:
        server.end()


def test_prometheus_scrapes_the_service_with_the_readers_token() -> None:
    """Address, port and token file agree with compose."""
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    job, *others = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["serve:8900"]}]
    assert (
        f"reader-token:{Path(job['authorization']['credentials_file']).parent}:ro" in SERVICES["prometheus"]["volumes"]
    )
    assert "--port 8900" in SERVICES["serve"]["command"]
    for other in others:
        ((name, port),) = (target.split(":") for target in other["static_configs"][0]["targets"])
        assert other["job_name"] == f"replaybuf-{name}" and f"--metrics-address 0.0.0.0:{port}" in str(
            SERVICES[name]["entrypoint"]
        )
    assert all((DOCKER / name).is_file() for name in config["rule_files"])


def test_prometheus_sends_its_alerts_to_the_alertmanager_of_compose() -> None:
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    (alertmanager,) = config["alerting"]["alertmanagers"]
    ((name, port),) = (target.split(":") for target in alertmanager["static_configs"][0]["targets"])
    assert f"127.0.0.1:{port}:{port}" in SERVICES[name]["ports"]
    assert {each["source"] for each in SERVICES[name]["configs"]} <= COMPOSE["configs"].keys()
    (config_file,) = (each["target"] for each in SERVICES[name]["configs"])
    assert f"--config.file={config_file}" in words(SERVICES[name]["command"])


# ---------------------------------------------------------------------- metrics


OF_OTHERS = ("generators", "training")
"""Dashboards of generator and trainer; a test on a real demo covers them."""


def queries() -> Iterator[tuple[str, str]]:
    """Return every query of dashboards and alerts of the service with its title."""
    for name, dashboard in DASHBOARDS.items():
        for panel in dashboard["panels"] if name not in OF_OTHERS else ():
            for target in panel["targets"]:
                yield panel["title"], target["expr"]
    for rule_group in ALERTS["groups"]:
        for rule in rule_group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.fixture
def exposed(run: RunClient) -> dict[str, set[str]]:
    """Return the label names of each sample of a run with every rule that stored, used, dropped and rejected groups."""
    run.put(batch={"groups_per_batch": 1}, tickets={"max_failed_share": 0.5}, limits={"max_tokens_live": 1000})
    run.append(group("used"), group("dropped", tokens=9), group("rejected", version=9))
    assert post(run, result(standard_error=0.125)).status_code == 200
    epoch = run.attach(seq_len=8)
    assert run.batch(0, epoch).status_code == run.ack(0, epoch).status_code == 200
    tenants = RunClient(str(run.http.base_url), f"{run.run}-tenants")
    tenants.put(batch={}, adapters={"a": {"groups_per_batch": 1}})
    assert post(tenants, result(adapter="a", standard_error=0.125)).status_code == 200
    tenants.http.close()
    families = text_string_to_metric_families(run.http.get("/metrics").text)
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for sample in (sample for family in families for sample in family.samples):
        labels[sample.name] |= set(sample.labels)
    return labels


def test_every_query_names_metrics_and_labels_that_exist(exposed: dict[str, set[str]]) -> None:
    """This covers dashboard and alerts."""
    seen = set()
    for title, query in queries():
        metrics = re.findall(r"\b((?:replaybuf|process)_\w+)(?:\{([^}]*)\})?", query)
        assert metrics or query.startswith('up{job="replaybuf"}'), title
        for metric, matchers in metrics:
            assert metric in exposed, (title, metric)
            assert set(re.findall(r"(\w+)[=!]~?=?\"", matchers)) <= exposed[metric] | {"job"}, (title, query)
        grouped = {name for labels in re.findall(r"by \(([^)]*)\)", query) for name in re.findall(r"\w+", labels)}
        assert grouped <= {"instance"}.union(*(exposed[metric] for metric, _ in metrics)), (title, query)
        assert not re.search(
            r"\b(?:rate|increase)\((?!(?:replaybuf|process)_\w+_(?:total|bucket|sum|count)\b)", query
        ), (
            title,
            query,
        )
        seen |= {metric for metric, _ in metrics}
    assert len(seen) > 15


def test_no_query_takes_the_greatest_adapter_for_the_run(exposed: dict[str, set[str]]) -> None:
    """A maximum over the servers of a run keeps the label `adapter` of a gauge that has it."""
    maxima = [
        (title, labels, metric)
        for title, query in queries()
        for labels, metric in re.findall(r"\bmax by \(([^)]*)\) \((replaybuf_\w+)", query)
        if "adapter" in exposed[metric]
    ]
    assert maxima
    for title, labels, metric in maxima:
        assert "adapter" in labels.split(", "), (title, metric)


def test_a_quantile_is_taken_over_buckets_that_keep_their_edges() -> None:
    """Prometheus needs buckets and the label `le`."""
    quantiles = [query for _, query in queries() if "histogram_quantile" in query]
    assert quantiles
    for query in quantiles:
        assert re.search(r"histogram_quantile\(0\.\d+, sum by \([^)]*\ble\) \(rate\(replaybuf_\w+_bucket\b", query), (
            query
        )


def test_the_dashboards_are_those_of_the_tables() -> None:
    """`python docker/grafana/dashboards.py` writes them."""
    code = "from dashboards import *; print(json.dumps({name: write_dashboard(name) for name in DASHBOARDS}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=DOCKER / "grafana", capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == DASHBOARDS


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_uses_the_provisioned_source_and_no_panels_overlap(name: str) -> None:
    """Panels stay within the 24 columns of Grafana."""
    panels = DASHBOARDS[name]["panels"]
    sources = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    used = {target["datasource"]["uid"] for panel in panels for target in panel["targets"]}
    assert used == {source["uid"] for source in sources["datasources"]}
    places = [panel["gridPos"] for panel in panels]
    cells = [(p["x"] + dx, p["y"] + dy) for p in places for dx in range(p["w"]) for dy in range(p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_a_value_of_a_run_links_to_its_page_in_the_console(service: ServeProcess) -> None:
    """The place is where the console's own links to a run go; the address of the console is that of compose."""
    panels = [panel for board in DASHBOARDS.values() for panel in board["panels"]]
    links = [link for panel in panels for link in panel["fieldConfig"]["defaults"].get("links", ())]
    assert len(links) > 50
    (url,) = {link["url"] for link in links}
    place, _, name = url.rpartition("/")
    assert (place, name) == ("${console}/#/runs", "${__field.labels.run:percentencode}")
    scripts = (ROOT / "replaybuf" / "console").glob("**/*.js")
    assert any("`#/runs/${encodeURIComponent(" in script.read_text() for script in scripts)
    page = httpx.get(service.url)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    for board in DASHBOARDS.values():
        (console,) = (each for each in board["templating"]["list"] if each["name"] == "console")
        address = console["query"].removeprefix("http://")
        assert f"{address}:8900" in SERVICES["serve"]["ports"]


def test_grafana_finds_what_is_provisioned() -> None:
    """The provider and the home page find the mounted folder of dashboards."""
    (provider,) = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/replaybuf.yaml").read_text())["providers"]
    folder = provider["options"]["path"]
    grafana = SERVICES["grafana"]
    assert f"./grafana/dashboards:{folder}:ro" in grafana["volumes"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (str(home.parent), home.name) == (folder, "overview.json")


# ---------------------------------------------------------------------- images


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_nobody_special(dockerfile: Path) -> None:
    """The last stage has uid 10001 and the command line as entry point."""
    last = dockerfile.read_text().rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.+)$", last, re.MULTILINE) == ["10001:10001"]
    assert 'ENTRYPOINT ["replaybuf"]' in last


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_copies_what_exists_and_what_its_context_lets_through(dockerfile: Path) -> None:
    """The build back end needs nothing else."""
    ignore = Path(f"{dockerfile}.dockerignore").read_text().split()
    assert ignore[0] == "*"
    copied = set()
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile.read_text(), re.MULTILINE):
        copied |= set(sources.split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert copied >= {"pyproject.toml", "constraints.txt", *(package.split("/")[0] for package in packages)}
    for source in copied:
        assert (ROOT / source).exists()
        assert any(fnmatch(source, rule.removeprefix("!")) for rule in ignore[1:] if rule.startswith("!")), source
    extras = extras_of(dockerfile)
    assert extras and extras <= set(project["project"]["optional-dependencies"])


def extras_of(dockerfile: Path) -> set[str]:
    """Return the extras that an image installs."""
    return {extra for extras in re.findall(r"'\.\[([\w,]+)\]'", dockerfile.read_text()) for extra in extras.split(",")}


def test_the_core_image_has_no_torch() -> None:
    """Neither the dependencies nor its extras require torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras_of(DOCKER / "Dockerfile")
    assert "server" in extras
    wanted = [
        *project["dependencies"],
        *(dependency for extra in extras for dependency in project["optional-dependencies"][extra]),
    ]
    assert not [name for name in wanted if name.startswith(("torch", "transformers", "replaybuf"))]


def test_the_health_check_of_the_image_tells_a_service_from_none(service: ServeProcess) -> None:
    """The test runs the command of the Dockerfile."""
    match = re.search(r"^HEALTHCHECK [^\n]*\\\n\s*CMD (\[.*\])$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert match
    _, *arguments = json.loads(match[1])

    def check(port: int) -> int:
        environment = os.environ | {"REPLAYBUF_SERVE_PORT": str(port)}
        return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True).returncode

    assert check(int(service.url.rpartition(":")[2])) == 0
    assert check(1) == 1

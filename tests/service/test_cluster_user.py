"""A Valkey Cluster whose nodes speak TLS, and a user of it with no more rights than docs/security.md gives it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from tests.cli.test_main import replaybuf
from tests.clusters import ValkeyCluster, ask
from tests.conftest import RunClient, ServeProcess, group
from tests.service.test_redis_user import behind_tls, documented_rule, issued_by_new_authority
from tests.waiting import eventually

WITHIN_S = 30.0
OF_A_CLUSTER = ("+cluster|nodes", "+asking")
"""What the page adds to the rights for one server."""


def test_a_run_lives_on_a_cluster_behind_tls_with_the_rights_of_the_page(
    tmp_path: Path, connect: Callable[[str, str], RunClient]
) -> None:
    """Each node announces the port of its TLS. A wrong password and an unknown authority are named at start."""
    context = issued_by_new_authority(tmp_path / "ca.pem")
    with ValkeyCluster(tmp_path / "cluster", replicas=0) as cluster, contextlib.ExitStack() as stack:
        ports = [stack.enter_context(behind_tls(node.port, context)) for node in cluster.nodes]
        for node, port in zip(cluster.nodes, ports, strict=True):
            node.client.config_set("cluster-announce-port", port)
            node.client.execute_command(*documented_rule(), *OF_A_CLUSTER)  # type: ignore[no-untyped-call]
        for node in cluster.nodes:
            eventually(lambda: all(f":{port}" in str(ask(node.client, "NODES")) for port in ports), WITHIN_S)  # noqa: B023
        hosts, trusted = ",".join(f"127.0.0.1:{port}" for port in ports), f"?ssl_ca_certs={tmp_path / 'ca.pem'}"
        for url, words in (
            (f"rediss+cluster://replaybuf:PASSWORD@{hosts}", "certificate verify failed"),
            (f"rediss+cluster://replaybuf:WRONG@{hosts}{trusted}", "invalid username-password pair"),
        ):
            refused = replaybuf("serve", "--data-dir", str(tmp_path / "none"), "--port", "0", "--redis-url", url)
            assert refused.returncode == 1 and words in refused.stderr, refused.stderr
            assert "WRONG" not in refused.stderr and "PASSWORD" not in refused.stderr
        url = f"rediss+cluster://replaybuf:PASSWORD@{hosts}{trusted}"
        server = ServeProcess(tmp_path / "data", "--redis-url", url).start()
        stack.callback(server.end)
        run = connect(server.url, "limited")
        assert run.put(batch={"groups_per_batch": 4}, strategy={"options": {"max_staleness": 9}}).status_code == 201
        run.append(*(group(f"g{number}") for number in range(16)))
        epoch = run.attach()
        run.train(epoch, range(2))
        assert run.post("checkpoints", epoch=epoch, step=2, keep=1).is_success
        assert run.http.patch(run.path, json={"state": "finished"}).is_success
        assert run.http.delete(run.path).status_code == 204
        eventually(
            lambda: not any(b":b:{limited/" in key for held in cluster.keys().values() for key in held), WITHIN_S
        )
        assert "NOPERM" not in server.log()
        for node in cluster.nodes:
            denied = node.client.execute_command("ACL", "LOG")  # type: ignore[no-untyped-call]
            assert {entry[b"reason"] for entry in denied} <= {b"auth"}


def _has_no_payloads(names: list[bytes]) -> bool:
    return not any(b":b:{limited/" in name for name in names)

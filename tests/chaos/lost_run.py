"""Lose acknowledged groups in a failover, accept the loss, and train on: `python -m tests.chaos.lost_run`.

The run has a Valkey with a replica and two servers of its own, because such a loss is one of all runs. The replica
lags, then the primary dies and the replica takes its address. Nobody waits for replicas, so acknowledged groups are
gone.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import msgspec

from replaybuf.client.client import Client
from replaybuf.errors import DataLost, ReplaybufError
from replaybuf.store import keys
from replaybuf.wire.answer.run_status import AcceptedLoss
from replaybuf.wire.contract import WaitingAnswer
from tests.chaos.calling import answered, load_options
from tests.chaos.content import make_group
from tests.chaos.history import LossAccepted, Recorder, now_s
from tests.chaos.older_redis import fingerprint
from tests.chaos.processes import Child, Valkey, python, read_address
from tests.chaos.trainer import read_body
from tests.ports import free_ports
from tests.waiting import eventually

PER_BATCH, GROUPS = 4, 24
MOST_LOST = 9
TIMEOUT_S, WORK_S, COMMAND_TIMEOUT_S = 3.0, 120.0, 60.0


class LostRun:
    """One run, from its creation to its end after the loss. `differences`: what is not as it was said."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._rng = name, random.Random(name)
        self._address = folder / "redis.sock"
        ports = free_ports(2)
        self._valkeys = [Valkey(f"{name}-valkey-{n}", folder / f"v{n}", port) for n, port in enumerate(ports)]
        serve = ("serve", "--port", "0", "--redis-url", f"unix://{self._address}")
        commands = [python("replaybuf", *serve, "--data-dir", str(folder / f"d{n}")) for n in range(2)]
        self._servers = [Child(f"{name}-serve-{n}", "server", command, folder) for n, command in enumerate(commands)]
        self._clients: list[Client] = []
        self.differences: list[str] = []

    def work(self) -> None:
        """Do all of it."""
        primary, replica = self._valkeys
        for valkey in self._valkeys:
            valkey.start()
            valkey.wait_ready()
        self._point_to(primary)
        for server in self._servers:
            server.start()
        self._urls = [read_address(server, WORK_S) for server in self._servers]
        self._clients = [Client(url, self._name, timeout_s=TIMEOUT_S) for url in (",".join(self._urls), *self._urls)]
        batch = {"groups_per_batch": PER_BATCH, "tokens_per_batch": None, "seq_len": 64}
        strategy = {"name": "one-step-off-policy", "options": {"max_staleness": GROUPS}}
        answered(WORK_S, lambda: self._clients[0].put_run({"batch": batch, "strategy": strategy}))
        with replica.connect() as copy:
            copy.replicaof("127.0.0.1", str(primary.port))
            eventually(lambda: copy.info("replication")["master_link_status"], WORK_S, lambda state: state == "up")
        names = [f"{self._name}-{number}" for number in range(GROUPS)]
        lost = names[GROUPS // 2 :][: self._rng.randint(1, MOST_LOST)]
        kept = names[: GROUPS // 2]
        self._append(kept, "stored")
        self._train(1)
        self._let_replica_lag(primary, replica)
        self._append(lost, "stored")
        if self._rng.random() < 0.5:
            self._train(1)
        self._fail_over(primary, replica, len(lost))
        self._append(kept, "duplicate")
        self._append([name for name in names if name not in kept], "stored")
        self._train(GROUPS // PER_BATCH - 1)
        self._check_end()

    # ------------------------------------------------------------------ the loss

    def _let_replica_lag(self, primary: Valkey, replica: Valkey) -> None:
        eventually(lambda: self._ends(primary) == self._ends(replica), WORK_S)
        with replica.connect() as copy:
            copy.replicaof("NO", "ONE")

    def _fail_over(self, primary: Valkey, replica: Valkey, lost: int) -> None:
        """Let the replica take the address; check what is reported, and what a command says that it accepts."""
        eventually(self._is_quiet, WORK_S)
        before, kept, shape = self._ends(primary), self._ends(replica), fingerprint(replica, self._name)
        primary.kill()
        self._point_to(replica)
        for client in self._clients[1:]:
            eventually(lambda client=client: self._reports_loss(client), WORK_S)  # type: ignore[misc]
        try:
            self._clients[0].append([make_group(f"{self._name}-meanwhile", 0, named=True)])
            self.differences.append("a group was answered while Redis lacked data")
        except ReplaybufError:
            pass
        self._compare("what Redis holds before the loss is accepted", shape, fingerprint(replica, self._name))
        accepted = eventually(self._accept, WORK_S)
        assert accepted
        missing = (before[0] - kept[0], before[1] - kept[1])
        self._compare("the entries and groups said to be lost", missing, (accepted.entries, accepted.groups))
        self._compare("the acknowledged groups that are lost", lost, accepted.groups)
        self._compare("the ends that are left", kept, (accepted.last_entry, accepted.last_group))
        records = answered(WORK_S, lambda: self._clients[0].get_ledger(accepted.last_entry, 1)).records
        said = [(record["type"], record["entries"], record["groups"]) for record in records]
        self._compare("the record of the loss", [("LOSS", accepted.entries, accepted.groups)], said)

    def _accept(self) -> AcceptedLoss | None:
        """Accept the loss with the command; None if it does not succeed."""
        options = ("--yes", "--json", "--url", ",".join(self._urls))
        command = python("replaybuf", "runs", "accept-loss", self._name, *options)
        ended = subprocess.run(command, timeout=COMMAND_TIMEOUT_S, check=False, stdout=subprocess.PIPE)
        return None if ended.returncode else msgspec.json.decode(ended.stdout, type=AcceptedLoss)

    def _reports_loss(self, client: Client) -> bool:
        try:
            client.get_run()
        except DataLost:
            return True
        except ReplaybufError:  # Redis is on its way
            return False
        return False

    def _is_quiet(self) -> bool:
        """Check that the servers know all that the primary holds: what nobody knows is not reported as lost."""
        entry, group = self._ends(self._valkeys[0])
        return all(
            answered(WORK_S, client.get_run).groups.stored == group
            and answered(WORK_S, lambda client=client: client.get_ledger(entry - 1, 1)).records  # type: ignore[misc]
            for client in self._clients[1:]
        )

    def _ends(self, valkey: Valkey) -> tuple[int, int]:
        """Read the newest entry of the ledger and the newest group."""
        with valkey.connect() as client:
            ids = [client.xinfo_stream(name(self._name))["last-generated-id"] for name in (keys.ledger, keys.index)]
        entry, group = (int(last.partition(b"-")[0]) for last in ids)
        return entry, group

    def _point_to(self, valkey: Valkey) -> None:
        self._address.unlink(missing_ok=True)
        self._address.symlink_to(valkey.socket)

    # ------------------------------------------------------------------ the run

    def _append(self, names: list[str], status: str) -> None:
        for name in names:
            group = make_group(name, 0, named=True)
            (result,) = answered(WORK_S, lambda group=group: self._clients[0].append([group]))  # type: ignore[misc]
            self._compare(f"the answer to group {name}", status, result.status)

    def _train(self, steps: int) -> None:
        """Train on from the step of the run; check that each batch has whole groups of this run."""
        client = self._clients[0]
        attached = answered(WORK_S, lambda: client.attach(1))
        for step in range(attached.step, attached.step + steps):
            body = read_body(self._fetch(step, attached.epoch))
            self._compare(f"the groups of step {step}", PER_BATCH, len({rollout.group_id for rollout in body.rollouts}))
            answered(WORK_S, lambda step=step: client.ack(step, attached.epoch))  # type: ignore[misc]
            answered(WORK_S, lambda step=step: client.publish_policy(step + 1, attached.epoch))  # type: ignore[misc]

    def _fetch(self, step: int, epoch: int) -> bytes:
        def body() -> bytes | None:
            answer = answered(WORK_S, lambda: self._clients[0].fetch_batch(step, epoch, 0, wait_ms=500))
            return None if isinstance(answer, WaitingAnswer) else answer

        return eventually(body, WORK_S)  # type: ignore[return-value]

    def _check_end(self) -> None:
        """Check that all groups were trained once, and that a restart of the servers changes nothing."""
        steps = GROUPS // PER_BATCH
        # A follower may be behind the last version, which is the last record of the training.
        state = eventually(
            lambda: answered(WORK_S, self._clients[0].get_run), WORK_S, lambda seen: seen.published_version == steps
        )
        self._compare("the steps", steps, state.step)
        self._compare("the stored groups", GROUPS, state.groups.stored)
        self._compare("the groups left or unreadable", (0, 0), (state.groups.live, state.groups.dead_lettered))
        for server in self._servers:
            server.kill()
        self._servers[0].start()
        self._urls[0] = eventually(lambda: self._new_address(), WORK_S)
        with Client(self._urls[0], self._name, timeout_s=TIMEOUT_S) as client:
            again = answered(WORK_S, client.get_run)
        self._compare("the state before and after a restart", (state.step, state.groups), (again.step, again.groups))

    def _new_address(self) -> str:
        lines = [line for line in self._servers[0].log.read_text().splitlines() if line.startswith("listening on ")]
        return lines[-1].removeprefix("listening on ") if len(lines) > 1 else ""

    def _compare(self, what: str, expected: object, seen: object) -> None:
        if expected != seen:
            self.differences.append(f"{what}: {expected} expected, {seen} seen")

    def end(self) -> None:
        """Kill all processes."""
        for client in self._clients:
            client.close()
        for child in (*self._servers, *self._valkeys):
            child.kill()


def main() -> None:
    """Read the command line and work."""
    options = load_options()
    folder = options.folder / options.name
    folder.mkdir()
    lost_run = LostRun(options.name, folder)
    try:
        lost_run.work()
    finally:
        lost_run.end()
    recorder = Recorder(options.history, options.name)
    recorder.write(LossAccepted(at_s=now_s(), run=options.run, side=options.name, differences=lost_run.differences))
    recorder.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

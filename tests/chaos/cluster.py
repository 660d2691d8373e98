"""All processes of one chaos run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import httpx
import msgspec

from replaybuf.client.client import Client
from tests.chaos.content import COLUMN, SPELLED
from tests.chaos.failover import Failover
from tests.chaos.jumping_clock import set_offset
from tests.chaos.processes import Child, Valkey, python, read_address
from tests.chaos.runs import ADAPTERS, CURSOR, KEEP, STAGED, TICKET_TTL_S, config_of, policies_of
from tests.chaos.spread import Spread
from tests.generator.doubles import LETTERS, write_tokenizer
from tests.ports import free_port
from tests.waiting import eventually

START_TIMEOUT_S = 40.0
PROBE_TIMEOUT_S = 0.5
WORDS = ("abc", "bacd", "dec", "fade", "cabbage")


SHORT_HISTORY = ("--history-groups", "40")
"""A short history: both streams are trimmed many times during the faults."""


Topology = Literal["single", "sentinel", "cluster"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)


class Cluster:
    """Valkey, two servers, two producers, engine and generator, a trainer per run, a reader, and a stage.

    `folder` has data and logs.

    `runs` names those of `RUNS` that are trained; the generator feeds the last of them, the producers all, and besides,
    where `adapters` are asked for, the run that they share. `topology`: of Valkey, with replicas
    that take over unless it is `single`; a primary of a cluster has `replicas`, and all of them have each group.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        runs: Sequence[str],
        adapters: int = 0,
        *,
        topology: Topology = "single",
        replicas: int = 1,
    ) -> None:
        self.runs = (*([ADAPTERS] if adapters else []), *runs)
        self._adapters, self._replicas = adapters, replicas
        self.history = folder / "history"
        self.history.mkdir(parents=True)
        self.folder, self._seed = folder, seed
        self._address = folder / "redis.sock"
        self.failover: Failover | Spread | None = None
        self._spill_folder: Path | None = folder / "spill"
        if topology == "sentinel":
            self.failover = Failover(folder)
        elif topology == "cluster":  # it takes no spill folder
            self.failover, self._spill_folder = Spread(folder, replicas), None
        self.valkey = self.failover.valkeys[0] if self.failover else Valkey("valkey", folder / "valkey")
        self.redis_url = self.failover.url if self.failover else f"unix://{self._address}"
        self.point_to(self.valkey)
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        self.servers = {url: self._server(number, url) for number, url in enumerate(self.urls, 1)}
        self.url = ",".join(self.urls)
        self.producers = [self._producer(f"producer-{number}") for number in (1, 2)]
        self.trainers = {run: self._trainer(run, 0) for run in self.runs}
        self.engine = Child(
            "engine", "engine", python("tests.chaos.engine", "--url", self.url, "--run", self.generated_run), folder
        )
        self.generator: Child | None = None
        self.reader = self._reader()
        self.stage = self._stage() if STAGED in self.runs else None
        self.replaced: list[Child] = []
        self.loads: list[Child] = []
        self._trainers_made = 0

    @property
    def generated_run(self) -> str:
        """Name the run that `replaybuf generate` feeds."""
        return self.runs[-1]

    def adapters_of(self, run: str) -> list[str]:
        """Name the policies of a run: its adapters, or "" where it has none."""
        return policies_of(run, self._adapters)

    @property
    def actors(self) -> list[Child]:
        """Processes that make load."""
        return [
            *self.producers,
            *([self.generator] if self.generator else []),
            *self.trainers.values(),
            *self.beside,
        ]

    @property
    def beside(self) -> list[Child]:
        """Processes beside the producers and trainers: the reader of cursors, and the stage."""
        return [self.reader, *([self.stage] if self.stage else [])]

    @property
    def all(self) -> list[Child]:
        """Every process."""
        return [*self.loads, *self.replaced, *self.actors, self.engine, *self.servers.values(), *self.storage]

    @property
    def storage(self) -> list[Child]:
        """Every Valkey, and the sentinels."""
        return self.failover.all if self.failover else [self.valkey]

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start everything, in order; the runs are created."""
        if self.failover:
            self.failover.start()
        else:
            self.valkey.start()
            self.valkey.wait_ready()
        for url, server in self.servers.items():
            server.start()
            self.wait_listening(url)
        for run in self.runs:
            with Client(self.url, run, timeout_s=10.0, retry_for_s=START_TIMEOUT_S) as client:
                client.put_run(config_of(run, self._adapters, self._spill_folder))
                client.read_cursor(CURSOR)  # it keeps nothing of what was freed before it existed
        self.engine.start()
        self.generator = self._generator(read_address(self.engine, START_TIMEOUT_S))
        for actor in self.actors:
            actor.start()

    def end(self) -> None:
        """Kill every process."""
        for child in self.all:
            child.kill()

    def replace_trainer(self, run: str) -> Child:
        """Start a second trainer beside a stopped one, which is fenced from then on."""
        self.replaced.append(self.trainers[run])
        self._trainers_made += 1
        self.trainers[run] = self._trainer(run, self._trainers_made)
        self.trainers[run].start()
        return self.trainers[run]

    def point_to(self, valkey: Valkey) -> None:
        """Let the address of Redis lead to this Valkey: connections made from now on reach it."""
        self._address.unlink(missing_ok=True)
        self._address.symlink_to(valkey.socket)

    def move_clock(self, url: str, offset_s: float) -> None:
        """Let the wall clock of a server differ by so much from now on."""
        set_offset(self._clock_of(url), offset_s)

    def start_load(self, kind: str, *options: str) -> Child:
        """Start a load that ends by itself: `tests.chaos.KIND`."""
        name = f"{kind}-{len(self.loads) + 1}"
        command = python(
            f"tests.chaos.{kind}",
            *("--url", self.url),
            *("--name", name),
            *("--history", str(self.history)),
            *options,
        )
        load = Child(name, kind, command, self.folder)
        self.loads.append(load)
        load.start()
        return load

    def wait_listening(self, url: str) -> None:
        """Wait until a server answers."""

        def answers() -> bool:
            assert self.servers[url].exit_code is None, f"{url} ended: {self.servers[url].log.read_text()[-2000:]}"
            try:
                httpx.get(f"{url}/healthz", timeout=PROBE_TIMEOUT_S)
            except httpx.TransportError:
                return False
            return True

        eventually(answers, START_TIMEOUT_S)

    # ------------------------------------------------------------------ questions

    def url_of(self, child: Child) -> str:
        """Return the address of a server; "" for any other process."""
        return next((url for url, server in self.servers.items() if server is child), "")

    def led_by(self, url: str) -> list[str]:
        """Return the runs that a server leads; none if it does not answer soon."""
        try:
            reply = httpx.get(f"{url}/readyz", timeout=PROBE_TIMEOUT_S)
            leaders: dict[str, str | None] = msgspec.json.decode(reply.content)["leaders"]
        except (httpx.TransportError, msgspec.DecodeError, KeyError):
            return []
        return [run for run, leader in leaders.items() if leader == url]

    # ------------------------------------------------------------------ commands

    def _server(self, number: int, url: str) -> Child:
        port = url.rpartition(":")[2]
        self.move_clock(url, 0.0)
        data_dir = str(self.folder / f"data-{number}")
        options = ("serve", "--port", port, "--redis-url", self.redis_url, "--data-dir", data_dir, *SHORT_HISTORY)
        waits = ("--wait-replicas", str(self._replicas)) if self.failover else ()
        command = python("tests.chaos.jumping_clock", str(self._clock_of(url)), *options, *waits)
        return Child(f"serve-{number}", "server", command, self.folder)

    def _clock_of(self, url: str) -> Path:
        return self.folder / f"clock-{url.rpartition(':')[2]}"

    def _producer(self, name: str) -> Child:
        command = python(
            "tests.chaos.producer",
            *("--url", self.url),
            *("--run", *self.runs),
            *("--name", name),
            *("--history", str(self.history)),
            *("--seed", str(self._seed)),
            *("--ttl-s", str(TICKET_TTL_S)),
            *("--adapters", str(self._adapters)),
        )
        return Child(name, "producer", command, self.folder)

    def _trainer(self, run: str, number: int) -> Child:
        name = f"trainer-{run}" + (f"-{number}" if number else "")
        command = python(
            "tests.chaos.trainer",
            *("--url", self.url),
            *("--run", run),
            *("--name", name),
            *("--history", str(self.history)),
            *("--place", str(self.folder / f"place-{run}")),
            *("--seed", str(self._seed)),
            *("--keep", str(KEEP[run])),
            *("--adapters", str(self._adapters)),
        )
        return Child(name, "trainer", command, self.folder)

    def _reader(self) -> Child:
        command = python(
            "tests.chaos.reader",
            *("--url", self.url),
            *("--run", *self.runs),
            *("--name", "reader"),
            *("--history", str(self.history)),
        )
        return Child("reader", "reader", command, self.folder)

    def _stage(self) -> Child:
        command = python(
            "replaybuf",
            "stage",
            STAGED,
            *("--column", COLUMN),
            *("--function", "tests.chaos.content:references"),
            *("--url", self.url),
        )
        return Child("stage", "stage", command, self.folder)

    def _generator(self, engine_url: str) -> Child:
        tokenizer = write_tokenizer(self.folder / "tokenizer")
        prompts = self.folder / "prompts.jsonl"
        lines = [
            {"prompt_id": f"{SPELLED}{word}", "prompt": word, "answer": word[::-1]}
            for word in WORDS
            if set(word) <= set(LETTERS)
        ]
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = python(
            "replaybuf",
            "generate",
            *("--url", self.url),
            *("--run", self.generated_run),
            *("--engine", engine_url),
            *("--environment", "exact-match"),
            *("--prompts", str(prompts)),
            *("--tokenizer", str(tokenizer)),
            *("--max-tokens", "16"),
            *("--max-inflight-groups", "4"),
        )
        return Child("generator", "generator", command, self.folder)

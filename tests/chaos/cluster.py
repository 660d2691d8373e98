"""All processes of one chaos run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec

from replaybuf.client.client import Client
from tests.chaos.content import SPELLED
from tests.chaos.processes import Child, free_port, python, read_address, valkey
from tests.chaos.runs import ADAPTERS, KEEP, TICKET_TTL_S, config_of, policies_of
from tests.generator.doubles import LETTERS, write_tokenizer

START_TIMEOUT_S = 40.0
PROBE_TIMEOUT_S = 0.5
WORDS = ("abc", "bacd", "dec", "fade", "cabbage")


SHORT_HISTORY = ("--history-groups", "40")
"""A short history: both streams are trimmed many times during the faults."""


class Cluster:
    """Valkey, two servers, two producers, engine and generator, a trainer per run; data and logs in `folder`.

    `runs` names those of `RUNS` that are trained; the generator feeds the last of them, the producers all, and besides,
    where `adapters` are asked for, the run that they share.
    """

    def __init__(self, folder: Path, seed: int, runs: Sequence[str], adapters: int = 0) -> None:
        self.runs = (*([ADAPTERS] if adapters else []), *runs)
        self._adapters = adapters
        self.history = folder / "history"
        self.history.mkdir(parents=True)
        self._folder, self._seed = folder, seed
        self.valkey, self.redis_url = valkey(folder)
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        self.servers = {url: self._server(number, url) for number, url in enumerate(self.urls, 1)}
        self.url = ",".join(self.urls)
        self.producers = [self._producer(f"producer-{number}") for number in (1, 2)]
        self.trainers = {run: self._trainer(run, 0) for run in self.runs}
        self.engine = Child(
            "engine", "engine", python("tests.chaos.engine", "--url", self.url, "--run", self.generated_run), folder
        )
        self.generator: Child | None = None
        self.replaced: list[Child] = []
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
        return [*self.producers, *([self.generator] if self.generator else []), *self.trainers.values()]

    @property
    def all(self) -> list[Child]:
        """Every process."""
        return [*self.replaced, *self.actors, self.engine, *self.servers.values(), self.valkey]

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start everything, in order; the runs are created."""
        self.valkey.start()
        for url, server in self.servers.items():
            server.start()
            self.wait_listening(url)
        for run in self.runs:
            with Client(self.url, run, timeout_s=10.0, retry_for_s=START_TIMEOUT_S) as client:
                client.put_run(config_of(run, self._adapters))
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

    def wait_listening(self, url: str) -> None:
        """Wait until a server answers."""
        ends_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < ends_s:
            try:
                httpx.get(f"{url}/healthz", timeout=PROBE_TIMEOUT_S)
            except httpx.TransportError:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"{url} does not listen; its log: {self.servers[url].log.read_text()}")

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
        command = python("replaybuf", "serve", "--port", port, "--redis-url", self.redis_url, *SHORT_HISTORY)
        return Child(f"serve-{number}", "server", command, self._folder)

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
        return Child(name, "producer", command, self._folder)

    def _trainer(self, run: str, number: int) -> Child:
        name = f"trainer-{run}" + (f"-{number}" if number else "")
        command = python(
            "tests.chaos.trainer",
            *("--url", self.url),
            *("--run", run),
            *("--name", name),
            *("--history", str(self.history)),
            *("--place", str(self._folder / f"place-{run}")),
            *("--seed", str(self._seed)),
            *("--keep", str(KEEP[run])),
            *("--adapters", str(self._adapters)),
        )
        return Child(name, "trainer", command, self._folder)

    def _generator(self, engine_url: str) -> Child:
        tokenizer = write_tokenizer(self._folder / "tokenizer")
        prompts = self._folder / "prompts.jsonl"
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
        return Child("generator", "generator", command, self._folder)

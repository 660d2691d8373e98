"""A real Chromium on a real service: pages that fail a test if the browser reports an error."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunClient, ServeProcess, group

AXE = Path(__file__).with_name("node_modules") / "axe-core" / "axe.min.js"
WAIT_MS = 60_000
"""A busy machine is slow: tests wait for what they need, and only a fault reaches this bound."""
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"

WIDE = """() => [...document.querySelectorAll('*')]
  .filter((one) => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX !== 'visible')
  .filter((one) => !one.classList.contains('hidden'))
  .map((one) => one.outerHTML.slice(0, 200))"""
"""Elements that scroll sideways."""


def find_chromium() -> str | None:
    """The path of a Chromium, `CHROMIUM` first; the headless shell needs less than half the time of the others."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium. Of one module: Playwright keeps an event loop, and other tests need their own."""
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium: install it (Debian: chromium-headless-shell) or set CHROMIUM=/path/to/chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: run make install")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., ServeProcess]]:
    """Start a service of one test, with options. It ends after the pages: one that polls a dead service reports it."""
    servers: list[ServeProcess] = []

    def start(*options: str) -> ServeProcess:
        servers.append(ServeProcess(tmp_path / "data", *options).start())
        return servers[-1]

    yield start
    for server in servers:
        server.end()


OpenPage = Callable[..., Any]


@contextmanager
def watched_pages(browser: Any) -> Iterator[OpenPage]:
    """Open addresses of a service. At the end, the browser must have reported no error but the `expected` ones."""
    errors: list[str] = []
    contexts = []
    allowed: list[str] = []

    def open_(url: str, path: str = "/", expected: tuple[str, ...] = (), **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)
        allowed.extend(expected)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{url}/#{path}")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not [error for error in errors if not any(part in error for part in allowed)]


@pytest.fixture
def open_page(browser: Any, own_server: Callable[..., ServeProcess]) -> Iterator[OpenPage]:
    with watched_pages(browser) as open_:
        yield open_


def violations(page: Any, *rules: str) -> list[Any]:
    """What axe finds on the page as it is shown now: by these rules, or by all of them, contrast included."""
    if not AXE.is_file():
        pytest.skip("no axe-core: run make browser, which needs npm (Debian: apt-get install npm)")
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE.read_text())  # not as a script of the page, which its policy refuses
    broken_rules: list[Any] = page.evaluate(
        """async (rules) => {
          const result = await axe.run(rules.length ? { runOnly: rules } : {});
          return result.violations.map((v) => [v.id, v.nodes.map((n) => n.html)]);
        }""",
        rules,
    )
    return broken_rules


def play(run: RunClient, steps: int, *, seed: int = 0) -> int:
    """Train some steps of 4 groups of 3 rollouts, with hostile metadata; return the epoch."""
    rng = random.Random(seed)
    strategy = {"name": "one-step-off-policy", "options": {"max_staleness": 2}}
    assert run.put(batch={"groups_per_batch": 4, "tokens_per_batch": None}, strategy=strategy).is_success
    epoch = run.attach()
    for step in range(steps):
        groups = [
            group(
                f"g{step}-{number}",
                max(0, step - rng.randrange(3)),
                rollouts=3,
                tokens=6 + rng.randrange(8),
                metadata={"source": "sums", "note": HOSTILE},
            )
            for number in range(4)
        ]
        run.append(*groups)
        run.train(epoch, range(step, step + 1))
    return epoch


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunClient]:
    """A run of 6 steps whose next batch lacks groups; one failed prompt; a second run that is paused."""
    server = ServeProcess(tmp_path_factory.mktemp("console") / "data").start()
    run = RunClient(server.url, "sums")
    epoch = play(run, 6)
    run.append(group("last", 5, metadata={"source": "sums"}), group("<b>bold</b>", 5))
    run.http.put(f"{run.path}/producers/gen-{HOSTILE[:40]}", json={"in_flight": 1, "engines": 0, "held_back_by": "x"})
    run.batch(6, epoch)
    other = RunClient(server.url, "paused-run")
    other.put(batch={"groups_per_batch": 1})
    other.http.patch(other.path, json={"state": "paused"})
    other.http.close()
    yield run
    run.http.close()
    server.end()

"""The walk of docs/walk.md with real processes and a real browser; it writes the screenshots of that page.

    python -m tests.console.walk --model FOLDER --out docs/assets/walk      # or make screenshots

It needs Chromium and Prometheus, and takes about 6 minutes. `FOLDER` is what `replaybuf init-model` wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.conftest import ClockedServe, RunClient
from tests.console.conftest import find_chromium, play
from tests.test_prometheus import firing, scraping

RUN = "spell"
FINISHED_RUNS = 11
COLOURS = 40
WIDTH, HEIGHT = 1120, 700
PATIENCE_S = 600.0
STEPS_BEFORE, STEPS_AFTER = 30, 25
CONFIG = {
    "group_size": 8,
    "batch": {"groups_per_batch": 16, "tokens_per_batch": 32768, "seq_len": 128},
    "strategy": {"name": "one-step-off-policy", "options": {"max_staleness": 1}},
    "tickets": {"ttl_s": 20, "max_attempts": 10, "heartbeat_s": 5},
}


class ModelServe(ClockedServe):
    """The service with the tokenizer of the model, and with a clock that the last part of the walk puts forward."""

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder / "data", folder / "clock")
        self.options = ("--tokenizer", str(model))


class Loop:
    """Engine, generator and trainer of the run, each a process that a part of the walk may kill."""

    def __init__(self, folder: Path, url: str, model: Path, port: int) -> None:
        engine = f"http://127.0.0.1:{port}"
        run = ["--url", url, "--run", RUN, "--engine", engine]
        prompts = [f"--prompts={model}/prompts.jsonl", "--environment=reasoning-gym", f"--tokenizer={model}"]
        self.folder = folder
        self.commands = {
            "engine": ["engine", "--model", str(model), "--port", str(port)],
            "generate": ["generate", *run, *prompts, "--group-size=8", "--max-tokens=8", "--producer=generator-1"],
            "train": ["train", *run, f"--model={model}", f"--checkpoint-dir={folder}/c", f"--weights-dir={folder}/w"],
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start one of the processes."""
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "replaybuf", *self.commands[name]]
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill(self, name: str) -> None:
        """Kill a process as an out-of-memory killer does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.running[name].pid, signal.SIGKILL)
        self.running[name].wait(30)

    def end(self) -> None:
        """Kill what still runs."""
        for name in self.running:
            self.kill(name)


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Wait until `condition()` is true; return it."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        if value := condition():
            return value
        time.sleep(0.5)
    raise TimeoutError(what)


class Camera:
    """Takes screenshots with few colours."""

    def __init__(self, page: Any, out: Path) -> None:
        self.page, self.out = page, out
        out.mkdir(parents=True, exist_ok=True)

    def take(self, name: str, height: int = HEIGHT, top: int = 0) -> None:
        """Write NAME.png: a part of the page from `top` on, in pixels."""
        self.page.evaluate("scrollTo(0, 0)")
        self.page.mouse.move(0, 0)
        shot = self.page.screenshot(clip={"x": 0, "y": top, "width": WIDTH, "height": height}, full_page=True)
        picture = Image.open(io.BytesIO(shot)).convert("RGB")
        path = self.out / f"{name}.png"
        few = picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        _restore_background(few, picture)
        few.save(path, optimize=True)
        print(f"{path}: {path.stat().st_size / 1024:.0f} kB", flush=True)


def _restore_background(few: Image.Image, picture: Image.Image) -> None:
    """Give the largest area its own colour again: fewer colours tint it."""
    places = np.asarray(few)
    largest = int(np.bincount(places.ravel()).argmax())
    colours, counts = np.unique(np.asarray(picture)[places == largest], axis=0, return_counts=True)
    palette = list(few.getpalette() or [])
    palette[3 * largest : 3 * largest + 3] = colours[counts.argmax()].tolist()
    few.putpalette(palette)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long a part of the walk took in the browser."""
    begun = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - begun:.1f} s", flush=True)


def find_a_stalled_run(page: Any, url: str, camera: Camera) -> None:
    """The engine is killed; one click leads from the list to the cause."""
    with timed("stalled run and its cause, 1 click"):
        page.goto(url)
        page.locator("tbody tr", has_text="stands still").get_by_role("link").click()
        page.get_by_text("generator-1: no engine takes its requests").wait_for()
    page.get_by_text("The trainer is gone").wait_for()  # it ends a minute later
    camera.take("stalled", 560)
    page.get_by_role("link", name="runs").click()
    page.get_by_text("1 stands still").wait_for()
    camera.take("runs", 520)


def find_the_worst_rollouts(page: Any, url: str, camera: Camera) -> None:
    """From the page of the run by two clicks."""
    page.goto(f"{url}/#/runs/{RUN}")
    page.get_by_role("link", name="its worst rewards").wait_for()
    with timed("worst rollouts of the last step, 2 clicks"):
        page.get_by_role("link", name="its worst rewards").click()
        first = page.locator("tbody tr").first
        first.wait_for()
        camera.take("worst", 480)
        first.get_by_role("link").first.click()
        page.locator(".rollout").first.wait_for()
    camera.take("group", 760)


QUESTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "does it learn?": ((RUN,), "details:has(h2:text-is('Learning')) canvas"),
    "its worst completions": ((RUN, "Its worst completions of the last step"), ".texts tbody tr"),
    "what it said at first and now": ((RUN, "What it said at first and now"), ".texts h2 >> nth=1"),
    "which of two runs is better?": (("Compare these 2 runs",), "text=seconds per step"),
    "why does it wait?": ((RUN,), ".state strong"),
}
"""Links that lead from the list of runs to an answer, and what the page shows then."""


def ask_the_first_questions(page: Any, url: str) -> None:
    """Each from the list of runs, by clicks; for two of many runs their name is typed into the search."""
    for question, (links, answer) in QUESTIONS.items():
        page.goto("about:blank")
        with timed(f"{question}, {len(links)} clicks"):
            page.goto(url)
            page.get_by_role("link", name=RUN).wait_for()
            page.get_by_label("Search runs").fill("sums-1" if links[0] != RUN else "")
            for link in links:
                page.get_by_role("link", name=link, exact=True).click()
            page.locator(answer).first.wait_for()


def change_the_strategy(page: Any, url: str, camera: Camera) -> None:
    """With a preview; the page of the run then compares the steps before and after."""
    page.goto(f"{url}/#/runs/{RUN}/act")
    page.get_by_role("tab", name="JSON").click()
    editor = page.locator("#change")
    editor.fill(editor.input_value().replace('"max_staleness": 1', '"max_staleness": 3'))
    page.get_by_role("button", name="Preview the change").click()
    page.locator("dialog pre").wait_for()
    camera.take("preview", 620)
    page.locator("dialog button.main").click()
    page.get_by_text("Change the run: done.").wait_for()


def see_what_it_did(page: Any, url: str, camera: Camera) -> None:
    """Without a click: the newest change is above the charts."""
    with timed("what the change did, 0 clicks"):
        page.goto(f"{url}/#/runs/{RUN}")
        page.get_by_text("steps after").wait_for()
    top = page.evaluate("scrollY + document.querySelector('.changes').getBoundingClientRect().top - 60")
    camera.take("change", 590, top)


def be_called(page: Any, service: ClockedServe, folder: Path, camera: Camera) -> None:
    """The trainer is dead; the shipped alert fires in Prometheus, and the console names the trainer."""
    with scraping(folder, service.url.removeprefix("http://")) as prometheus:
        service.put_forward(1200.0)
        with timed("alert after the time of the rule"):
            wait_for(lambda: RUN in firing(prometheus, "ReplaybufTrainerGone"), "the alert ReplaybufTrainerGone")
    page.goto(f"{service.url}/#/runs/{RUN}")
    page.get_by_text("The trainer is gone").wait_for()
    camera.take("gone", 420)


def walk(model: Path, out: Path, folder: Path) -> None:
    """Do the whole walk."""
    from playwright.sync_api import sync_playwright

    service = ModelServe(folder, model).start()
    loop = Loop(folder, service.url, model, port=8000 + os.getpid() % 1000)
    run = RunClient(service.url, RUN)
    try:
        for number in range(FINISHED_RUNS):
            done = RunClient(service.url, f"sums-{number + 1:02}")
            play(done, 3 + number % 4, seed=number)
            done.http.patch(done.path, json={"state": "finished"})
            done.http.close()
        run.put(**CONFIG).raise_for_status()
        for name in loop.commands:
            loop.start(name)
        wait_for(lambda: run.state()["step"] >= STEPS_BEFORE, "the first steps")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
            page.set_default_timeout(PATIENCE_S * 1000)
            camera = Camera(page, out)
            ask_the_first_questions(page, service.url)
            find_the_worst_rollouts(page, service.url, camera)
            change_the_strategy(page, service.url, camera)
            changed_at = run.state()["step"]
            wait_for(lambda: run.state()["step"] >= changed_at + STEPS_AFTER, "steps after the change")
            see_what_it_did(page, service.url, camera)
            loop.kill("engine")
            wait_for(lambda: run.get("flow").json()["row"]["stands_still"], "a run that stands still")
            find_a_stalled_run(page, service.url, camera)
            loop.start("engine")
            loop.kill("train")  # without its engine it gave up
            loop.start("train")
            wait_for(lambda: not run.get("flow").json()["row"]["stands_still"], "the run to go on")
            loop.kill("train")
            be_called(page, service, folder, camera)
            browser.close()
    finally:
        run.http.close()
        loop.end()
        service.end()


def main() -> None:
    """Read the command line and walk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/assets/walk"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        walk(options.model.absolute(), options.out, Path(folder))


if __name__ == "__main__":
    main()

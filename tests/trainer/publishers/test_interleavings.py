"""No engine samples under a wrong version label: faults at every call, two trainers, restarts, on a model of an engine.

The model keeps the weights, the label and the pause of one engine. The trainers are real `Engine` objects; their HTTP
calls and the questions to the service go to the model, one at a time. At any of them something may happen:

- lost: the call does not arrive; unanswered: it takes effect, but the answer is lost; error: 500 without an effect
- restart: the engine is away for two calls and is back with its initial weights
- takeover: another trainer attaches and publishes, before the call goes on
- kill: the trainer is gone
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf.errors import Fenced, ServiceUnavailable
from replaybuf_trainer.publishers.engine import Engine

INITIAL = ("nobody", 0)
CALLS, ROUNDS = 8, 5
"""Calls of one undisturbed load and some of its repetition; rounds of the watch, more than there are faults."""


class Killed(BaseException):
    """The process of a trainer is gone."""


class Model:
    """One engine and the service. `weights`: trainer and version that they are of; `epoch`: of the present trainer."""

    def __init__(self) -> None:
        self.epoch = 0
        self.away = 0
        self.restart()

    def restart(self) -> None:
        """Start with the initial weights."""
        self.weights, self.label, self.paused = INITIAL, "0", False

    def call(self, path: str, body: bytes, trainer: str, *, late: bool) -> None:
        """Change the engine; check that it samples nothing under the label of another version.

        A late call of a trainer that lost the run is the window that stays open; what follows has to repair it.
        """
        asked: Any = msgspec.json.decode(body) if body else None
        if path == "/pause":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/collective_rpc":
            self.weights = (trainer, int(asked))
        elif path == "/update_weight_version":
            self.label = asked["new_version"]
        right = self.label == "-1" or self.weights[1] == int(self.label)
        assert self.paused or right or late, (path, self.weights, self.label)


class NumberLoader:
    """Loads "weights" that are the number of their version."""

    adapter = ""

    def __init__(self, version: int) -> None:
        self._version = version

    def stage(self, engine: Engine) -> int | None:
        """Return None."""
        return None

    def send(self, engine: Engine) -> None:
        """Replace the weights."""
        engine.post("/collective_rpc", self._version)  # type: ignore[arg-type]

    def label(self, engine: Engine, version: int) -> None:
        """Label them."""
        engine.label(str(version))


class Trainer:
    """A trainer with one engine. `script`: what happens at which of its calls; `takeover`: lets another one attach."""

    def __init__(
        self, model: Model, name: str, script: dict[int, str], takeover: Callable[[], None] = lambda: None
    ) -> None:
        model.epoch += 1
        self._model = model
        self._name = name
        self._epoch = model.epoch
        self._script = dict(script)
        self._calls = 0
        self._takeover = takeover
        self.engine = Engine(
            "http://e", httpx.Client(transport=httpx.MockTransport(self._answer), trust_env=False), "keep"
        )

    def publish(self, version: int) -> bool:
        """Load a version; return whether the engine has it. Raises `Fenced`, `Killed`."""
        self.engine.load(NumberLoader(version), version, self._confirm)
        return self.engine.behind is None

    def watch(self, version: int) -> None:
        """Load the version again if the engine lacks it."""
        if self.engine.lacks(version):
            self.publish(version)

    def _confirm(self) -> None:
        what = self._next()
        if what in ("lost", "unanswered", "error"):
            raise ServiceUnavailable("away")
        if self._epoch != self._model.epoch:
            raise Fenced("another trainer has the run")

    def _answer(self, request: httpx.Request) -> httpx.Response:
        model, path = self._model, request.url.path
        if path == "/weight_info":
            return httpx.Response(200, json={"weight_version": model.label})
        what = self._next()
        if what == "restart":
            model.restart()
            model.away = 2
        if model.away or what == "lost":
            model.away = max(0, model.away - 1)
            raise httpx.ConnectError("refused")
        if what == "error":
            return httpx.Response(500)
        model.call(path, request.content, self._name, late=self._epoch != model.epoch)
        if what == "unanswered":
            raise httpx.ReadError("reset")
        return httpx.Response(200)

    def _next(self) -> str | None:
        what = self._script.pop(self._calls, None)
        self._calls += 1
        if what == "kill":
            raise Killed
        if what == "takeover":
            self._takeover()
        return what


def happenings(*names: str) -> st.SearchStrategy[dict[int, str]]:
    """What happens at which call, at most three things."""
    return st.dictionaries(st.integers(0, CALLS), st.sampled_from(names), max_size=3)


@settings(max_examples=100, deadline=None)
@given(
    happenings("lost", "unanswered", "error", "restart", "kill"), happenings("lost", "unanswered", "error", "restart")
)
def test_one_trainer_and_its_successor_leave_no_wrong_label(first: dict[int, str], second: dict[int, str]) -> None:
    """Every call checks the label. In the end the engine has the weights of the trainer that is left."""
    model = Model()
    trainer = Trainer(model, "a", first)
    with contextlib.suppress(Killed):
        trainer.publish(1)
        trainer.watch(1)
        trainer.publish(2)
    successor = Trainer(model, "b", second)
    successor.publish(1)  # it resumed an older checkpoint, so its version 1 may have other weights
    for _ in range(ROUNDS):
        successor.watch(1)
    assert (model.weights, model.label, model.paused) == (("b", 1), "1", False)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, CALLS), happenings("unanswered", "error"), st.sampled_from([1, 2]))
def test_a_trainer_that_is_overtaken_at_any_call_does_not_keep_the_engine(
    at: int, faults: dict[int, str], version: int
) -> None:
    """The successor publishes its version at once, which may have the same number; its watch repairs what came late."""
    model = Model()
    successors: list[Trainer] = []

    def takeover() -> None:
        successors.append(Trainer(model, "b", faults))
        successors[0].publish(version)

    trainer = Trainer(model, "a", {at: "takeover"}, takeover)
    with contextlib.suppress(Fenced):
        trainer.publish(2)
    if not successors:
        takeover()
    for _ in range(ROUNDS):
        successors[0].watch(version)
    assert (model.weights, model.label, model.paused) == (("b", version), str(version), False)


@pytest.mark.parametrize("at", range(4))
def test_a_fenced_trainer_ends_before_the_next_load(at: int) -> None:
    """It never resumes an engine of its successor."""
    model = Model()
    trainer = Trainer(model, "a", {at: "takeover"}, lambda: setattr(model, "epoch", 2))
    with pytest.raises(Fenced):
        trainer.publish(2)
    assert model.paused == (at > 0)

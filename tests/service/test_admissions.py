"""Admission plug-ins: they see a whole group before it is stored, in a process beside the service."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replaybuf.errors import InvalidGroups, NoRoom
from replaybuf.plugins import entry_points
from replaybuf.service.run.append import admission_plugins
from replaybuf.service.run.append.group_check import Incoming
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.config import AdmissionSpec
from replaybuf.wire.config_patch import ConfigPatch
from replaybuf.wire.group import GroupJson, group_from_json
from tests import builders
from tests.conftest import RunClient, ServeProcess, group
from tests.led_run import on_a_run
from tests.plugin_site import write_plugins
from tests.service.test_races import write_directly
from tests.waiting import eventually, patience, until

Connect = Callable[[str, str], RunClient]
MODULE = '''
import os
import pathlib
import time

from replaybuf.admission import Admission, AdmissionOptions, Refusal, split_rollouts


class WordOptions(AdmissionOptions, frozen=True):
    word: str = "good"
    asked: str = ""


class Word(Admission[WordOptions]):
    """Admits groups of which each proof is the word; writes down the groups that it sees."""

    Options = WordOptions
    reasons = ("wrong_word",)
    requires = ("proofs",)

    def check(self, group):
        if self.options.asked:
            with open(self.options.asked, "a") as file:
                file.write(f"{group.group_id} {group.prompt_index}\\\\n")
        proofs = [rollout["proof"].decode() for rollout in split_rollouts(group)]
        if proofs[0] == "raise":
            raise KeyError("of the plug-in")
        if proofs[0] == "exit":
            os._exit(3)
        if proofs[0] == "undeclared":
            return Refusal("mood")
        if proofs[0] == "text":
            return "no"
        while proofs[0] == "hang":
            try:
                time.sleep(0.01)
            except BaseException:
                continue
        if set(proofs) != {self.options.word}:
            return Refusal("wrong_word", f"the proofs are {proofs}; needed: {self.options.word}")


class FirstRelease(Admission):
    """Refuses nothing and declares nothing."""

    def check(self, group):
        return None


class FileOptions(AdmissionOptions, frozen=True):
    path: str


class Loads(Admission[FileOptions]):
    """Reads a file when it is built."""

    Options = FileOptions

    def __init__(self, options):
        pathlib.Path(options.path).read_text()

    def check(self, group):
        return None


class Shouts(Admission):
    reasons = ("No!",)

    def check(self, group):
        return None
'''.replace("\\\\n", "\\n")
NAMES = {"word": "Word", "first": "FirstRelease", "loads": "Loads", "shouts": "Shouts"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plug-ins of this file."""
    folder = tmp_path_factory.mktemp("site")
    write_plugins(folder, "word_admission", MODULE, {"replaybuf.admissions": NAMES})
    return folder


@pytest.fixture(scope="module")
def guarded(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A service with the plug-ins; each test creates its own runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
        server = ServeProcess(tmp_path_factory.mktemp("guarded") / "data").start()
        yield server
        server.end()


def proven(group_id: str, *proofs: str, **fields: Any) -> dict[str, Any]:
    """Build a group whose rollouts have these proofs."""
    made = group(group_id, rollouts=len(proofs), **fields)
    for rollout, proof in zip(made["rollouts"], proofs, strict=True):
        rollout["proof"] = base64.b64encode(proof.encode()).decode()
    return made


def append(run: RunClient, *groups: dict[str, Any]) -> list[dict[str, Any]]:
    """Append as a producer does: again after 429."""
    answer = eventually(
        lambda: run.post("groups", groups=list(groups)), 60.0, wanted=lambda answer: answer.status_code != 429
    )
    assert answer.status_code in (200, 422), answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


def reasons(results: list[dict[str, Any]]) -> list[str]:
    """Return the status of stored groups, the reason of others."""
    return [result.get("reason") or result["status"] for result in results]


def checkers(service: ServeProcess) -> list[int]:
    """List the processes that run plug-ins of a service."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if b"admission_process" in (folder / "cmdline").read_bytes() and parent in (service.pid, 1):
                pids.append(int(folder.name))
    return pids


def test_a_group_is_stored_or_refused_with_the_plug_ins_reason_and_counted(
    guarded: ServeProcess, connect: Connect, tmp_path: Path
) -> None:
    """Whatever a plug-in does wrong costs the group alone: it raises, answers nonsense, or ends its process."""
    run = connect(guarded.url, "refusals")
    assert run.put(batch={"groups_per_batch": 1}, admissions=[{"name": "word"}, {"name": "first"}]).status_code == 201
    results = append(run, proven("a", "good", "good"), proven("b", "good", "bad"), group("c"), proven("d", "raise"))
    assert reasons(results) == ["stored", "wrong_word", "missing_columns", "admission_fault"]
    assert "['good', 'bad']; needed: good" in results[1]["detail"]
    assert "lacks proofs" in results[2]["detail"] and "KeyError('of the plug-in')" in results[3]["detail"]
    results = append(run, proven("e", "undeclared"), proven("f", "text"), proven("g", "exit"), proven("h", "good"))
    assert reasons(results) == ["admission_fault", "admission_fault", "admission_fault", "stored"]
    assert "'mood'" in results[0]["detail"] and "'no'" in results[1]["detail"] and "ended" in results[2]["detail"]
    state = run.state()["groups"]
    assert (state["stored"], state["live"]) == (2, 2)
    assert state["rejected"] == {"wrong_word": 1, "missing_columns": 1, "admission_fault": 4}
    metrics = run.http.get("/metrics").text
    for sample in (
        'groups_dropped_total{reason="wrong_word",run="refusals"} 1.0',
        'admission_seconds_count{admission="word",run="refusals"} 8.0',
        'admission_seconds_count{admission="first",run="refusals"} 2.0',
        'admission_waiting{run="refusals"} 0.0',
        'admission_deferred_total{run="refusals"} 0.0',
    ):
        assert f"replaybuf_{sample}" in metrics
    assert run.batch(0, run.attach()).status_code == 200


def test_a_plug_in_sees_only_new_groups_that_pass_all_other_checks(
    guarded: ServeProcess, connect: Connect, tmp_path: Path
) -> None:
    """With the id and the prompt index that their ticket gives them."""
    run, asked = connect(guarded.url, "asked"), tmp_path / "asked"
    run.put(batch={"groups_per_batch": 1}, admissions=[{"name": "word", "options": {"asked": str(asked)}}])
    (ticket,) = run.post("tickets", producer="p", count=1).json()["tickets"]
    ticketed = proven("", "good") | {"group_id": None, "ticket": ticket["ticket"]}
    assert reasons(append(run, ticketed, proven("new", "good", version=9))) == ["stored", "version_above_published"]
    assert reasons(append(run, ticketed, proven("b", "bad"), proven("c", "good"))) == [
        "duplicate",
        "wrong_word",
        "stored",
    ]
    assert asked.read_text().splitlines() == ["p0 0", "b None", "c None"]


def test_a_plug_in_that_hangs_costs_its_group_the_time_limit_and_nobody_else_anything(
    guarded: ServeProcess, connect: Connect
) -> None:
    """Its process is killed; other calls are answered meanwhile, and the next group gets a new process."""
    run, other = connect(guarded.url, "hangs"), connect(guarded.url, "beside")
    run.put(batch={"groups_per_batch": 1}, admissions=[{"name": "word", "timeout_s": 5.0}])
    other.put(batch={"groups_per_batch": 1})
    before = checkers(guarded)
    assert reasons(append(run, proven("a", "good"))) == ["stored"]
    (process,) = {*checkers(guarded)}.difference(before)
    results: list[dict[str, Any]] = []
    hanging = threading.Thread(target=lambda: results.extend(append(run, proven("b", "hang"))))
    hanging.start()
    assert reasons(other.append(group("a"), group("b"))) == ["stored", "stored"]
    assert run.state()["groups"]["stored"] == 1 and hanging.is_alive()
    hanging.join(60.0)
    assert reasons(results) == ["admission_timeout"] and "within 5 s" in results[0]["detail"]
    eventually(lambda: process not in checkers(guarded), 5.0)
    assert reasons(append(run, proven("c", "good"))) == ["stored"]
    assert run.state()["groups"]["rejected"] == {"admission_timeout": 1}
    metrics = run.http.get("/metrics").text
    named = 'replaybuf_admission_seconds_{}{{admission="word",run="hangs"{}}} '
    assert named.format("count", "") + "3.0" in metrics
    sums = [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith(named.format("sum", ""))]
    assert float(*sums) >= 5.0, "the group that hangs took its time limit"


@pytest.mark.parametrize(
    ("chosen", "detail"),
    [
        ({"name": "nobody"}, "admission is 'nobody'; installed: first, loads, shouts, word"),
        ({"name": "word", "options": {"words": 1}}, "valid options: word: text"),
        ({"name": "loads"}, "missing required options: path"),
        ({"name": "shouts"}, "reasons of admission 'shouts' is ('No!',)"),
        ({"name": "word", "timeout_s": 601}, "timeout_s"),
    ],
)
def test_an_unknown_plug_in_or_option_is_refused(
    guarded: ServeProcess, connect: Connect, chosen: dict[str, Any], detail: str
) -> None:
    answer = connect(guarded.url, "never").put(batch={"groups_per_batch": 1}, admissions=[chosen])
    assert answer.status_code in (400, 422) and detail in answer.json()["detail"]


def test_plug_ins_change_live_and_survive_a_restart_of_the_service(guarded: ServeProcess, connect: Connect) -> None:
    """What was stored stays stored; a process of a killed service ends."""
    run = connect(guarded.url, "changes")
    run.put(batch={"groups_per_batch": 1})
    assert reasons(append(run, proven("a", "other"))) == ["stored"]
    config = run.http.patch(run.path, json={"admissions": [{"name": "word"}]}).json()["config"]
    assert config["admissions"] == [{"name": "word", "options": {"word": "good", "asked": ""}, "timeout_s": 10.0}]
    assert reasons(append(run, proven("b", "other"), proven("c", "good"))) == ["wrong_word", "stored"]
    changed = run.http.patch(run.path, json={"admissions": [{"name": "word", "options": {"word": "other"}}]})
    assert changed.status_code == 200
    assert reasons(append(run, proven("b", "other"), proven("d", "good"))) == ["stored", "wrong_word"]
    before = checkers(guarded)
    assert before
    guarded.kill()
    guarded.start()
    eventually(lambda: not set(before) & set(checkers(guarded)), 10.0)
    run = connect(guarded.url, "changes")
    assert reasons(append(run, proven("e", "good"), proven("f", "other"))) == ["wrong_word", "stored"]
    assert run.http.patch(run.path, json={"admissions": []}).status_code == 200
    assert reasons(append(run, proven("g", "anything"))) == ["stored"]
    state = run.state()["groups"]
    assert (state["live"], state["dead_lettered"]) == (5, 0)


def test_groups_written_directly_become_dead_letters(guarded: ServeProcess, connect: Connect) -> None:
    """While the service runs, while it does not, and those from before the plug-ins; appended groups stay live."""
    run = connect(guarded.url, "direct")
    run.put(batch={"groups_per_batch": 9})

    def write(group_id: str) -> None:
        async def main() -> None:
            store = await Store.open(f"unix://{guarded.valkey_socket}")
            try:
                await write_directly(store, "direct", builders.group(group_id=group_id))
            finally:
                await store.close()

        asyncio.run(main())

    def counted() -> tuple[int, int]:
        groups = connect(guarded.url, "direct").state()["groups"]
        return groups["live"], groups["dead_lettered"]

    assert reasons(append(run, group("appended"))) == ["stored"]
    write("before")
    eventually(counted, 30.0, wanted=lambda counts: counts == (2, 0))
    assert run.http.patch(run.path, json={"admissions": [{"name": "word"}]}).status_code == 200
    assert counted() == (1, 1)
    write("during")
    eventually(counted, 30.0, wanted=lambda counts: counts == (1, 2))
    guarded.kill()
    write("away")
    guarded.start()
    eventually(counted, 30.0, wanted=lambda counts: counts == (1, 3))
    letters = connect(guarded.url, "direct").get("dead-letters").json()["dead_letters"]
    assert {letter["group_id"]: letter["reason"] for letter in letters} == dict.fromkeys(
        ("before", "during", "away"), "not_admitted"
    )


def test_plug_ins_that_cannot_be_built_lose_no_group(guarded: ServeProcess, connect: Connect, tmp_path: Path) -> None:
    """The producer gets 503 with the cause, and its group is stored once the cause is gone."""
    run, path = connect(guarded.url, "unbuilt"), tmp_path / "model"
    run.put(batch={"groups_per_batch": 1}, admissions=[{"name": "loads", "options": {"path": str(path)}}])
    refused = eventually(
        lambda: run.post("groups", groups=[group("a")]), 60.0, wanted=lambda answer: answer.status_code == 503
    )
    assert "admission 'loads' raised FileNotFoundError" in refused.json()["detail"]
    assert int(refused.headers["retry-after"]) >= 1
    path.write_text("weights")
    stored = eventually(
        lambda: run.post("groups", groups=[group("a")]), 60.0, wanted=lambda answer: answer.status_code == 200
    )
    assert reasons(stored.json()["results"]) == ["stored"]
    assert run.state()["groups"]["rejected"] == {}


# ---------------------------------------------------------------------- time and queue, in this process


@pytest.fixture
def here(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plug-ins for runs that this process leads, and for their processes."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    entry_points.installed.cache_clear()
    yield
    entry_points.installed.cache_clear()


def wire(group_id: str, proof: bytes) -> GroupJson:
    return builders.wire_group(builders.rollout(proof=proof), group_id=group_id)


async def send(run: Run, *wires: GroupJson) -> list[str]:
    """Append; return statuses and reasons."""
    try:
        results = await run.appends.append(builders.arriving(Incoming(group_from_json(body)) for body in wires))
    except InvalidGroups as error:
        results = error.results
    return [result.reason or result.status for result in results]


@pytest.mark.usefixtures("here")
def test_a_request_without_time_for_all_its_groups_goes_on_where_it_stopped(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Groups that were admitted are stored, those that were refused are not checked again."""
    asked = tmp_path / "asked"
    spec = AdmissionSpec(name="word", options={"asked": str(asked)})
    wires = [wire("a", b"good"), wire("b", b"bad"), wire("c", b"good"), wire("d", b"good")]

    async def work(_: Store, run: Run) -> None:
        await send(run, wire("first", b"good"))  # the process runs now
        check, left = admission_plugins.AdmissionPlugins._check, [2]

        async def timed(self: Any, item: Any, specs: Any, until_s: float) -> Any:
            left[0] -= 1
            return await check(self, item, specs, until_s if left[0] >= 0 else 0.0)

        monkeypatch.setattr(admission_plugins.AdmissionPlugins, "_check", timed)
        with pytest.raises(NoRoom, match="did not begin within") as caught:
            await send(run, *wires)
        assert caught.value.retry_after_s
        assert run.state.stored == 2
        left[0] = 9
        assert await send(run, *wires) == ["duplicate", "wrong_word", "stored", "stored"]
        run.close()

    on_a_run(server, work, admissions=[spec])
    assert [line.split()[0] for line in asked.read_text().splitlines()] == ["first", "a", "b", "c", "d"]


@pytest.mark.usefixtures("here")
def test_a_full_queue_is_answered_at_once(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 429 and a time to retry; what waits is checked in turn."""
    monkeypatch.setattr(admission_plugins, "MOST_WAITING", 2)
    monkeypatch.setattr(admission_plugins, "CHECKING_S", 120.0)
    spec = AdmissionSpec(name="word", timeout_s=2.0 * patience())

    async def work(_: Store, run: Run) -> None:
        await send(run, wire("first", b"good"))
        hanging = asyncio.create_task(send(run, wire("hangs", b"hang")))
        await until(lambda: run.admission_plugins._turn.locked())
        waiting = [asyncio.create_task(send(run, wire(name, b"good"))) for name in "ab"]
        await until(lambda: run.admission_plugins.waiting == 2)
        with pytest.raises(NoRoom, match="2 requests wait") as caught:
            await send(run, wire("c", b"good"))
        assert caught.value.retry_after_s and not hanging.done()
        assert run.admission_plugins.deferred == 1
        assert await hanging == ["admission_timeout"]
        assert [await call for call in waiting] == [["stored"], ["stored"]]
        run.close()

    on_a_run(server, work, admissions=[spec])


@pytest.mark.usefixtures("here")
def test_a_change_during_a_check_sends_the_groups_back(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is stored only after the plug-ins in force have seen it."""
    spec = AdmissionSpec(name="word")

    async def work(_: Store, run: Run) -> None:
        checking, go_on = asyncio.Event(), asyncio.Event()
        check = run.admission_plugins.check

        async def slowly(*arguments: Any) -> Any:
            checking.set()
            await go_on.wait()
            return await check(*arguments)

        monkeypatch.setattr(run.admission_plugins, "check", slowly)
        appended = asyncio.create_task(send(run, wire("a", b"good")))
        await checking.wait()
        await run.patch(ConfigPatch(admissions=[AdmissionSpec(name="word", options={"word": "other"})]))
        go_on.set()
        with pytest.raises(NoRoom, match="have changed"):
            await appended
        assert await send(run, wire("a", b"good")) == ["wrong_word"]
        run.close()

    on_a_run(server, work, admissions=[spec])

"""Exports: what DuckDB and pandas read is what was stored; a new run from an export serves the recorded batches."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from safetensors.numpy import load

from replaybuf import Client
from replaybuf.cli.main import main
from replaybuf.client.exports import export as exporting
from replaybuf.client.exports.folder import MANIFEST
from replaybuf.kernel.decide.cursors import MOST_CURSORS
from tests.conftest import RunClient, ServeProcess, group


@pytest.fixture
def trained(run: RunClient) -> RunClient:
    """A run that trained two steps of different sizes by a token budget; one group is left."""
    strategy = {"name": "one-step-off-policy", "options": {"max_staleness": 9}}
    run.put(batch={"tokens_per_batch": 40, "seq_len": 64}, strategy=strategy)
    run.append(group("long", tokens=12), group("a", tokens=8, metadata={"env": "math"}), group("b", tokens=9))
    epoch = run.attach()
    run.train(epoch, range(1))
    spans = group("c", 1, tokens=9)
    for rollout in spans["rollouts"]:
        rollout |= {
            "version_spans": [[1, 0, 7]],
            "rewards": {"correct": 0.25},
            "finish_reason": "stop",
            "proof": "AP8=",
        }
    assert {result["status"] for result in run.append(spans, group("d", 1, tokens=10), group("e", 1, tokens=10))} == {
        "stored"
    }
    run.train(epoch, range(1, 2))
    return run


def command(capsys: pytest.CaptureFixture[str], *words: Any) -> dict[str, int]:
    """Run a command and return what it prints as JSON."""
    main([*map(str, words), "--json"])
    counts: dict[str, int] = json.loads(capsys.readouterr().out)
    return counts


def used(run: RunClient) -> list[list[str]]:
    return [[group["group_id"] for group in run.get(f"batches/{step}/record").json()["groups"]] for step in range(2)]


def test_duckdb_and_pandas_read_what_was_stored(
    service: ServeProcess, trained: RunClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pandas  # 0.4 s, which each worker that collects this file would take

    folder = tmp_path / "out"
    counts = command(capsys, "export", trained.run, "--to", folder, "--url", service.url)
    assert (counts["groups"], counts["rollouts"], counts["without_rollouts"]) == (6, 12, 0)
    steps = duckdb.sql(
        f"select step, list(group_id order by number) from read_parquet('{folder}/groups/*/*.parquet', "
        "hive_partitioning=true) group by step order by step"
    ).fetchall()
    first, second = (sorted(names) for names in used(trained))
    assert [(step, sorted(names)) for step, names in steps[1:]] == [(0, first), (1, second)]
    assert steps[0][0] == -1 and not {*first, *second}.intersection(steps[0][1])
    frame = pandas.read_parquet(folder / "rollouts")
    stored = trained.get("groups/c").json()["rollouts"]
    rows = frame[frame.group_id == "c"].sort_values("rollout").to_dict("records")
    for row, rollout in zip(rows, stored, strict=True):
        for name in ("prompt_ids", "completion_ids", "inference_logprobs"):
            assert list(row[name]) == rollout[name]
        assert (row["reward"], row["advantage"], row["finish_reason"]) == (
            rollout["reward"],
            rollout["advantage"],
            rollout["finish_reason"],
        )
    ledger = pandas.read_parquet(folder / "ledger").sort_values("entry")
    assert [json.loads(text) for text in ledger.record] == trained.get("ledger").json()["records"]
    assert trained.get("cursors").json() == {"cursors": []}


def test_a_run_from_an_export_alone_serves_the_recorded_batches(
    service: ServeProcess, trained: RunClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, name = tmp_path / "out", f"{trained.run}-again"
    command(capsys, "export", trained.run, "--to", folder, "--url", service.url)
    words = ("import", name, "--from", folder, "--replay-order", "--url", service.url)
    total = sum(map(len, used(trained)))
    assert command(capsys, *words) == {"stored": total}
    assert command(capsys, *words) == {"duplicate": total}
    again = RunClient(service.url, name)
    with again.http:
        epoch = again.attach()
        bodies = again.train(epoch, range(2))
        assert used(again) == used(trained)
        assert again.batch(2, epoch).status_code == 410
        recorded_epoch = trained.attach()
        for step, body in enumerate(bodies):
            recorded = trained.batch(step, recorded_epoch)
            assert recorded.status_code == 200
            columns, expected = load(body), load(recorded.content)
            for column in ("0.input_ids", "0.advantages", "0.inference_logprobs"):
                assert columns[column].tolist() == expected[column].tolist()


def test_a_warm_start_keeps_ids_rewards_and_the_recorded_version(
    service: ServeProcess, trained: RunClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, name = tmp_path / "out", f"{trained.run}-warm"
    command(capsys, "export", trained.run, "--to", folder, "--url", service.url)
    assert command(capsys, "import", name, "--from", folder, "--url", service.url) == {"stored": 6}
    with Client(service.url, name) as client:
        groups = client.list_groups().groups
        assert [group.group_id for group in groups] == ["long", "a", "b", "c", "d", "e"]
        assert {group.policy_version for group in groups} == {0}
        imported, original = client.get_group("c"), trained.get("groups/c").json()
        assert imported.metadata == {"imported": {"run": trained.run, "policy_version": 1, "policy_version_max": 1}}
        assert [rollout.reward for rollout in imported.rollouts or ()] == [
            rollout["reward"] for rollout in original["rollouts"]
        ]
        assert [rollout.proof for rollout in imported.rollouts or ()] == [b"\x00\xff"] * 2
        assert client.get_group("a").metadata == {"env": "math"}


def test_an_export_that_fails_leaves_nothing_behind(
    service: ServeProcess, trained: RunClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "_write_ledger", fail)
    with pytest.raises(SystemExit):
        main(["export", trained.run, "--to", str(tmp_path / "out"), "--url", service.url])
    assert list(tmp_path.iterdir()) == [] and trained.get("cursors").json() == {"cursors": []}


EXPORTER = """
import sys
from pathlib import Path
from replaybuf import Client
from replaybuf.client.exports.export import export_run

def stand_still(done: int, every: int) -> None:
    print("reading", flush=True)
    sys.stdin.read()

with Client(sys.argv[1], sys.argv[2]) as client:
    export_run(client, sys.argv[2], Path(sys.argv[3]), stand_still)
"""


@contextlib.contextmanager
def reading(run: RunClient, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run an export in a process that stands still after its first page, until its input ends."""
    words = [sys.executable, "-c", EXPORTER, str(run.http.base_url), run.run, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "reading\n"
        try:
            yield process
        finally:
            process.kill()


def cursors(run: RunClient) -> list[str]:
    return [cursor["name"] for cursor in run.get("cursors").json()["cursors"]]


def test_a_killed_export_is_removed_by_the_next_one_to_the_same_folder(
    service: ServeProcess, trained: RunClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cursor would keep bytes for ever. An export to another folder changes nothing."""
    folder = tmp_path / "out"
    with reading(trained, folder) as process:
        process.kill()
    (left,) = cursors(trained)
    command(capsys, "export", trained.run, "--to", tmp_path / "ou", "--url", service.url)
    assert cursors(trained) == [left]
    assert command(capsys, "export", trained.run, "--to", folder, "--url", service.url)["groups"] == 6
    assert cursors(trained) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ou", "out"]
    assert sorted(path.name for path in folder.iterdir()) == ["groups", "ledger", MANIFEST, "rollouts"]


def test_an_export_that_still_runs_keeps_its_cursor(
    service: ServeProcess, trained: RunClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    with reading(trained, folder) as process:
        (name,) = cursors(trained)
        command(capsys, "export", trained.run, "--to", folder, "--url", service.url)
        assert cursors(trained) == [name]
        shutil.move(folder, tmp_path / "first")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
    assert cursors(trained) == [] and sorted(path.name for path in tmp_path.iterdir()) == ["first", "out"]


def test_killed_exports_to_other_folders_do_not_use_up_the_cursors(
    service: ServeProcess, trained: RunClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All cursors are taken, two by killed exports. The next one waits until those are idle, and takes a place."""
    with Client(service.url, trained.run) as client:
        for number in range(MOST_CURSORS - 2):
            client.read_cursor(f"named-{number}", "stored", 1)
    named = set(cursors(trained))
    for number in range(2):
        with reading(trained, tmp_path / f"killed-{number}") as process:
            process.kill()
    assert len(cursors(trained)) == MOST_CURSORS
    assert command(capsys, "export", trained.run, "--to", tmp_path / "out", "--url", service.url)["groups"] == 6
    assert len(named.intersection(cursors(trained))) == len(cursors(trained)) - 1 == MOST_CURSORS - 2


def test_wrong_folders_get_one_clear_answer(
    service: ServeProcess, trained: RunClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    command(capsys, "export", trained.run, "--to", folder, "--url", service.url)

    def fails(*words: Any) -> str:
        with pytest.raises(SystemExit):
            main([*map(str, words), "--url", service.url])
        return capsys.readouterr().err

    assert "exists; export to a folder that does not" in fails("export", trained.run, "--to", folder)
    assert "is not an export" in fails("import", "other", "--from", tmp_path)
    damaged = next((folder / "rollouts").glob("*/*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert "does not match the manifest" in fails("import", f"{trained.run}-x", "--from", folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 2}))
    assert "has format 2; this release reads format 1" in fails("import", "other", "--from", folder)


def test_a_run_with_adapters_cannot_be_replayed_in_order(
    service: ServeProcess, run: RunClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches with shares of several adapters are no list of sizes: refused before a run exists. A warm start works."""
    adapters = {"code": {"groups_per_batch": 1}, "math": {"groups_per_batch": 1}}
    run.put(batch={"tokens_per_batch": 40, "seq_len": 64}, adapters=adapters)
    run.append(group("a", adapter="code"), group("b", adapter="math"))
    epoch = run.attach()
    assert run.batch(0, epoch).status_code == 200
    folder, name = tmp_path / "out", f"{run.run}-again"
    command(capsys, "export", run.run, "--to", folder, "--url", service.url)
    words = ("import", name, "--from", str(folder), "--url", service.url)
    with pytest.raises(SystemExit):
        main([*words, "--replay-order"])
    assert "adapters ['code', 'math']" in capsys.readouterr().err
    assert run.http.get(f"/v1/runs/{name}").status_code == 404
    assert command(capsys, *words) == {"stored": 2}

"""Tables: sampled rollouts with a value for every token, as Parquet and as a page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from replaybuf.errors import Fenced, Invalid, MissingExtra, ServiceUnavailable
from replaybuf_trainer.losses import BatchTotals, load_objective
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.models.packed_forward import packed_forward
from replaybuf_trainer.option_groups import TablesOptions
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.ownership import Confirm
from replaybuf_trainer.reading import TensorBatch
from replaybuf_trainer.report.tables import page
from replaybuf_trainer.report.tables.folder import RecordedStep, TableFolder
from replaybuf_trainer.report.tables.samples import TOKEN_COLUMNS, Sample, StepSamples, TokenRecord, draw_samples
from tests.conftest import RunClient, group
from tests.trainer.batches import logprobs_alone, packed, rollouts

HOSTILE = '</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- {{SCRIPT}} "\u2028 😀\x00'


def spelled(ids: Any) -> str:
    """Write ids as words."""
    return " ".join(f"t{token}" for token in ids)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def recorded(models: Path, batch: TensorBatch) -> tuple[TokenRecord, float]:
    """Compute the loss of a batch in two forward passes; return the record and the loss."""
    model, objective, record = load_model(models / "a"), load_objective("grpo"), TokenRecord()
    totals = BatchTotals(batch.meta.batch_loss_tokens, batch.meta.batch_rollouts)
    losses = [objective.value(packed_forward(model, rows), totals, record).detach() for _, rows in batch.parts(1)]
    loss = float(torch.stack(losses).sum())
    return record, loss


@pytest.fixture
def step(models: Path) -> tuple[TensorBatch, TokenRecord, float]:
    """A batch of four rollouts in two rows and a row without any, and what a loss recorded of it."""
    batch = packed(rollouts(4, seed=3), [[2, 0], [], [1, 3]])
    return batch, *recorded(models, batch)


def test_every_token_has_the_values_that_a_forward_pass_of_its_rollout_alone_gives(
    models: Path, step: tuple[TensorBatch, TokenRecord, float]
) -> None:
    """Trainer logprob, ratio and columns of the batch stand at the token they belong to; masked tokens have none."""
    batch, record, loss = step
    samples = draw_samples(batch, record, 4, 0, spelled)
    model = load_model(models / "a")
    assert [sample.rollout for sample in samples] == [2, 0, 1, 3]
    for sample in samples:
        rollout = rollouts(4, seed=3)[sample.rollout]
        mask = np.array(rollout.completion_mask, bool)
        tokens = sample.tokens
        length = len(
            tokens["token_id"]
        )  # the batch has no lengths: masked tokens before the first one are the prompt's
        assert tokens["token_id"].tolist() == rollout.completion_ids[-length:]
        assert sample.prompt_ids.tolist() + tokens["token_id"].tolist() == rollout.prompt_ids + rollout.completion_ids
        mask = mask[-length:]
        assert tokens["loss_mask"].tolist() == mask.tolist()
        alone = logprobs_alone(model, rollout).gather(1, torch.tensor(rollout.completion_ids)[:, None]).squeeze(1)
        expected = np.where(mask, alone.detach().numpy()[-length:], np.nan)
        engine = np.where(mask, np.array(rollout.inference_logprobs)[-length:], np.nan)
        np.testing.assert_allclose(tokens["trainer_logprob"], expected, atol=1e-5)
        np.testing.assert_allclose(tokens["engine_logprob"], engine, rtol=1e-6)
        np.testing.assert_allclose(tokens["difference"], expected - engine, atol=1e-5)
        np.testing.assert_allclose(tokens["ratio"], np.exp(expected - engine), rtol=1e-4)
        assert np.isnan(tokens["old_logprob"]).all() and not np.isnan(tokens["ref_logprob"][mask]).any()
        assert sample.advantage == pytest.approx(rollout.advantage)
    assert sum(np.nansum(sample.tokens["loss_share"]) for sample in samples) == pytest.approx(loss, rel=1e-4)


def test_the_same_rollouts_are_drawn_for_the_same_seed_and_step(
    step: tuple[TensorBatch, TokenRecord, float],
) -> None:
    batch, record, _ = step

    def drawn(seed: int) -> list[int]:
        return [sample.rollout for sample in draw_samples(batch, record, 2, seed, spelled)]

    assert drawn(0) == drawn(0) and len(drawn(0)) == 2
    assert len({tuple(drawn(seed)) for seed in range(8)}) > 1


def test_a_record_of_another_batch_is_rejected(models: Path, step: tuple[TensorBatch, TokenRecord, float]) -> None:
    """Values would stand at the wrong tokens."""
    with pytest.raises(ValueError, match=r"the batch has \d+ loss tokens, the record \d+"):
        draw_samples(packed(rollouts(4, seed=4), [[0, 1], [2, 3]]), step[1], 4, 0, spelled)


def options(tmp_path: Path, model: Path, keep: int = 20, **fields: Any) -> TrainOptions:
    """Options of a trainer with tables, of which the newest `keep` stay."""
    tables = TablesOptions(dir=str(tmp_path / "tables"), keep=keep)
    settings: dict[str, Any] = {"url": "http://127.0.0.1:1", "run": "r", "tables": 2, "tables_options": tables}
    return TrainOptions(model=model, **settings | fields)


def test_a_folder_per_step_has_a_parquet_file_and_a_page(
    tmp_path: Path, models: Path, step: tuple[TensorBatch, TokenRecord, float]
) -> None:
    """One row per rollout, with lists that DuckDB and pandas read; texts come from the tokenizer of the model."""
    batch, record, _ = step
    TableFolder(options(tmp_path, models / "a"), lambda: None).write(RecordedStep(batch, record))
    (folder,) = (tmp_path / "tables").iterdir()
    assert folder.name == "step-000000"
    table = pq.read_table(folder / "samples.parquet")
    assert table.schema.metadata[b"loss"] == b"grpo"
    for row in table.to_pylist():
        assert len(row["completion"]) > 0 and "".join(row["token_texts"]) == row["completion"]
        assert len(row["ratio"]) == len(row["token_ids"]) == len(row["loss_mask"])
        assert [value is None for value in row["ratio"]] == [not mask for mask in row["loss_mask"]]
    assert "samples.parquet" in (folder / "index.html").read_text()


def test_each_rollout_has_its_reward_parts_as_the_service_stores_them(
    run: RunClient, tmp_path: Path, models: Path, step: tuple[TensorBatch, TokenRecord, float]
) -> None:
    """A batch body has only their means. A token that may not read groups leaves them out."""
    batch, record, _ = step
    assert run.put(batch={"groups_per_batch": 1}).status_code == 201
    stored = group(batch.meta.group_ids[0], rollouts=4)
    for number, rollout in enumerate(stored["rollouts"]):
        rollout["rewards"] = {"format": number / 10, "answer": number}
    assert run.append(stored)[0]["status"] == "stored"
    made = TableFolder(options(tmp_path, models / "a", url=str(run.http.base_url), run=run.run, tables=4), lambda: None)
    made.write(RecordedStep(batch, record))
    made.close()
    rows = pq.read_table(tmp_path / "tables" / "step-000000" / "samples.parquet").to_pylist()
    assert {row["rollout"]: dict(row["reward_parts"])["answer"] for row in rows} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert '"format":0.3' in (tmp_path / "tables" / "step-000000" / "index.html").read_text()


def test_the_newest_steps_stay_and_steps_after_a_resume_go(
    tmp_path: Path, models: Path, step: tuple[TensorBatch, TokenRecord, float]
) -> None:
    _, record, _ = step
    folder = TableFolder(options(tmp_path, models / "a", keep=2), lambda: None)
    kept = []
    for number in (0, 1, 2, 3, 2):
        batch = packed(rollouts(4, seed=3), [[2, 0], [], [1, 3]], step=number)
        folder.write(RecordedStep(batch, record))
        kept.append(sorted(int(path.name[-6:]) for path in (tmp_path / "tables").iterdir()))
    assert kept == [[0], [0, 1], [1, 2], [2, 3], [2]]


def test_old_steps_are_chosen_by_number(
    tmp_path: Path, models: Path, step: tuple[TensorBatch, TokenRecord, float]
) -> None:
    """Step 1,000,000 comes after 999,999, and folders that were moved aside stay."""
    _, record, _ = step
    folder = TableFolder(options(tmp_path, models / "a", keep=2), lambda: None)
    for name in ("step-999998", "step-999999", "step-000007.old", "step-best"):
        (tmp_path / "tables" / name).mkdir()
    folder.write(RecordedStep(packed(rollouts(4, seed=3), [[2, 0], [], [1, 3]], step=1_000_000), record))
    names = sorted(path.name for path in (tmp_path / "tables").iterdir())
    assert names == ["step-000007.old", "step-1000000", "step-999999", "step-best"]


def test_a_fenced_trainer_leaves_the_tables_of_its_successor(
    tmp_path: Path, models: Path, step: tuple[TensorBatch, TokenRecord, float]
) -> None:
    """It replaces no table of its step and deletes none, although all are of other steps than its own."""
    _, record, _ = step

    def fenced() -> None:
        raise Fenced("another trainer has the run")

    def away() -> None:
        raise ServiceUnavailable("the service does not answer")

    def write(number: int, confirm: Confirm) -> None:
        batch = packed(rollouts(4, seed=3), [[2, 0], [], [1, 3]], step=number)
        TableFolder(options(tmp_path, models / "a", keep=2), confirm).write(RecordedStep(batch, record))

    for number in (1, 2):
        write(number, lambda: None)
    unfinished = tmp_path / "tables" / ".step-000003" / "samples.parquet"
    unfinished.parent.mkdir()
    unfinished.write_bytes(b"half")
    written = contents(tmp_path / "tables")
    for number in (0, 1, 3):
        with pytest.raises(Fenced):
            write(number, fenced)
    with pytest.raises(FileExistsError):
        write(1, away)
    assert contents(tmp_path / "tables") == written
    write(3, away)
    assert contents(tmp_path / "tables").items() > written.items()
    write(3, lambda: None)
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == ["step-000002", "step-000003"]


def test_a_trainer_that_is_fenced_after_an_answer_leaves_the_tables_of_its_successor(
    tmp_path: Path, models: Path, step: tuple[TensorBatch, TokenRecord, float]
) -> None:
    """Right after the answer the successor goes back to step 1, and writes step 2."""
    _, record, _ = step
    theirs = [tmp_path / "tables" / name for name in ("step-000001", ".step-2")]

    def confirm() -> None:
        if theirs[0].exists():
            raise Fenced("another trainer has the run")
        for path in theirs:
            path.mkdir()

    folder = TableFolder(options(tmp_path, models / "a", keep=1), confirm)
    with pytest.raises(Fenced):
        folder.write(RecordedStep(packed(rollouts(4, seed=3), [[2, 0], [], [1, 3]], step=3), record))
    assert all(path.is_dir() for path in theirs)


def test_a_model_without_a_tokenizer_shows_ids(
    tmp_path: Path, step: tuple[TensorBatch, TokenRecord, float], caplog: pytest.LogCaptureFixture
) -> None:
    batch, record, _ = step
    TableFolder(options(tmp_path, tmp_path), lambda: None).write(RecordedStep(batch, record))
    (row, _) = pq.read_table(tmp_path / "tables" / "step-000000" / "samples.parquet").to_pylist()
    assert row["token_texts"] == [str(token) for token in row["token_ids"]]
    assert "tables show token ids instead of text" in caplog.text


def test_a_folder_that_cannot_be_written_is_rejected_at_once(tmp_path: Path, models: Path) -> None:
    (tmp_path / "tables").touch()
    with pytest.raises(Invalid, match=r"folder \S+/tables of --tables-options cannot be written"):
        TableFolder(options(tmp_path, models / "a"), lambda: None)


def test_without_pyarrow_the_error_names_the_extra(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install 'replaybuf\[tables\]'"):
        TableFolder(options(tmp_path, models / "a"), lambda: None)


# ---------------------------------------------------------------------- the page


def sample(tokens: int = 3, text: str = "x", prompt: str = "p") -> Sample:
    """A sample whose tokens all have the same text."""
    values = {name: np.full(tokens, 0.5, np.float32) for name in TOKEN_COLUMNS}
    return Sample(
        group_id=text,
        rollout=0,
        adapter=text,
        policy_version=0,
        staleness=0,
        times_sampled=1,
        reward=float("nan"),
        advantage=float("inf"),
        prompt_ids=np.zeros(1, np.int32),
        prompt=prompt,
        completion=text * tokens,
        token_texts=[text] * tokens,
        tokens=values | {"token_id": np.zeros(tokens, np.int32), "loss_mask": np.ones(tokens, bool)},
    )


def page_of(*samples: Sample, run: str = "r") -> str:
    """Render a page."""
    return page.page(StepSamples(run=run, step=3, version=3, loss="grpo", reward_parts={run: 0.5}, samples=[*samples]))


def data_of(text: str) -> Any:
    """Read the data of a page as its script does."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return msgspec.json.decode(data)


def test_hostile_texts_stay_data() -> None:
    """No text can end the element that holds the data; the page is the same around it, and the data are exact."""
    text = page_of(sample(text=HOSTILE, prompt=HOSTILE), run=HOSTILE)
    data = data_of(text)
    assert (data["run"], data["samples"][0]["texts"][0], data["samples"][0]["prompt"]) == (HOSTILE, HOSTILE, HOSTILE)
    plain = page_of(sample())
    for mark in ("<script", "</script", "<img", "<!--", "default-src 'none'"):
        assert text.count(mark) == plain.count(mark)


def test_the_page_loads_nothing_and_runs_only_its_own_script() -> None:
    text = page_of(sample())
    assert "http" not in re.sub(r"http-equiv", "", text)
    assert re.search(r"script-src 'sha256-[\w+/]{43}='", text)


def test_long_texts_are_cut_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PAGE_TOKENS", 10)
    monkeypatch.setattr(page, "PROMPT_CHARACTERS", 4)
    first, _ = data_of(page_of(sample(7, prompt="a long prompt"), sample(2)))["samples"]
    assert (len(first["texts"]), len(first["values"][0]), first["length"]) == (5, 5, 7)
    assert (first["prompt"], first["prompt_left"]) == ("a lo", 9)


def test_values_that_json_lacks_are_kept() -> None:
    (shown,) = data_of(page_of(sample()))["samples"]
    assert (shown["reward"], shown["advantage"]) == (None, "inf")

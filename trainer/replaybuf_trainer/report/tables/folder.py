"""The sink of tables: a folder per step with a Parquet file and a page, of which the newest stay."""

from __future__ import annotations

import dataclasses
import functools
import logging
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from replaybuf.client.client import Client
from replaybuf.client.exports.tables import pyarrow
from replaybuf.errors import Forbidden, Invalid, ReplaybufError
from replaybuf.wire.group import TokenIds
from replaybuf.wire.text.model_tokenizer import Tokenizer
from replaybuf_trainer.folders import numbered_folders
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.ownership import Confirm, delete_listed, may_delete
from replaybuf_trainer.reading import TensorBatch
from replaybuf_trainer.report.tables.page import write_page
from replaybuf_trainer.report.tables.parquet import EXTRA, write_parquet
from replaybuf_trainer.report.tables.samples import StepSamples, TextOf, TokenRecord, draw_samples

logger = logging.getLogger(__name__)

UNFINISHED = ".step-"
PARQUET, PAGE = "samples.parquet", "index.html"
TIMEOUT_S = 5.0
"""Of a question to the service for the rewards of a group."""


class RecordedStep(NamedTuple):
    """A trained batch, and the values of its loss tokens."""

    batch: TensorBatch
    record: TokenRecord


class TableFolder:
    """Writes `step-000012/samples.parquet` and `step-000012/index.html` for each step.

    Raises `Invalid` if the folder cannot be written, `MissingExtra` without pyarrow.
    """

    name = "tables"

    def __init__(self, options: TrainOptions, confirm: Confirm) -> None:
        pyarrow(*EXTRA)
        self._options = options
        self._confirm = confirm
        self._folder = Path(options.tables_options.dir)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise Invalid(
                f"folder {self._folder} of --tables-options cannot be written: {error.strerror or error}",
                name="dir",
                value=str(self._folder),
            ) from error
        self._text_of = text_by_tokenizer(options.model)
        self._rewards = StoredRewards(options)

    def write(self, item: RecordedStep) -> None:
        """Draw the samples of a step, write their files and delete those of the oldest steps.

        Raises `Fenced`. If the service cannot be asked who has the run, nothing is deleted, and a table of the same
        step is a `FileExistsError`.
        """
        options, meta = self._options, item.batch.meta
        samples = draw_samples(item.batch, item.record, options.tables, options.seed, self._text_of)
        stored = {group_id: self._rewards.parts_of(group_id) for group_id in {sample.group_id for sample in samples}}
        samples = [
            dataclasses.replace(sample, reward_parts=stored[sample.group_id][sample.rollout])
            if sample.rollout < len(stored[sample.group_id])
            else sample
            for sample in samples
        ]
        parts = meta.batch_reward_parts or {}
        step = StepSamples(
            run=meta.run,
            step=meta.step,
            version=meta.version,
            loss=options.loss,
            reward_parts={name: part.mean for name, part in parts.items()},
            samples=samples,
        )
        folder = self._folder / f"step-{meta.step:06d}"
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=self._folder) as scratch:
            unfinished = Path(scratch) / folder.name
            unfinished.mkdir()
            write_parquet(unfinished / PARQUET, step)
            write_page(unfinished / PAGE, step)
            if may_delete(self._confirm):
                shutil.rmtree(folder, ignore_errors=True)  # of the same step before a resume
            elif folder.exists():
                raise FileExistsError(f"{folder} is there, and the service cannot be asked whether it may be replaced")
            unfinished.rename(folder)
        self._delete_old(meta.step)

    def close(self) -> None:
        """Close the connection to the service; each step is written at once."""
        self._rewards.close()

    def _delete_old(self, newest: int) -> None:
        """Keep the newest steps up to this one, and none after it: a resume voided them."""
        steps = numbered_folders(self._folder, "step-")
        kept = [step for step in steps if step <= newest][-self._options.tables_options.keep :]
        old = [folder for step, folder in steps.items() if step not in kept]
        of_killed_trainers = self._folder.glob(f"{UNFINISHED}*")
        delete_listed([*old, *of_killed_trainers], self._confirm)


def text_by_tokenizer(folder: Path) -> TextOf:
    """Return a function that decodes token ids; without a tokenizer, log a warning and show the ids as text."""
    try:
        tokenizer = Tokenizer(folder)
    except Invalid as error:
        logger.warning("tables show token ids instead of text: %s", error.detail)
        return lambda ids: " ".join(map(str, ids))

    @functools.lru_cache(maxsize=200_000)
    def of_token(token_id: int) -> str:
        return tokenizer.decode([[token_id]], special_tokens=True)[0]

    def text_of(ids: TokenIds) -> str:
        return of_token(int(ids[0])) if len(ids) == 1 else tokenizer.decode([ids], special_tokens=True)[0]

    return text_of


class StoredRewards:
    """Looks groups up in the run of a training; without a run, or without the right to read groups, there are none."""

    def __init__(self, options: TrainOptions) -> None:
        self._client = Client(options.url, options.run, options.token, TIMEOUT_S) if options.run else None

    def parts_of(self, group_id: str) -> list[dict[str, float]]:
        """Return the reward parts of each rollout of a group; empty if they are not available."""
        if self._client is None:
            return []
        try:
            stored = self._client.get_group(group_id).rollouts or []
        except Forbidden as error:
            logger.warning("tables have no reward parts of single rollouts: %s", error.detail)
            self.close()
            return []
        except ReplaybufError as error:  # freed, or the service is away
            logger.debug("no reward parts of group %s: %s", group_id, error.detail)
            return []
        return [rollout.rewards for rollout in stored]

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

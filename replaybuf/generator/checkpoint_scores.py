"""Scores of the checkpoints of a training on held-out problems, by one engine that loads them in turn.

::

    DIR/step-000020, step-000040 ... ─► checked ─► loaded into the engine ─► sampled and scored ─► score file

The score file is complete after every checkpoint, so a command that was killed goes on at the checkpoint after the last
scored one. A score counts for the same bytes of the model, the same problems and the same sampling only.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from replaybuf.errors import Invalid
from replaybuf.files import STATE_BYTES, read_bounded, write_whole
from replaybuf.generator.engines import VllmEngine
from replaybuf.generator.evaluation import HeldOut
from replaybuf.wire.answer.evaluations import EvaluationRequest
from replaybuf.wire.decoding import prepared
from replaybuf.wire.model.checkpoints import (
    MODEL_FOLDER,
    STATE_FILE,
    TrainerState,
    check_digests,
    list_checkpoints,
    read_state,
)
from replaybuf.wire.model.shape import CONFIG_FILE, check_same_shape

logger = logging.getLogger(__name__)

SCORES_FILE = "scores.json"
"""Default name of the score file, in the folder of the checkpoints."""


class CheckpointScore(msgspec.Struct, frozen=True, kw_only=True):
    """Score of one checkpoint. `weights`: digest of its model folder; `setting`: of problems and sampling."""

    checkpoint: str
    step: int
    run: str
    weights: str
    setting: str
    result: EvaluationRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint by its name, the model folder that engines load, and the digest of that."""

    name: str
    model: Path
    state: TrainerState
    weights: str


class ScoreFile:
    """The scores of a folder of checkpoints, one per checkpoint and setting. Raises `Invalid` for a broken file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._scores: list[CheckpointScore] = []
        if path.exists():
            try:
                self._scores = msgspec.json.decode(
                    read_bounded(path, STATE_BYTES), type=prepared(list[CheckpointScore])
                )
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                detail = f"score file {path} is broken: {error}; delete it to score all checkpoints again"
                raise Invalid(detail, name="scores", value=str(path)) from error

    def find(self, checkpoint: Checkpoint, setting: str) -> CheckpointScore | None:
        """Return the score of a checkpoint in a setting; None if it was not scored, or had other weights."""
        key = (checkpoint.name, checkpoint.weights, setting)
        return next((score for score in self._scores if (score.checkpoint, score.weights, score.setting) == key), None)

    def add(self, score: CheckpointScore) -> None:
        """Add a score in place of an older one of that checkpoint and setting; the file is whole at any moment.

        Raises `Invalid` if it cannot be written.
        """
        key = (score.checkpoint, score.setting)
        self._scores = [*(old for old in self._scores if (old.checkpoint, old.setting) != key), score]
        try:
            write_whole(self._path, msgspec.json.format(msgspec.json.encode(self._scores)) + b"\n")
        except OSError as error:
            detail = f"score file {self._path} cannot be written: {error.strerror}; give another with --scores"
            raise Invalid(detail, name="scores", value=str(self._path)) from error


def open_checkpoints(folder: Path, model: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder, oldest first; check that each is whole and of the same model as `model`.

    It reads every file that an engine will load; `model`: folder with the tokenizer, whose config.json counts if there
    is one. Raises `Invalid` for an empty folder, a damaged checkpoint, and one of another model or of adapters.
    """
    paths = list_checkpoints(folder)
    if not paths:
        missing = "does not exist" if not folder.is_dir() else "has no checkpoint"
        detail = f"--checkpoints {folder} {missing}; give the --checkpoint-dir of a trainer, with folders step-NNNNNN"
        raise Invalid(detail, name="checkpoints", value=str(folder), bound="a folder with checkpoints")
    reference = model if (model / CONFIG_FILE).is_file() else None
    checkpoints = []
    for path in paths:
        checkpoint = _open_checkpoint(path)
        reference = reference or checkpoint.model
        check_same_shape(checkpoint.model, reference, f"--checkpoints {folder} must hold one model, that of {model}")
        checkpoints.append(checkpoint)
    return checkpoints


def _open_checkpoint(path: Path) -> Checkpoint:
    state = read_state(path)
    if not (path / MODEL_FOLDER).is_dir():
        detail = f"checkpoint {path} has adapters and no whole model; --checkpoints scores whole models"
        raise Invalid(detail, name="checkpoints", value=str(path), bound=f"a checkpoint with {MODEL_FOLDER}/")
    names = sorted(name for name in state.files if name.startswith(f"{MODEL_FOLDER}/"))
    check_digests(path, state, names)
    files = {name: (state.files[name], state.digests.get(name)) for name in names}
    # A checkpoint of an older release lists no files; its state file names step and version.
    identity = msgspec.json.encode(files) if files else (path / STATE_FILE).read_bytes()
    return Checkpoint(path.name, path / MODEL_FOLDER, state, hashlib.blake2b(identity, digest_size=16).hexdigest())


def setting_of(held_out: HeldOut, environment: str, max_turns: int) -> str:
    """Return a digest of what a score depends on beside the weights: problems, scoring and sampling."""
    prompts = [(prompt.prompt_id, prompt.token_ids.tolist(), prompt.answer) for prompt in held_out.prompts]
    sampling = (held_out.name, held_out.max_tokens, held_out.temperature, held_out.samples, environment, max_turns)
    return hashlib.blake2b(msgspec.json.encode((sampling, prompts)), digest_size=16).hexdigest()


async def score_checkpoints(
    checkpoints: Sequence[Checkpoint],
    held_out: HeldOut,
    engine: VllmEngine,
    scores: ScoreFile,
    *,
    setting: str,
    producer: str,
    again: bool = False,
    done: Callable[[int, int, int], None] | None = None,
) -> list[tuple[CheckpointScore, bool]]:
    """Score the checkpoints that have no score yet, or all if `again`; return each score, and whether it is new.

    `done` gets the place of the checkpoint at work, its finished problems and all problems. A checkpoint that the
    trainer has deleted meanwhile is left out with a warning. Raises as `HeldOut.evaluate` and
    `VllmEngine.load_weights`.
    """
    results = []
    for place, checkpoint in enumerate(checkpoints):
        score = None if again else scores.find(checkpoint, setting)
        if score is not None:
            results.append((score, False))
            continue
        if not checkpoint.model.is_dir():
            logger.warning("checkpoint %s was deleted before its turn, and is not scored", checkpoint.name)
            continue
        state = checkpoint.state
        report = None if done is None else functools.partial(done, place)
        await engine.load_weights(checkpoint.model.resolve(), state.version)
        result = await held_out.report(engine, adapter="", producer=producer, done=report)
        score = CheckpointScore(
            checkpoint=checkpoint.name,
            step=state.step,
            run=state.run,
            weights=checkpoint.weights,
            setting=setting,
            result=result,
        )
        scores.add(score)
        results.append((score, True))
    return results

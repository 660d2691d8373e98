"""The weight transfer: brings each version to the engines, then announces it to the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from replaybuf.client.retries import Retries
from replaybuf_trainer.folders import whole_folder
from replaybuf_trainer.models.loading import WEIGHTS_FILE
from replaybuf_trainer.options import OnPublish
from replaybuf_trainer.publications import NOT_RESTORED
from replaybuf_trainer.publishers.opening import load_publisher
from replaybuf_trainer.publishers.publisher import Publisher, PublisherSetup
from replaybuf_trl.worker import ReplaybufRolloutWorker

logger = logging.getLogger(__name__)


class SentWeights:
    """The weights that TRL sends, as a publisher reads them; `beside`: config and tokenizer, which go into a folder."""

    adapter = ""

    def __init__(self, beside: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._beside = beside
        self._tensors = tensors

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the weights by their names in a folder."""
        return self._tensors

    def save_weights(self, folder: Path) -> None:
        """Write a folder that engines can load; it appears complete or not at all."""
        with whole_folder(folder) as scratch:
            for part in self._beside:
                part.save_pretrained(scratch)
            save_file({name: tensor.contiguous() for name, tensor in self._tensors.items()}, scratch / WEIGHTS_FILE)


def beside_weights(model: str) -> Sequence[Any]:
    """Return what engines need of a model besides its weights."""
    return AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)


class ReplaybufWeightTransfer:
    """TRL's `WeightTransferProtocol` by a publisher of `replaybuf train`: folders that engines load, with `engines`.

    `model`: the model that TRL trains, a folder or a name. `engines`: addresses; without any, your engines must load
    the announced folders themselves. `publisher` and `publisher_options` as in `replaybuf train`.
    """

    def __init__(
        self,
        worker: ReplaybufRolloutWorker,
        model: str,
        engines: Sequence[str] = (),
        *,
        weights_dir: str | Path = "weights",
        publisher: str = "",
        publisher_options: Mapping[str, Any] | None = None,
        engine_timeout_s: float = 60.0,
        engines_away_s: float = 300.0,
        on_publish: OnPublish = "in-flight",
    ) -> None:
        self._worker = worker
        self._model = str(model)
        setup = PublisherSetup(
            weights_dir=Path(weights_dir),
            engines=tuple(engines),
            engine_timeout_s=engine_timeout_s,
            on_publish=on_publish,
        )
        name = publisher or ("reload" if engines else "folder")
        self._publisher: Publisher = load_publisher(name, publisher_options or {}, setup)
        self._retries = Retries(engines_away_s)
        self._beside: Sequence[Any] = ()
        self._watching = False

    def init_weight_transfer(self) -> None:
        """Load config and tokenizer. Raises `Invalid` without `ReplaybufCallback`: nobody has attached then."""
        _ = self._worker.epoch
        self._beside = beside_weights(self._model)

    def pause(self) -> None:
        """Do nothing: the publisher pauses each engine while it loads, not while weights are written."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Bring the weights after the acked steps to the engines, then announce them. Raises `Fenced`.

        After a resume between two publications the weights are no version: the engines get those of the last one again.
        """
        if self._worker.is_between_versions:
            self._restore(iterator)
            return
        weights = SentWeights(self._beside, {name: tensor.detach().cpu() for name, tensor in iterator})
        worker, publisher, version = self._worker, self._publisher, self._worker.version
        self._retries.call(lambda: publisher.prepare(version, weights))
        uri = self._retries.call(lambda: publisher.commit(version, worker.confirm))
        worker.publish(version, uri)

    def _restore(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _ in iterator:  # the other processes take part
            pass
        worker, publisher, version = self._worker, self._publisher, self._worker.version
        if not self._retries.call(lambda: publisher.restore(version, worker.confirm)):
            logger.warning(NOT_RESTORED, version)
        worker.publish(version, None)  # changes nothing

    def resume(self) -> None:
        """Watch the engines from the first version on: one that restarts gets the weights again."""
        if not self._watching:
            self._publisher.watch(self._worker.confirm)
            self._watching = True

    def destroy(self) -> None:
        """End the watch and close the connections to engines."""
        self._retries.stop()
        self._publisher.close()

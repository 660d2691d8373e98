"""The feed of a training, by its options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from replaybuf.client.client import Client
from replaybuf.errors import Invalid
from replaybuf_trainer.feeds.fake import FakeBatches, with_vocabulary
from replaybuf_trainer.feeds.feed import Feed
from replaybuf_trainer.feeds.offline import ExportedBatches, OfflineFeed
from replaybuf_trainer.feeds.service import ServiceFeed
from replaybuf_trainer.losses import load_objective
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.parallel.ranks import Ranks

LEAST_TIMEOUT_S = 30.0


@contextlib.contextmanager
def open_feed(options: TrainOptions, ranks: Ranks | None = None) -> Iterator[Feed]:
    """Open the run of `--run`, the export of `--from-export` or made-up data.

    Raises `Invalid` unless exactly one is given, and for shapes or a folder that do not fit.
    """
    check_source(options)
    if options.fake_data:
        yield OfflineFeed(_fake_batches(options), ranks)
    elif options.from_export:
        yield OfflineFeed(ExportedBatches(options.from_export), ranks)
    else:
        timeout_s = max(LEAST_TIMEOUT_S, 2 * options.reader_options.wait_ms / 1000)
        with Client(options.url, options.run, token=options.token, timeout_s=timeout_s) as client:
            yield ServiceFeed(options, client, ranks)


def check_source(options: TrainOptions) -> None:
    """Raise `Invalid` unless exactly one source of batches is given."""
    sources = {
        "RUN": options.run,
        "--from-export": str(options.from_export or ""),
        "--fake-data": "true" if options.fake_data else "",
    }
    chosen = [f"{name} {value}".removesuffix(" true") for name, value in sources.items() if value]
    if len(chosen) != 1:
        raise Invalid(
            f"batches come from one of RUN, --from-export and --fake-data; given: {', '.join(chosen) or 'none'}",
            name="run",
            value=options.run,
        )


def _fake_batches(options: TrainOptions) -> FakeBatches:
    objective = load_objective(options.loss, options.loss_options, options.normalise)
    return FakeBatches(with_vocabulary(options.fake_shapes, options.model), options.seed, objective.columns)

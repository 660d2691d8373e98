"""The commands of this package, mounted into `replaybuf` by entry point. torch is imported only when one runs."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from replaybuf.errors import Fenced, MissingExtra, counted
from replaybuf_trainer.options import EngineOptions, FetchWeightsOptions, InitModelOptions, TrainOptions

if TYPE_CHECKING:
    from replaybuf_trainer.models.logprobs import PackedLogprobs

FENCED_EXIT_CODE = 3


def train(
    run: Annotated[
        str | None, Parameter(help="Name of the run. Without it, batches come from --from-export or --fake-data.")
    ] = None,
    /,
    *,
    options: Annotated[TrainOptions, Parameter(name="*")],
) -> None:
    """Train a policy with GRPO on the batches of a run, until the run is finished.

    --fake-data and --from-export need no service and report to nobody.
    Resumes from the newest checkpoint. On SIGTERM or SIGINT it finishes the current step and writes a checkpoint.
    The exit code is 3 if another trainer took the run. Give generators the same --on-publish.
    """
    del run  # also the value of --run, see `replaybuf.cli.configuration`
    _need_torch("train")
    import torch

    from replaybuf_trainer.feeds.opening import open_feed
    from replaybuf_trainer.parallel.launch import open_ranks
    from replaybuf_trainer.trainer import Trainer

    torch.set_num_threads(options.threads)
    with open_ranks(options.fsdp, options.rank_timeout_s) as ranks, open_feed(options, ranks) as feed:
        trainer = Trainer(options, feed, ranks)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: trainer.stop())
        try:
            steps = trainer.train()
        except Fenced as error:
            print(f"replaybuf train: {error.detail}; another trainer has this run", file=sys.stderr)
            sys.exit(FENCED_EXIT_CODE)
    if ranks.is_first:
        print(
            f"trained {counted(steps, 'step')} of {options.source if options.offline else f'run {options.run}'}",
            flush=True,
        )


def engine(options: Annotated[EngineOptions, Parameter(name="*")]) -> None:
    """Serve a small model on the CPU with the part of the vLLM API that replaybuf uses.

    Prints "listening on http://HOST:PORT" when it accepts requests.
    """
    _need_torch("engine")
    from replaybuf_trainer.engine.server import serve

    asyncio.run(serve(options))


def fetch_weights(
    run: Annotated[
        str | None,
        Parameter(help="Name of a run whose published version it loads. Without it, a trainer decides what to load."),
    ] = None,
    /,
    *,
    options: Annotated[FetchWeightsOptions, Parameter(name="*")],
) -> None:
    """Download published weights for the engine beside it, and load them.

    The trainer runs with --publisher http and this helper as --engine. With RUN the helper follows the run instead.
    Prints "listening on http://HOST:PORT", or the run that it follows. It ends on SIGTERM or SIGINT; what is
    downloaded stays.
    """
    del run  # also the value of --run, see `replaybuf.cli.configuration`
    from replaybuf_trainer.fetch_weights import fetch

    fetch(options)


def init_model(options: Annotated[InitModelOptions, Parameter(name="*")]) -> None:
    """Create a tiny Qwen3 model with a character tokenizer and warm it up with supervised training.

    Writes a Hugging Face folder that vLLM can serve. It also holds prompts.jsonl (training) and held_out.jsonl.
    """
    _need_torch("init-model")
    import torch

    from replaybuf_trainer.warm_start import make

    torch.set_num_threads(options.threads)
    make(options.out, options.task, options.seed, options.target_accuracy)


def load_logprobs(folder: Path) -> PackedLogprobs:
    """Load the model of `replaybuf generate --ref-model`. Raises `Invalid`, `MissingExtra`."""
    _need_torch("generate --ref-model")
    from replaybuf_trainer.models.logprobs import PackedLogprobs

    return PackedLogprobs(folder)


def _need_torch(command: str) -> None:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        raise MissingExtra(f"replaybuf {command}", "trainer") from None

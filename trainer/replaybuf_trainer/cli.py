"""The commands of this package, mounted into `replaybuf` by entry point. torch is imported only when one is run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, NonNegativeInt, NormFloat, Port, PositiveFloat, PositiveInt

from replaybuf.errors import Fenced, MissingExtra, ServiceUnavailable
from replaybuf.generator.fleet.publication import OnPublish
from replaybuf.generator.logprobs import LogprobModel

FENCED_EXIT_CODE = 3


def _need_torch(command: str) -> None:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        raise MissingExtra(f"replaybuf {command}", "trainer") from None


def load_logprobs(folder: Path) -> LogprobModel:
    """Load the model of `replaybuf generate --ref-model`. Raises `Invalid`, `MissingExtra`."""
    _need_torch("generate --ref-model")
    from replaybuf_trainer.logprobs import PackedLogprobs

    return PackedLogprobs(folder)


def init_model(
    *,
    out: Path,
    task: str = "spell_backward",
    seed: NonNegativeInt = 0,
    target_accuracy: NormFloat = 0.25,
    threads: PositiveInt = 1,
) -> None:
    """Make a tiny Qwen3 model with a character tokenizer and warm it up with supervision.

    Writes a Hugging Face folder that vLLM could serve, with prompts.jsonl (training) and held_out.jsonl beside it.

    Parameters
    ----------
    out
        Folder to make.
    task
        Task of reasoning-gym: spell_backward.
    seed
        Seed of weights, words and order.
    target_accuracy
        Sampled accuracy at which the warm start ends, 0 to 1.
    threads
        Threads torch may use.
    """
    _need_torch("init-model")
    import torch

    from replaybuf_trainer.warm_start import make

    torch.set_num_threads(threads)
    make(out, task, seed, target_accuracy)


def engine(
    *,
    model: Path,
    host: str = "127.0.0.1",
    port: Port = 8001,
    threads: PositiveInt = 1,
    max_rows: PositiveInt = 512,
    name: str = "policy",
) -> None:
    """Serve a small model with the part of the vLLM API that replaybuf needs, on the CPU.

    Prints "listening on http://HOST:PORT" once it answers.

    Parameters
    ----------
    model
        Model folder.
    host
        Address to listen on.
    port
        Port to listen on; 0 takes a free one.
    threads
        Threads torch may use.
    max_rows
        Most completions sampled at once.
    name
        Name of the model in the API.
    """
    _need_torch("engine")
    from transformers import AutoTokenizer

    from replaybuf_trainer.engine.server import Engine
    from replaybuf_trainer.engine.worker import Worker
    from replaybuf_trainer.model import load_model

    loaded = load_model(model)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    worker = Worker(loaded, max_rows=max_rows, threads=threads)
    shared = Engine(
        worker,
        tokenizer,
        name=name,
        eos_token_id=int(loaded.config.eos_token_id),
        context_tokens=int(loaded.config.max_position_embeddings),
    )
    worker.start()
    try:
        asyncio.run(_serve(shared, host, port))
    finally:
        worker.close()
        worker.join(5.0)


async def _serve(shared: object, host: str, port: int) -> None:
    import uvicorn

    from replaybuf_trainer.engine.server import application

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.handle_exit, number, None)
            yield

    # The protocol is named: asyncio sets TCP_NODELAY only on sockets that say they are TCP.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise ServiceUnavailable(f"cannot listen on {host}:{port}: {error.strerror}", name="port", value=port) from None
    app = application(shared)  # type: ignore[arg-type]
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2, server_header=False
    )
    print(f"listening on http://{host}:{listening.getsockname()[1]}", flush=True)
    await Server(config).serve(sockets=[listening])


def train(
    *,
    url: str = "http://127.0.0.1:8900",
    run: str,
    model: Path,
    engine: Annotated[list[str], Parameter(consume_multiple=True, negative="")] = [],  # noqa: B006
    checkpoint_dir: Path = Path(".replaybuf/checkpoints"),
    weights_dir: Path = Path(".replaybuf/weights"),
    checkpoint_every_steps: PositiveInt = 20,
    keep_checkpoints: PositiveInt = 2,
    on_resume: Literal["redeliver", "resample"] = "redeliver",
    poll_s: PositiveFloat = 0.5,
    wait_ms: NonNegativeInt = 0,
    prefetch: bool = True,
    learning_rate: PositiveFloat = 1e-4,
    warm_up_steps: NonNegativeInt = 10,
    clip_norm: PositiveFloat = 1.0,
    clip_low: NormFloat = 0.2,
    clip_high: NonNegativeFloat = 0.2,
    kl: NonNegativeFloat = 0.0,
    rows_per_forward: PositiveInt = 8,
    threads: PositiveInt = 1,
    seed: NonNegativeInt = 0,
    metrics_file: Path | None = None,
    token: str | None = None,
    service_timeout_s: NonNegativeFloat = 60.0,
    engine_timeout_s: PositiveFloat = 60.0,
    on_publish: OnPublish = "in-flight",
) -> None:
    """Train a policy with GRPO on the batches of a run, until the run is finished.

    Resumes from the newest checkpoint in its folder. SIGTERM and SIGINT end it after the step in work, with a
    checkpoint. Exit code 3 where another trainer took the run.

    Parameters
    ----------
    url
        Address of the service; several servers of one Redis: with commas between.
    run
        Name of the run.
    model
        Model folder to start from; its tokenizer is copied beside the weights.
    engine
        Addresses of the engines that get the weights. Without any the weights are written and announced all the same,
        and whoever samples has to load them.
    checkpoint_dir
        Folder of checkpoints.
    weights_dir
        Folder of published weights; the engines read it.
    checkpoint_every_steps
        Steps between checkpoints.
    keep_checkpoints
        Newest checkpoints that stay.
    on_resume
        redeliver: batches after the checkpoint come again as they were; resample: they are made anew.
    poll_s
        Seconds between two questions for a batch.
    wait_ms
        Long-poll: milliseconds the service may hold a question. 0 = poll.
    prefetch
        Ask for the next batch while this one trains.
    learning_rate
        Learning rate of AdamW after the warm-up.
    warm_up_steps
        Steps over which the learning rate rises.
    clip_norm
        Largest norm of the gradient.
    clip_low
        How far below 1 the ratio may go.
    clip_high
        How far above 1 the ratio may go.
    kl
        Weight of the KL to the reference logprobs; 0 = off.
    rows_per_forward
        Packed rows in one forward pass.
    threads
        Threads torch may use.
    seed
        Seed of torch.
    metrics_file
        File that gets one JSON line per step.
    token
        Bearer token with the role trainer.
    service_timeout_s
        How long the service may stay away.
    engine_timeout_s
        How long an engine may take to load weights; with drain to finish what is running, too.
    on_publish
        How engines are paused for new weights. drain: running completions finish first; in-flight: they are frozen and
        go on; abort-and-resume, abort: they are cut off. Give the generators the same.
    """
    _need_torch("train")
    import torch

    from replaybuf.client.client import Client
    from replaybuf_trainer.loss import Objective
    from replaybuf_trainer.trainer import Trainer, TrainOptions

    torch.set_num_threads(threads)
    options = TrainOptions(
        url=url,
        run=run,
        model=model,
        engines=tuple(engine),
        checkpoint_dir=checkpoint_dir,
        weights_dir=weights_dir,
        checkpoint_every_steps=checkpoint_every_steps,
        keep_checkpoints=keep_checkpoints,
        on_resume=on_resume,
        poll_s=poll_s,
        wait_ms=wait_ms,
        prefetch=prefetch,
        rows_per_forward=rows_per_forward,
        learning_rate=learning_rate,
        warm_up_steps=warm_up_steps,
        clip_norm=clip_norm,
        objective=Objective(clip_low, clip_high, kl),
        metrics_file=metrics_file,
        token=token,
        service_timeout_s=service_timeout_s,
        engine_timeout_s=engine_timeout_s,
        on_publish=on_publish,
        seed=seed,
    )
    with Client(url, run, token=token, timeout_s=max(30.0, 2 * wait_ms / 1000)) as client:
        trainer = Trainer(options, client)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: trainer.stop())
        try:
            steps = trainer.train()
        except Fenced as error:
            print(f"replaybuf train: {error.detail}; another trainer has this run", file=sys.stderr)
            sys.exit(FENCED_EXIT_CODE)
    print(f"trained {steps} steps of run {run}", flush=True)

"""The command `replaybuf-prime-rl`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from pathlib import Path

from replaybuf.client import Client
from replaybuf.errors import ReplaybufError
from replaybuf_prime_rl.engines import Engines
from replaybuf_prime_rl.layout import check_layout
from replaybuf_prime_rl.sidecar import Sidecar, SidecarOptions

DEFAULT_URL = "http://127.0.0.1:8900"


def main(arguments: list[str] | None = None) -> None:
    """Feed prime-rl's trainer until the run has ended. Exit code 1 after an error."""
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    options = SidecarOptions(
        output_dir=parsed.output_dir,
        dp_world_size=parsed.dp_world_size,
        pad_to_multiple_of=parsed.pad_to_multiple_of,
        keep_checkpoints=parsed.keep_checkpoints,
        poll_s=parsed.poll_s,
    )
    engines = Engines(parsed.engine)
    try:
        check_layout(parsed.prime_rl)
        with Client(parsed.url, parsed.run, os.environ.get("REPLAYBUF_TOKEN")) as client:
            sidecar = Sidecar(client, options, engines.load)
            signal.signal(signal.SIGTERM, lambda *_: sidecar.stop())
            sidecar.run()
    except ReplaybufError as error:
        raise SystemExit(f"replaybuf-prime-rl: {error}") from error
    finally:
        engines.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="replaybuf-prime-rl", description="Feed prime-rl's trainer from a run.")
    parser.add_argument("--url", default=os.environ.get("REPLAYBUF_URL", DEFAULT_URL), help="address of the service")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--output-dir", type=Path, required=True, help="output_dir of prime-rl's trainer")
    parser.add_argument(
        "--prime-rl", type=Path, required=True, help="folder of the trainer's package prime_rl; its format is checked"
    )
    parser.add_argument("--dp-world-size", type=_positive, default=1, help="its data-parallel ranks")
    parser.add_argument("--pad-to-multiple-of", type=_positive, help="tokens; for context parallelism")
    parser.add_argument("--engine", action="append", default=[], help="vLLM server to load new weights into; repeat")
    parser.add_argument("--keep-checkpoints", type=_positive, help="checkpoints that stay resumable; all on disk")
    parser.add_argument("--poll-s", type=_seconds, default=0.1, help="seconds between two looks at the folder")
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value}; the minimum is 1")
    return value


def _seconds(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{value}; it must be above 0")
    return value

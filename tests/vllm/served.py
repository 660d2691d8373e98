"""A real `vllm serve` on the CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.trainer.whole_run import BLOCK_TOKENS, CONTEXT_TOKENS
from tests.waiting import eventually

START_TIMEOUT_S = 300.0
"""It imports torch and vLLM several times over: 30 s on two idle cores, minutes on busy ones."""
FIRST_TIMEOUT_S = 120.0
"""The first completion warms up kernels."""
STOP_TIMEOUT_S = 20.0
ARGUMENTS = {
    "dtype": "float32",
    "max-model-len": str(CONTEXT_TOKENS),
    "max-num-seqs": "64",
    "block-size": str(BLOCK_TOKENS),
    "host": "127.0.0.1",
    "served-model-name": "policy",
}
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Spawned, its processes would import torch and vLLM anew, one after the other.
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    # A thread is enough for such a model; the other core is for the tests.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@contextlib.contextmanager
def served(vllm: Path, model: Path, log: Path) -> Iterator[str]:
    """Serve a model folder by the executable `vllm`, with folders of its own; yields the address once it samples."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = [part for name, value in (ARGUMENTS | {"port": str(port)}).items() for part in (f"--{name}", value)]
    command = [str(vllm), "serve", str(model), "--enforce-eager", "--enable-scale-out", *options]
    # Not below pytest's folder: the paths of its sockets would get longer than sockets allow.
    with tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as home, log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=home,
            env=_environment(Path(home)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            eventually(lambda: process.poll() is not None or _listens(port), START_TIMEOUT_S)
            assert process.poll() is None, f"vllm serve ended with {process.returncode}: {_tail(log)}"
            _sample(url, log)
            yield url
        finally:
            _end(process)


def _environment(home: Path) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        # What it imports is compiled once and kept, whatever is wanted of the tests' own interpreter.
        if not name.startswith(("VLLM_", "XDG_", "HF_", "PYTHON"))
    }
    return inherited | ENVIRONMENT | {"HOME": str(home), "TMPDIR": str(home)}


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def _sample(url: str, log: Path) -> None:
    body = {"model": ARGUMENTS["served-model-name"], "prompt": [3, 4, 5], "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=FIRST_TIMEOUT_S)
    assert answer.status_code == 200, f"{answer.text}: {_tail(log)}"


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, which frees its shared memory; then end whatever is left of its process group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_TIMEOUT_S)

"""Measure a whole run on GPUs: vLLM samples, the reference trainer trains, `replaybuf up` runs both.

    make gpu
    make gpu ARGS="--steps 40 --keep .replaybuf/gpu"
    make gpu ARGS=--rehearse

The model has the shape of Qwen3-0.6B and random weights, which cost the same time as trained ones. Every completion has
the full length, since random weights hardly ever end one. With two GPUs vLLM gets the first and the trainer the second,
and weights go over NCCL. NCCL takes no GPU twice: with one GPU vLLM and the trainer share it, and vLLM reads each
version from a folder. Figures are over the steps after the first three.

A rehearsal goes the same way with a tiny model on a processor, by the vLLM of `make test-vllm`; ignore its figures.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from measured import RESULTS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from replaybuf.generator.environments.contract import Score
from replaybuf.generator.prompts.prompt import Prompt
from replaybuf.lab.demo.run_file import inline_toml
from replaybuf_trainer.models.tiny import CHARACTERS, EOS, PAD

VLLM = Path(".venv-vllm/bin/vllm")
WARM_UP_STEPS = 3
TIMEOUT_S = 3000.0
STOP_TIMEOUT_S = 60.0
PROMPTS = 4096
NO_GPU = """no NVIDIA GPU here: nothing was measured. On a machine with one or two, `make gpu` needs vLLM in .venv-vllm
(docs/one-gpu.md, Install); ARGS=--rehearse goes through the same steps on a processor."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A model and the run around it; `dtype` is that of vLLM and of the trainer's layers."""

    model: Mapping[str, int]
    dtype: str
    seq_len: int
    completion_tokens: int
    groups: int
    vllm: Sequence[str]
    environment: Mapping[str, str]


REAL = Shape(
    model={
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    dtype="bfloat16",
    seq_len=8192,
    completion_tokens=1024,
    groups=16,
    vllm=["--gpu-memory-utilization", "0.35"],
    environment={},
)
REHEARSAL = Shape(
    model={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    dtype="float32",
    seq_len=256,
    completion_tokens=32,
    groups=4,
    vllm=["--enforce-eager", "--max-num-seqs", "16"],
    environment={"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
)
GROUP_SIZE = 8


class AnyReward:
    """An environment whose rewards differ between completions: equal ones would be filtered."""

    def check(self, prompt: Prompt) -> None:
        """Accept every prompt."""

    def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Return a number from 0 to 1 that depends on the text alone."""
        return Score(zlib.crc32(completion_text.encode()) / 2**32)


def main() -> int:
    """Measure, print the figures and write them as JSON. Returns 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (20)")
    parser.add_argument(
        "--vllm", type=Path, default=Path(".venv-vllm/bin/vllm"), help="the program (.venv-vllm/bin/vllm)"
    )
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the processor")
    parser.add_argument(
        "--keep", type=Path, help="folder for the files of the run, logs among them; else they are removed"
    )
    asked = parser.parse_args()
    gpus = 0 if asked.rehearse else torch.cuda.device_count()
    if not gpus and not asked.rehearse:
        print(NO_GPU, file=sys.stderr)
        return 2
    if not asked.vllm.exists():
        print(f"no vLLM at {asked.vllm}; install it as docs/one-gpu.md says, or name it by --vllm", file=sys.stderr)
        return 2
    if asked.steps <= WARM_UP_STEPS:
        parser.error(f"--steps is {asked.steps}; the first {WARM_UP_STEPS} only warm up, so it must be larger")
    with folder_of(asked.keep) as folder:
        shape = REAL if gpus else REHEARSAL
        parameters = write_model(folder / "model", shape)
        write_prompts(folder / "prompts.jsonl")
        settings = run_settings(shape, asked.vllm.resolve(), asked.steps, gpus)
        (folder / "run.toml").write_text(
            "".join(f"{name} = {inline_toml(value)}\n" for name, value in settings.items())
        )
        run_up(folder)
        measured = {
            "gpus": [torch.cuda.get_device_name(number) for number in range(gpus)],
            "model_parameters": parameters,
            "seq_len": shape.seq_len,
            "attention": settings["trainer"]["model_options"]["attention"],
            "publisher": settings["trainer"]["publisher"],
            **figures_of(folder / "data" / "metrics"),
        }
    print(json.dumps(measured, indent=2))
    if gpus:
        (RESULTS / "gpu.json").write_text(json.dumps(measured, indent=2) + "\n")
    return 0


@contextlib.contextmanager
def folder_of(kept: Path | None) -> Iterator[Path]:
    """Give the folder of the run: a new one that stays, or one that is removed."""
    if kept is not None:
        kept.mkdir(parents=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="replaybuf-gpu-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def write_model(folder: Path, shape: Shape) -> int:
    """Write a model with random weights and a tokenizer that knows each of its tokens; return the parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape.model, max_position_embeddings=shape.seq_len, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1
    )
    model = Qwen3ForCausalLM(config).to(getattr(torch, shape.dtype))
    model.save_pretrained(folder)
    words = [PAD, EOS, *CHARACTERS]
    words += [f"<{number}>" for number in range(len(words), shape.model["vocab_size"])]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def write_prompts(file: Path) -> None:
    """Write prompts of about the length of a word problem."""
    rows = (
        json.dumps({"prompt": f"Problem {number}: " + "what is the sum of these? " * 6}) for number in range(PROMPTS)
    )
    file.write_text("\n".join(rows) + "\n")


def run_settings(shape: Shape, vllm: Path, steps: int, gpus: int) -> dict[str, Any]:
    """Return the sections of the run file."""
    port = free_port()
    served = ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", "policy", "--enable-scale-out"]
    lengths = ["--dtype", shape.dtype, "--max-model-len", str(shape.seq_len)]
    apart = gpus > 1
    transfer = ["--weight-transfer-config", '{"backend": "nccl"}'] if apart else []
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1", "PATH": os.environ["PATH"]}
    environment = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "4" if gpus else "1"}
    return {
        "data_dir": "data",
        "start_timeout_s": 900,
        "run": {
            "name": "gpu",
            "group_size": GROUP_SIZE,
            "max_steps": steps,
            "batch": {
                "groups_per_batch": shape.groups,
                "tokens_per_batch": shape.groups * GROUP_SIZE * shape.seq_len,
                "seq_len": shape.seq_len,
            },
            "strategy": {"name": "one-step-off-policy", "options": {"max_staleness": 1}},
        },
        "service": {"port": 0},
        "engines": [
            {
                "name": "vllm",
                "command": [str(vllm), "serve", "model", *served, *lengths, *shape.vllm, *transfer],
                "url": f"http://127.0.0.1:{port}",
                "env": {**quiet, **shape.environment, **({"CUDA_VISIBLE_DEVICES": "0"} if apart else {})},
            }
        ],
        "generator": {
            "environment": "gpu:AnyReward",
            "prompts": "prompts.jsonl",
            "max_tokens": shape.completion_tokens,
            "env": environment,
        },
        "trainer": {
            "model": "model",
            "dtype": shape.dtype,
            "model_options": {
                "attention": "flash" if gpus and has_flash_attention() else "sdpa",
                "activation_checkpointing": int(bool(gpus)),
            },
            "publisher": "nccl" if apart else "reload",
            "learning_rate": 1e-6,
            "rows_per_forward": 1,
            "checkpoint_every_steps": steps,
            "env": {**environment, **({"CUDA_VISIBLE_DEVICES": "1"} if apart else {})},
        },
    }


def has_flash_attention() -> bool:
    """Check for the package of FlashAttention 2 or 3."""
    return any(importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn_interface"))


def run_up(folder: Path) -> None:
    """Run `replaybuf up` to its end. Raises `SystemExit` with the end of its output if it fails."""
    log = folder / "up.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "replaybuf", "up", "run.toml"]
        running = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        try:
            code: int | str = running.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = f"none within {TIMEOUT_S:.0f} s"
        finally:
            if running.poll() is None:
                running.send_signal(signal.SIGTERM)
                running.wait(STOP_TIMEOUT_S)
    if code != 0:
        raise SystemExit(f"replaybuf up ended with code {code}:\n{log.read_text()[-4000:]}")


def figures_of(metrics: Path) -> dict[str, float | int]:
    """Return the figures of the steps after the warm-up, from the metrics of trainer and generator."""
    lines = [json.loads(line) for line in (metrics / "trainer.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train_s" in line][WARM_UP_STEPS:]
    began, ended = steps[0]["time"] - steps[0]["step_s"], steps[-1]["time"]

    def median(name: str) -> float:
        return float(round(statistics.median(step[name] for step in steps), 4))

    passes = [sum(step["phase_s"].get(phase, 0.0) for phase in ("forward", "backward")) for step in steps]
    total_s = sum(step["step_s"] for step in steps)
    return {
        "steps": len(steps),
        "tokens_per_s": round(sum(step["tokens"] for step in steps) / (ended - began), 1),
        "step_s": median("step_s"),
        "peak_memory_gib": round(max(step["peak_memory_bytes"] for step in steps) / 2**30, 2),
        "mfu": median("mfu"),
        "train_mfu": median("train_mfu"),
        "share_outside_forward_and_backward": round(1 - sum(passes) / total_s, 4),
        "publication_s": median("publish_s"),
        "trainer_wait_share": round(sum(step["wait_s"] for step in steps) / total_s, 4),
    }


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())

"""Stand-ins for the programs that the demo starts: `python standins.py COMMAND OPTIONS...`, as `replaybuf` is called.

`serve` is the real service. The others have the real ones' outside and nothing inside: an engine that spells right when
asked greedily and every second time otherwise, a trainer that makes the groups of its batches itself and writes a line
per step. `STANDIN_TRAIN=hangs` stops its progress after half of its steps; `STANDIN_INIT_MODEL=waits` makes the warm
start wait for a file `go` in the data folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

WORDS = ("abc", "bcd", "cab", "dab")
LETTERS = "abcd"
STEP_S = 0.03
WAIT_S = 60.0
GROUPS_PER_BATCH, GROUP_SIZE = 32, 8


def main(command: str, options: list[str]) -> None:
    """Run the stand-in for `command`."""
    options_by_name = {word: value for word, value in pairwise([*options, ""]) if word.startswith("--")}
    if command == "serve":
        os.execv(sys.executable, [sys.executable, "-m", "replaybuf", command, *options])
    {"init-model": init_model, "engine": engine, "generate": generate, "train": train}[command](options_by_name)


def init_model(options: dict[str, str]) -> None:
    """Write a tokenizer and problems."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = Path(options["--out"])
    print("step 10: sampled accuracy 0.100", flush=True)
    if os.environ.get("STANDIN_INIT_MODEL") == "waits":
        wait_for(folder.parent / "go")
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    problems = [
        {
            "prompt": word,
            "prompt_id": word,
            "answer": word[::-1],
            "metadata": {
                "reasoning_gym": {
                    "partial_credit": False,
                    "dataset": "spell_backward",
                    "entry": {"question": word, "answer": word[::-1], "metadata": {"word": word}},
                }
            },
        }
        for word in WORDS
    ]
    for name in ("held_out.jsonl", "prompts.jsonl"):
        (folder / name).write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    print("model made")


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


class Answers(BaseHTTPRequestHandler):
    """The engine's half of the conversation."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Return the model's name and version for every path."""
        self._answer({"data": [{"id": "standin", "max_model_len": 128}], "weight_version": 0})

    def do_POST(self) -> None:
        """Spell backward; at T > 0 every second completion is wrong."""
        question = json.loads(self.rfile.read(int(self.headers["content-length"])))
        right, wrong = question["prompt"][::-1], [0, 0, 0]
        completions = [wrong if question["temperature"] and number % 2 else right for number in range(question["n"])]
        self._answer(
            {
                "choices": [
                    {
                        "index": index,
                        "token_ids": ids,
                        "logprobs": {"token_logprobs": [-0.5] * len(ids)},
                        "finish_reason": "stop",
                        "weight_versions": [{"version": 0, "start": 0, "end": len(ids)}],
                    }
                    for index, ids in enumerate(completions)
                ]
            }
        )

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def _answer(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def engine(options: dict[str, str]) -> None:
    """Serve requests until the end."""
    server = ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Answers)
    server.serve_forever()


def generate(options: dict[str, str]) -> None:
    """Wait for the end."""
    signal.pause()


def train(options: dict[str, str]) -> None:
    """Do the steps after the checkpoint, and write a line for each."""
    checkpoint = Path(options["--checkpoint-dir"]) / "step"
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    checkpoint.parent.mkdir(exist_ok=True)
    total, behaviour = int(os.environ["STANDIN_STEPS"]), os.environ.get("STANDIN_TRAIN")
    with httpx.Client(base_url=f"{options['--url']}/v1/runs/{options['--run']}/") as run:
        epoch = post(run, "attach", {"resume_step": first})["epoch"]
        for step in range(first, total):
            if behaviour and step == total // 2:
                print(behaviour, flush=True)
                signal.pause()
            do_step(run, step, epoch)
            line = {"step": step, "reward_mean": 0.5, "tokens": 10, "train_s": STEP_S, "time": time.time()}
            with Path(options["--metrics-file"]).open("a") as file:
                file.write(json.dumps(line) + "\n")
            checkpoint.write_text(str(step + 1))


def do_step(run: httpx.Client, step: int, epoch: int) -> None:
    """Append the groups of a batch, take it, ack it, publish its version."""
    post(run, "groups", {"groups": [group(f"{step}-{number}", step) for number in range(GROUPS_PER_BATCH)]})
    answer = run.get(f"batches/{step}", params={"epoch": epoch, "wait_ms": 1000})
    assert answer.status_code == 200, answer.text
    post(run, f"batches/{step}/ack", {"epoch": epoch})
    post(run, "policy", {"epoch": epoch, "version": step + 1})


def group(name: str, version: int) -> dict[str, Any]:
    """Make up a group, two tokens a rollout."""
    rollout = {"prompt_ids": [0], "completion_ids": [1], "inference_logprobs": [-0.1]}
    rollouts = [rollout | {"reward": number % 2} for number in range(GROUP_SIZE)]
    return {"group_id": name, "prompt_id": name, "policy_version": version, "rollouts": rollouts}


def post(run: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """POST and return what was answered."""
    return run.post(path, json=body).raise_for_status().json()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

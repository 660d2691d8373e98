"""The engine over HTTP: sampling, weight updates, pauses, and logprobs that match the sampled tokens."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from replaybuf_trainer.engine.sampler import Row
from replaybuf_trainer.engine.worker import Worker
from replaybuf_trainer.models.loading import load_model
from tests.forked import ForkedProcess
from tests.trainer.served import LONG, NAME, TIMEOUT_S, WORD, ServedEngine, in_background, oracle
from tests.waiting import eventually

TOLERANCE = 1e-4
EOS = 2


def assert_sampled_by(model: Any, choice: dict[str, Any], start: int = 0) -> None:
    """Check the reported logprobs from token `start` on against the model."""
    expected = oracle(model, choice["prompt_token_ids"], choice["token_ids"])
    assert choice["logprobs"]["token_logprobs"][start:] == pytest.approx(expected[start:], abs=TOLERANCE)


# ---------------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_logprobs_are_the_raw_log_softmax_of_the_model(shared_engine: ServedEngine, temperature: float) -> None:
    """The temperature changes the choice of tokens, not the reported logprobs."""
    for choice in shared_engine.complete(WORD, n=4, max_tokens=20, temperature=temperature):
        assert_sampled_by(shared_engine.model, choice)


def test_requests_of_different_lengths_do_not_disturb_each_other_in_one_batch(shared_engine: ServedEngine) -> None:
    """Prompts of 1 to 24 tokens sampled together get the logprobs they would get alone."""
    with ThreadPoolExecutor(24) as threads:
        prompts = [list(range(3, 4 + length)) for length in range(24)]
        for choices in threads.map(lambda prompt: shared_engine.complete(prompt, n=2, max_tokens=12), prompts):
            for choice in choices:
                assert_sampled_by(shared_engine.model, choice)


def test_temperature_zero_takes_the_most_likely_token(shared_engine: ServedEngine) -> None:
    """Every token of a greedy completion is the argmax at its place."""
    choice = shared_engine.complete(WORD, max_tokens=10, temperature=0)[0]
    ids = torch.tensor([[*WORD, *choice["token_ids"]]])
    best = shared_engine.model(input_ids=ids).logits[0].argmax(-1)
    assert choice["token_ids"] == best[len(WORD) - 1 : -1].tolist()


def test_tokens_are_drawn_in_proportion_to_their_probability(shared_engine: ServedEngine) -> None:
    """First tokens of many completions follow the model's distribution (chi-squared, 97 degrees of freedom)."""
    draws = [c["token_ids"][0] for s in range(8) for c in shared_engine.complete(WORD, n=1000, max_tokens=1, seed=s)]
    with torch.inference_mode():
        logits = shared_engine.model(input_ids=torch.tensor([WORD])).logits[0, -1]
    expected = torch.softmax(logits, -1) * len(draws)
    counts = torch.bincount(torch.tensor(draws), minlength=98)
    assert float(((counts - expected) ** 2 / expected).sum()) < 160.0  # exceeded once in 20,000 by chance


def test_the_same_seed_gives_the_same_completions_in_any_batch(shared_engine: ServedEngine) -> None:
    """A seeded request alone, again, and among others."""
    asked: dict[str, Any] = {"n": 3, "max_tokens": 16, "seed": 7}
    alone = [choice["token_ids"] for choice in shared_engine.complete(WORD, **asked)]
    with ThreadPoolExecutor(9) as threads:
        others = [threads.submit(shared_engine.complete, WORD[k:], n=8, max_tokens=30) for k in range(5)]
        again = [threads.submit(shared_engine.complete, WORD, **asked) for _ in range(4)]
        for future in again:
            assert [choice["token_ids"] for choice in future.result()] == alone
        for other in others:
            other.result()
    assert [choice["token_ids"] for choice in shared_engine.complete(WORD, **{**asked, "seed": 8})] != alone
    assert len({tuple(ids) for ids in alone}) == 3


def test_a_completion_ends_with_the_end_token_or_at_its_length(shared_engine: ServedEngine) -> None:
    """As in vLLM, the end token is in the ids and not in the text."""
    choices = shared_engine.complete(WORD, n=64, max_tokens=60, seed=0)
    assert {choice["finish_reason"] for choice in choices} == {"stop", "length"}
    for choice in choices:
        ids, stopped = choice["token_ids"], choice["finish_reason"] == "stop"
        assert (ids[-1] == EOS) == stopped
        assert EOS not in ids[:-1]
        assert stopped or len(ids) == 60
        assert "<eos>" not in choice["text"]


def test_a_stop_token_of_the_request_ends_its_completions(shared_engine: ServedEngine) -> None:
    """Every token is made a stop token: each completion has exactly one."""
    for choice in shared_engine.complete(WORD, n=4, max_tokens=9, stop_token_ids=list(range(98))):
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (1, "stop")


def test_an_answer_has_the_shape_of_a_vllm_answer(shared_engine: ServedEngine) -> None:
    """Choices in order, prompt ids given back, usage summed up, a text as prompt taken like its tokens."""
    answer = shared_engine.ask("culla>", n=2, max_tokens=4, model=NAME).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["prompt_token_ids"] == WORD for choice in answer["choices"])
    generated = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": generated, "total_tokens": 6 + generated}
    assert (answer["object"], answer["model"]) == ("text_completion", NAME)
    assert shared_engine.http.get("/v1/models").json()["data"][0] | {"max_model_len": 256} == {
        "id": NAME,
        "object": "model",
        "max_model_len": 256,
    }


def test_several_prompts_are_answered_in_order(shared_engine: ServedEngine) -> None:
    """Each prompt has `n` choices, with consecutive numbers; usage counts every prompt once."""
    prompts = [WORD, WORD[:2]]
    response = shared_engine.post(
        "/v1/completions", {"prompt": prompts, "n": 2, "max_tokens": 3, "return_token_ids": True}
    )
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in choices] == [WORD, WORD, WORD[:2], WORD[:2]]
    assert response.json()["usage"]["prompt_tokens"] == 8


def test_metrics_count_tokens_and_requests(engine: ServedEngine) -> None:
    """The counter of tokens is the sum of what was answered; nothing runs or waits afterwards."""
    choices = engine.complete(WORD, n=5, max_tokens=7)
    assert engine.metric("vllm:generation_tokens_total") == sum(len(choice["token_ids"]) for choice in choices)
    eventually(lambda: engine.metric("vllm:num_requests_running") == 0, TIMEOUT_S)
    assert engine.metric("vllm:num_requests_waiting") == 0


def test_only_rows_that_do_not_fit_into_the_next_wave_count_as_waiting() -> None:
    """A continuously batching engine would have taken the others at once."""
    worker = Worker(None, max_rows=256, threads=1)
    for _ in range(4):
        worker.submit([Row(WORD, 4, 1.0, frozenset(), np.zeros(4)) for _ in range(80)])
    assert (worker.rows_running, worker.rows_waiting) == (240, 80)
    larger = Worker(None, max_rows=64, threads=1)
    larger.submit([Row(WORD, 4, 1.0, frozenset(), np.zeros(4)) for _ in range(80)])
    assert (larger.rows_running, larger.rows_waiting) == (80, 0)  # more rows than a wave has are a wave of their own


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prompt": [3] * 250, "max_tokens": 20}, ["250", "20", "256"]),
        ({"prompt": [3, 98]}, ["97"]),
        ({"prompt": [3, -1]}, ["prompt"]),
        ({"prompt": [[3, 4], [3, 98]]}, ["97"]),
        ({"prompt": [[3, 4], 5]}, ["mixes"]),
        ({"prompt": [[3]] * 600, "n": 2}, ["600", "2", "1024"]),
        ({"prompt": WORD, "prompt_logprobs": 3}, ["prompt_logprobs"]),
        ({"prompt": []}, ["prompt"]),
        ({"prompt": WORD, "n": 0}, ["n"]),
        ({"prompt": WORD, "temperature": -1}, ["temperature"]),
        ({"prompt": WORD, "max_tokens": 0}, ["max_tokens"]),
        ({"prompt": WORD, "top_p": 0.5}, ["top_p"]),
        ({"prompt": WORD, "stream": True}, ["stream"]),
        ({"prompt": WORD, "temperature": "warm"}, ["temperature"]),
    ],
)
def test_a_request_out_of_bounds_is_answered_400_with_its_figures(
    shared_engine: ServedEngine, asked: dict[str, Any], words: list[str]
) -> None:
    """The answer is an OpenAI error object that names the fault."""
    response = shared_engine.post("/v1/completions", asked)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == 400
    assert all(word in error["message"] for word in words), error["message"]


def test_a_body_that_is_not_utf8_is_answered_400(shared_engine: ServedEngine) -> None:
    """The fault is in the request, so the answer is not 500."""
    response = shared_engine.http.post("/v1/completions", content=b'{"model": "\xff", "prompt": [3]}')
    assert (response.status_code, response.json()["error"]["code"]) == (400, 400), response.text


def test_an_unknown_model_is_answered_404(shared_engine: ServedEngine) -> None:
    """vLLM answers the same."""
    response = shared_engine.ask(WORD, model="other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, 404)
    assert NAME in response.json()["error"]["message"]


# ---------------------------------------------------------------------- weights


def test_new_weights_sample_under_the_new_label(engine: ServedEngine, models: Path) -> None:
    """Before and after a reload, each completion names the weights its logprobs come from."""
    before = engine.complete(WORD, max_tokens=8)[0]
    old = load_model(models / "a")
    engine.reload(models / "b", 5)
    after = engine.complete(WORD, max_tokens=8)[0]
    assert_sampled_by(old, before)
    assert_sampled_by(load_model(models / "b"), after)
    assert after["weight_versions"] == [{"version": "5", "start": 0, "end": len(after["token_ids"])}]
    assert engine.version() == "5"


def swapped_in_the_middle(engine: ServedEngine, folder: Path) -> list[dict[str, Any]]:
    """Load weights as version 3 while completions are frozen in the middle; return the choices that lasted."""
    asked = engine.in_the_middle()
    assert engine.post("/pause?mode=keep").status_code == 200
    engine.reload(folder, 3)
    assert engine.post("/resume").status_code == 200
    return [choice for choice in asked.result(TIMEOUT_S) if len(choice["weight_versions"]) == 2]


def test_version_spans_cover_a_completion_across_a_reload(engine: ServedEngine, models: Path) -> None:
    """Spans follow one another from the first token to the last, old label first."""
    choices = swapped_in_the_middle(engine, models / "b")
    assert choices
    for choice in choices:
        first, second = choice["weight_versions"]
        assert (first["start"], second["end"]) == (0, len(choice["token_ids"]))
        assert first["end"] == second["start"] > 0
        assert (first["version"], second["version"]) == ("0", "3")


def test_tokens_before_a_reload_are_those_of_the_old_weights(engine: ServedEngine, models: Path) -> None:
    """The span of the old label has the old weights' logprobs."""
    old = load_model(models / "a")
    for choice in swapped_in_the_middle(engine, models / "b"):
        ids, end = choice["token_ids"], choice["weight_versions"][0]["end"]
        reported = choice["logprobs"]["token_logprobs"][:end]
        assert reported == pytest.approx(oracle(old, WORD, ids)[:end], abs=TOLERANCE)


def test_the_first_token_under_the_new_label_is_sampled_by_the_new_weights(engine: ServedEngine, models: Path) -> None:
    """Its logits come from the new weights, not from what the old ones left over before the pause.

    For one choice in thousands both give its token nearly the same probability, so most of them decide.
    """
    old = load_model(models / "a")
    choices = swapped_in_the_middle(engine, models / "b")
    assert choices
    places = [choice["weight_versions"][1]["start"] for choice in choices]
    reported = [choice["logprobs"]["token_logprobs"][at] for choice, at in zip(choices, places, strict=True)]
    stale = [oracle(old, WORD, choice["token_ids"])[at] for choice, at in zip(choices, places, strict=True)]
    differing = sum(abs(now - before) > TOLERANCE for now, before in zip(reported, stale, strict=True))
    assert differing > len(choices) / 2


def nothing(folder: Path) -> None:
    """Delete the weights file."""
    (folder / "model.safetensors").unlink()


def cut_short(folder: Path) -> None:
    """Cut the weights file in the middle."""
    os.truncate(folder / "model.safetensors", 100_000)


def not_finite(folder: Path) -> None:
    """Put a NaN into one tensor."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")


def lacking(folder: Path) -> None:
    """Leave one tensor out."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


def misshapen(folder: Path) -> None:
    """Make one tensor too short."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")


def unknown(folder: Path) -> None:
    """Add a tensor that the model does not have."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.extra": torch.ones(2)}, folder / "model.safetensors")


@pytest.mark.parametrize("break_it", [nothing, cut_short, not_finite, lacking, misshapen, unknown])
def test_broken_weights_are_rejected_and_the_old_weights_stay(
    shared_engine: ServedEngine, models: Path, tmp_path: Path, break_it: Callable[[Path], None]
) -> None:
    """The answer is 500 and names the folder or tensor. The engine still samples with the old weights."""
    folder = tmp_path / "broken"
    shutil.copytree(models / "b", folder)
    break_it(folder)
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    response = shared_engine.post("/collective_rpc", call)
    assert response.status_code == 500
    assert str(folder) in response.json()["error"]["message"]
    assert shared_engine.http.get("/health").status_code == 200
    assert_sampled_by(load_model(models / "a"), shared_engine.complete(WORD, max_tokens=8)[0])


def test_an_unknown_call_is_answered_400(shared_engine: ServedEngine) -> None:
    """Unknown methods, a missing path, a label that is no version and an unknown way to pause are named."""
    for path, body in (
        ("/collective_rpc", {"method": "save_weights"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {}}),
        ("/update_weight_version", {"new_version": "newest"}),
        ("/pause?mode=later", None),
    ):
        response = shared_engine.post(path, body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, 400), path
    assert not shared_engine.http.get("/is_paused").json()["is_paused"]


# ---------------------------------------------------------------------- pauses


def test_keep_freezes_completions_until_resume(engine: ServedEngine) -> None:
    """No token is sampled while paused; afterwards all completions end as if nothing had been."""
    asked = engine.in_the_middle()
    engine.post("/pause?mode=keep")
    assert engine.http.get("/is_paused").json() == {"is_paused": True}
    frozen = engine.metric("vllm:generation_tokens_total")
    assert engine.http.get("/health").status_code == 200
    assert engine.metric("vllm:generation_tokens_total") == frozen
    assert not asked.done()
    engine.post("/resume")
    for choice in asked.result(TIMEOUT_S):
        assert choice["finish_reason"] in ("stop", "length")
        assert_sampled_by(engine.model, choice)


def test_abort_returns_the_tokens_so_far(engine: ServedEngine) -> None:
    """Partial tokens under finish reason abort, right logprobs included."""
    asked = engine.in_the_middle()
    engine.post("/pause?mode=abort")
    choices = asked.result(TIMEOUT_S)
    aborted = [choice for choice in choices if choice["finish_reason"] == "abort"]
    assert aborted
    for choice in aborted:
        assert 0 < len(choice["token_ids"]) < LONG["max_tokens"]
        assert_sampled_by(engine.model, choice)


def test_wait_finishes_completions_before_the_pause(engine: ServedEngine) -> None:
    """The pause is answered once everything in flight is finished; nothing is aborted."""
    asked = engine.in_the_middle()
    engine.post("/pause?mode=wait")
    assert engine.metric("vllm:num_requests_running") == 0
    assert {choice["finish_reason"] for choice in asked.result(TIMEOUT_S)} <= {"stop", "length"}


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_requests_sent_during_a_pause_wait_for_its_end(engine: ServedEngine, mode: str) -> None:
    """The engine queues the requests and does not reject them."""
    engine.post(f"/pause?mode={mode}")
    asked = in_background(engine.complete, WORD, max_tokens=4)
    eventually(lambda: engine.metric("vllm:num_requests_waiting") == 1, TIMEOUT_S)
    engine.post("/resume")
    assert asked.result(TIMEOUT_S)[0]["finish_reason"] in ("stop", "length")


# ---------------------------------------------------------------------- the process


def test_the_command_prints_its_address_and_ends_on_sigterm(models: Path, tmp_path: Path) -> None:
    """`replaybuf engine --port 0` prints the address it took, serves, and ends with exit code 0."""
    command = ["engine", "--model", str(models / "a"), "--port", "0"]
    log = tmp_path / "engine.log"
    with log.open("w") as errors, ForkedProcess("replaybuf", command, os.environ, errors, trainer=True) as process:
        try:
            line = process.stdout.readline()
            match = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", line)
            assert match, line + log.read_text()
            with httpx.Client(base_url=match[1], timeout=TIMEOUT_S) as http:
                assert http.get("/health").status_code == 200
                answer = http.post("/v1/completions", json={"prompt": WORD, "max_tokens": 2})
                assert answer.status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0, log.read_text()
        finally:
            process.kill()

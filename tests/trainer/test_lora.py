"""LoRA adapters of the small engine over HTTP: by name, in one batch, replaced in place, and with own versions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from replaybuf.generator.engines import Sampling, VllmEngine, open_engine
from replaybuf.generator.fleet import Fleet
from replaybuf_trainer.engine import served_models
from tests.trainer.adapter_folders import merged, write_adapter
from tests.trainer.served import NAME, TIMEOUT_S, WORD, ServedEngine, served
from tests.trainer.test_engine import assert_sampled_by
from tests.waiting import eventually, until


@pytest.fixture(scope="module")
def adapters(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of model `a`."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, models / "a", seed) for seed, name in enumerate(("code", "math"))}


def load(engine: ServedEngine, name: str, folder: Path, **fields: Any) -> httpx.Response:
    return engine.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder), **fields})


def loaded(engine: ServedEngine, adapters: dict[str, Path]) -> None:
    for name, folder in adapters.items():
        response = load(engine, name, folder)
        assert (response.status_code, response.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")


# ---------------------------------------------------------------------- sampling


def test_rows_of_both_adapters_and_the_base_share_a_batch_and_keep_their_own_logprobs(
    engine: ServedEngine, models: Path, adapters: dict[str, Path]
) -> None:
    """The requests wait in a pause, so that one wave holds all of them; the reference merges W + s B A."""
    loaded(engine, adapters)
    references = {name: merged(models / "a", folder) for name, folder in adapters.items()} | {NAME: engine.model}
    assert engine.post("/pause?mode=wait").status_code == 200
    names = list(references) * 2
    with ThreadPoolExecutor(len(names)) as threads:
        asked = [threads.submit(engine.complete, WORD, n=3, max_tokens=20, model=name) for name in names]
        eventually(lambda: engine.metric("vllm:num_requests_waiting") == 3 * len(names), TIMEOUT_S)
        assert engine.post("/resume").status_code == 200
        for name, future in zip(names, asked, strict=True):
            for choice in future.result():
                assert_sampled_by(references[name], choice)


def test_the_two_adapters_and_the_base_say_different_words(engine: ServedEngine, adapters: dict[str, Path]) -> None:
    loaded(engine, adapters)
    said = [engine.complete(WORD, max_tokens=12, temperature=0, model=name)[0] for name in (NAME, *adapters)]
    assert len({tuple(choice["token_ids"]) for choice in said}) == 3


@pytest.mark.parametrize(
    ("targets", "config"),
    [
        (("o_proj",), {}),
        (("gate_proj", "up_proj"), {"use_rslora": True}),
        (("q_proj",), {"target_modules": r".*\.self_attn\.q_proj"}),
        (("k_proj",), {"target_modules": ["self_attn.k_proj"], "lora_alpha": 3, "use_dora": False}),
    ],
)
def test_layers_and_scale_follow_the_adapters_configuration(
    engine: ServedEngine, models: Path, tmp_path: Path, targets: tuple[str, ...], config: dict[str, Any]
) -> None:
    folder = write_adapter(tmp_path / "one", models / "a", 7, targets, rank=2, **config)
    loaded(engine, {"one": folder})
    for choice in engine.complete(WORD, n=2, max_tokens=8, model="one"):
        assert_sampled_by(merged(models / "a", folder), choice)


def test_prompt_logprobs_are_those_of_the_adapter(
    engine: ServedEngine, models: Path, adapters: dict[str, Path]
) -> None:
    loaded(engine, adapters)
    choice = engine.complete(WORD, max_tokens=1, prompt_logprobs=0, model="code")[0]
    prompt_logprobs = [
        entry[str(token)]["logprob"] for token, entry in zip(WORD[1:], choice["prompt_logprobs"][1:], strict=True)
    ]
    with torch.inference_mode():
        logprobs = torch.log_softmax(merged(models / "a", adapters["code"])(torch.tensor([WORD])).logits[0], -1)
    assert prompt_logprobs == pytest.approx([float(logprobs[i, token]) for i, token in enumerate(WORD[1:])], abs=1e-4)


def test_an_adapter_is_applied_to_new_weights_of_the_base_model(
    engine: ServedEngine, models: Path, adapters: dict[str, Path]
) -> None:
    loaded(engine, adapters)
    engine.reload(models / "b", 1)
    assert_sampled_by(merged(models / "b", adapters["code"]), engine.complete(WORD, max_tokens=8, model="code")[0])


# ---------------------------------------------------------------------- names


def test_models_lists_the_base_model_and_its_adapters(engine: ServedEngine, adapters: dict[str, Path]) -> None:
    """As in vLLM, an adapter has its folder as root and the base model as parent."""
    loaded(engine, adapters)
    cards = engine.http.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [NAME, "code", "math"]
    assert [card.get("parent") for card in cards] == [None, NAME, NAME]
    assert cards[1]["root"] == str(adapters["code"])


def test_an_unloaded_or_unknown_adapter_is_answered_404(engine: ServedEngine, adapters: dict[str, Path]) -> None:
    loaded(engine, adapters)
    response = engine.post("/v1/unload_lora_adapter", {"lora_name": "code"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'code' removed successfully.")
    for path, body in (
        ("/v1/completions", {"prompt": WORD, "model": "code"}),
        ("/tokenize", {"prompt": "culla", "model": "code"}),
        ("/update_weight_version", {"new_version": 1, "model": "code"}),
        ("/v1/unload_lora_adapter", {"lora_name": "code"}),
    ):
        response = engine.post(path, body)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (404, "NotFoundError"), path
        assert "'code'" in error["message"] and "math" in error["message"]
    assert engine.http.get("/weight_info?model=code").status_code == 404
    assert engine.ask(WORD, model="math", max_tokens=1).status_code == 200
    assert load(engine, "code", adapters["code"]).status_code == 200


def test_a_name_in_use_and_too_many_adapters_are_answered_400(
    engine: ServedEngine, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(engine, adapters)
    monkeypatch.setattr(served_models, "MOST_ADAPTERS", 2)
    for name, words in (("code", "load_inplace"), (NAME, "base model"), ("third", "maximum is 2"), ("", "lora_name")):
        response = load(engine, name, adapters["math"])
        assert response.status_code == 400 and words in response.json()["error"]["message"], response.text
    assert load(engine, "code", adapters["code"], load_inplace=True).status_code == 200
    assert load(engine, "code", adapters["code"], load_inplace=True, weight_version="new").status_code == 400


# ---------------------------------------------------------------------- versions


def version(engine: ServedEngine, name: str) -> str:
    label: str = engine.http.get("/weight_info", params={"model": name}).json()["weight_version"]
    return label


def test_every_adapter_has_a_version_of_its_own(engine: ServedEngine, adapters: dict[str, Path]) -> None:
    loaded(engine, adapters)
    assert load(engine, "code", adapters["code"], load_inplace=True, weight_version="4").status_code == 200
    assert engine.post("/update_weight_version", {"new_version": "2", "model": "math"}).status_code == 200
    assert [version(engine, name) for name in (NAME, "code", "math")] == ["0", "4", "2"]
    assert engine.version() == "0"
    for name, expected in ((NAME, "0"), ("code", "4"), ("math", "2")):
        choice = engine.complete(WORD, max_tokens=3, model=name)[0]
        assert [span["version"] for span in choice["weight_versions"]] == [expected]
    assert load(engine, "math", adapters["math"], load_inplace=True).status_code == 200
    assert version(engine, "math") == "2", "without weight_version the label stays, as in vLLM"


def held(engine: ServedEngine, name: str) -> Any:
    """Request long completions of a model, and freeze the engine in the middle of them."""
    asked = engine.in_the_middle(seed=0, model=name)
    assert engine.post("/pause?mode=keep").status_code == 200
    return asked


def test_a_replacement_takes_effect_at_the_next_token_of_running_completions(
    engine: ServedEngine, models: Path, adapters: dict[str, Path]
) -> None:
    """The weights and the version change together; the other adapter keeps both."""
    loaded(engine, adapters)
    asked = held(engine, "code")
    assert load(engine, "code", adapters["math"], load_inplace=True, weight_version=1).status_code == 200
    assert engine.post("/resume").status_code == 200
    choices = [choice for choice in asked.result(TIMEOUT_S) if len(choice["weight_versions"]) == 2]
    assert choices, "no completion lasted until the replacement"
    old = merged(models / "a", adapters["code"])
    for choice in choices:
        first, second = choice["weight_versions"]
        assert (first["version"], second["version"], first["end"]) == ("0", "1", second["start"])
        head = choice | {"token_ids": choice["token_ids"][: first["end"]]}
        head["logprobs"] = {"token_logprobs": choice["logprobs"]["token_logprobs"][: first["end"]]}
        assert_sampled_by(old, head)
    new = merged(models / "a", adapters["math"])
    for name, expected in (("code", "1"), ("math", "0")):
        choice = engine.complete(WORD, max_tokens=8, model=name)[0]
        assert_sampled_by(new, choice)
        assert choice["weight_versions"][0]["version"] == expected


def test_completions_that_run_while_their_adapter_is_unloaded_end_with_its_weights(
    engine: ServedEngine, models: Path, adapters: dict[str, Path]
) -> None:
    loaded(engine, adapters)
    asked = held(engine, "code")
    assert engine.post("/v1/unload_lora_adapter", {"lora_name": "code"}).status_code == 200
    assert engine.post("/resume").status_code == 200
    reference = merged(models / "a", adapters["code"])
    for choice in asked.result(TIMEOUT_S):
        assert choice["finish_reason"] in ("stop", "length")
        assert_sampled_by(reference, choice)


def test_a_generators_client_reads_the_version_and_the_context_of_its_adapter(
    engine: ServedEngine, adapters: dict[str, Path]
) -> None:
    loaded(engine, adapters)
    assert load(engine, "code", adapters["code"], load_inplace=True, weight_version=4).status_code == 200

    async def main() -> None:
        for name, expected in ((NAME, 0), ("code", 4), ("math", 0)):
            client = open_engine(engine.url, timeout_s=TIMEOUT_S, model=name)
            await client.prepare()
            assert (client.model, client.max_model_len) == (name, 256)
            assert await client.loaded_version() == expected
            sample = await client.generate(np.array(WORD, np.int32), Sampling(n=2, max_tokens=4))
            assert set(sample.version_spans[:, 1].tolist()) == {expected} and sample.exact
            await client.aclose()

    asyncio.run(main())


def test_a_generator_waits_for_its_adapter_after_a_restart_of_the_engine(
    models: Path, adapters: dict[str, Path]
) -> None:
    """The restarted engine lost the adapter, then has an old version of it, then the published one."""
    prompt, sampling = np.array(WORD, np.int32), Sampling(n=2, max_tokens=4)

    async def main(first: contextlib.ExitStack, second: contextlib.ExitStack) -> None:
        engine = first.enter_context(served(models / "a"))
        assert load(engine, "code", adapters["code"], weight_version=2).status_code == 200
        fleet = Fleet([VllmEngine(engine.url, timeout_s=TIMEOUT_S, model="code")], patience_s=TIMEOUT_S)
        await fleet.prepare(TIMEOUT_S)
        fleet.learn_published(2)
        assert (await fleet.generate(prompt, sampling)).policy_version == 2
        await asyncio.to_thread(first.close)
        anew = second.enter_context(served(models / "a", engine.port))
        asked = asyncio.create_task(fleet.generate(prompt, sampling))
        await until(lambda: "the requested model is 'code'" in str(fleet.status()[0].fault))
        assert (await asyncio.to_thread(load, anew, "code", adapters["code"])).status_code == 200
        await until(lambda: "has version 0; published is 2" in str(fleet.status()[0].fault))
        again = {"load_inplace": True, "weight_version": 2}
        assert (await asyncio.to_thread(load, anew, "code", adapters["code"], **again)).status_code == 200
        assert (await asked).policy_version == 2
        await fleet.aclose()

    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        asyncio.run(main(first, second))


# ---------------------------------------------------------------------- broken adapters


def edited(**fields: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file(change(load_file(path)), path)

    return edit


FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("status", "word", "break_it"),
    [
        (404, "adapter_config.json", shutil.rmtree),
        (400, "truncated", lambda folder: (folder / "adapter_config.json").write_text("{")),
        (400, "cannot be read", lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"0123456789")),
        (400, "peft_type", edited(peft_type="IA3")),
        (400, "`$.r`", edited(r=0)),
        (400, "has shape", edited(r=5)),
        (400, "use_dora", edited(use_dora=True)),
        (400, "modules_to_save", edited(modules_to_save=["lm_head"])),
        (400, "bias", edited(bias="all")),
        (400, "no linear layer", edited(target_modules=["lm_head"])),
        (400, "regular expression", edited(target_modules="(")),
        (400, "unknown", edited(target_modules=["q_proj"])),
        (400, "missing", tensors(lambda parts: {name: parts[name] for name in parts if name != FIRST})),
        (400, "NaN", tensors(lambda parts: parts | {FIRST: parts[FIRST] * float("nan")})),
    ],
)
def test_a_broken_adapter_is_rejected_and_the_old_one_stays(
    shared_engine: ServedEngine,
    models: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
    status: int,
    word: str,
    break_it: Callable[[Path], Any],
) -> None:
    assert load(shared_engine, "code", adapters["code"], load_inplace=True).status_code == 200
    broken = tmp_path / "broken"
    shutil.copytree(adapters["math"], broken)
    break_it(broken)
    for name in ("code", "fresh"):
        response = load(shared_engine, name, broken, load_inplace=True, weight_version=9)
        assert response.status_code == status, response.text
        assert word in response.json()["error"]["message"]
    assert version(shared_engine, "code") == "0"
    assert "fresh" not in shared_engine.http.get("/v1/models").text
    reference = merged(models / "a", adapters["code"])
    assert_sampled_by(reference, shared_engine.complete(WORD, max_tokens=8, model="code")[0])

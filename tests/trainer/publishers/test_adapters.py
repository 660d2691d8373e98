"""LoRA adapters on their way to real small engines: by name, in place, and again after a restart."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from replaybuf.errors import ServiceUnavailable
from replaybuf_trainer.publishers.reload import FolderLoader
from tests.trainer.adapter_folders import merged, write_adapter
from tests.trainer.publishers.test_engines import TIMEOUT_S, Asked, ScriptedEngine, scripted, watching
from tests.trainer.served import WORD, ServedEngine, oracle, served
from tests.waiting import eventually

__all__ = ["scripted"]
PERIOD_S = 0.01


@pytest.fixture
def folders(models: Path, tmp_path: Path) -> list[Path]:
    """Three adapters with other weights each."""
    return [write_adapter(tmp_path / str(seed), models / "a", seed) for seed in range(3)]


def version(engine: ServedEngine, name: str) -> str | None:
    response = engine.http.get("/weight_info", params={"model": name})
    return response.json()["weight_version"] if response.status_code == 200 else None


def check_sampled(engine: ServedEngine, name: str, base: Path, adapter: Path) -> None:
    choice = engine.complete(WORD, max_tokens=12, model=name)[0]
    expected = oracle(merged(base, adapter), WORD, choice["token_ids"])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_each_adapter_is_loaded_in_place_under_its_own_version(
    engine: ServedEngine, models: Path, folders: list[Path]
) -> None:
    with watching(engine.url) as made:
        made.switch(FolderLoader(folders[0], "code"), 0, Asked())
        made.switch(FolderLoader(folders[1], "math"), 5, Asked())
        made.switch(FolderLoader(folders[2], "code"), 1, Asked())
    assert (version(engine, "code"), version(engine, "math"), engine.version()) == ("1", "5", "0")
    check_sampled(engine, "code", models / "a", folders[2])
    check_sampled(engine, "math", models / "a", folders[1])


def test_a_restarted_engine_gets_all_adapters_again(models: Path, folders: list[Path]) -> None:
    with contextlib.ExitStack() as first:
        port = first.enter_context(served(models / "a")).port
        with watching(f"http://127.0.0.1:{port}") as made:
            made.switch(FolderLoader(folders[0], "code"), 3, Asked())
            made.switch(FolderLoader(folders[1], "math"), 4, Asked())
            made.watch(Asked(), PERIOD_S)
            first.close()
            with served(models / "a", port) as engine:
                eventually(lambda: made.reloads == 2, TIMEOUT_S)
                assert (version(engine, "code"), version(engine, "math")) == ("3", "4")
                check_sampled(engine, "code", models / "a", folders[0])


def test_a_removed_adapter_is_unloaded_and_loaded_again_when_it_returns(
    engine: ServedEngine, folders: list[Path]
) -> None:
    """A version that is published while it is away waits until then."""
    with watching(engine.url) as made:
        made.switch(FolderLoader(folders[0], "code"), 0, Asked())
        made.switch(FolderLoader(folders[1], "math"), 0, Asked())
        made.retire(frozenset({"code"}))
        made.switch(FolderLoader(folders[2], "code"), 1, Asked())
        assert (version(engine, "code"), version(engine, "math")) == (None, "0")
        made.watch(Asked(), PERIOD_S)
        made.retire(frozenset())
        eventually(lambda: version(engine, "code") == "1", TIMEOUT_S)


def test_the_error_for_an_engine_without_lora_names_the_options_of_vllm(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    """And the engine is resumed."""
    scripted.answers["/v1/load_lora_adapter"] = [404]
    with (
        watching(scripted.url) as made,
        pytest.raises(ServiceUnavailable, match=r"404.*start vLLM with --enable-lora"),
    ):
        made.switch(FolderLoader(tmp_path, "code"), 0, Asked())
    assert scripted.paths[-1] == "/resume"

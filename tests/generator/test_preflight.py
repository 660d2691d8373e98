"""Checks before the first ticket, and the wait for the run."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replaybuf.client.client import AsyncClient
from replaybuf.errors import DataLost, Invalid, NotFound, ServiceUnavailable, Unreadable
from replaybuf.generator.preflight import check_fit, check_group_size, check_vocabulary, wait_for_run
from replaybuf.wire.answer.run_status import RunFacts
from replaybuf.wire.text.model_tokenizer import Tokenizer
from tests.generator.doubles import TIMEOUT_S, ServiceDouble, make_prompt, make_tokenizer, write_tokenizer


def facts(**config: Any) -> RunFacts:
    return msgspec.convert(config, RunFacts)


def fit(run: RunFacts, *texts: str, **options: Any) -> None:
    arguments: dict[str, Any] = {"group_size": 2, "max_tokens": 10, "longest": {}}
    check_fit(run, [make_prompt(text) for text in texts], **arguments | options)


async def test_it_waits_for_a_run_that_comes_late(caplog: pytest.LogCaptureFixture) -> None:
    service = ServiceDouble(group_size=8)
    service.faults["run"] = deque([ServiceUnavailable("starting"), NotFound("run 'r' is not known")])
    async with service.up(), AsyncClient(service.url, "r") as client:
        outcome = await wait_for_run(client, TIMEOUT_S)
    assert outcome.group_size == 8
    assert re.search(r"waiting for the run, up to \d+ s: run 'r' is not known", caplog.text)


@pytest.mark.parametrize("fault", [DataLost("restore the append-only file"), Unreadable("restore the keys")])
async def test_it_waits_until_an_operator_has_restored_the_data(
    fault: DataLost, caplog: pytest.LogCaptureFixture
) -> None:
    """As a generator that is already running does."""
    service = ServiceDouble(group_size=8)
    service.faults["run"] = deque([fault])
    async with service.up(), AsyncClient(service.url, "r") as client:
        outcome = await wait_for_run(client, TIMEOUT_S)
    assert outcome.group_size == 8
    assert f"waiting for the run, up to {TIMEOUT_S:.0f} s: {fault.detail}" in caplog.text


def test_data_that_nobody_restores_end_the_start() -> None:
    async def main() -> None:
        service = ServiceDouble(group_size=8)
        service.faults["run"] = deque([DataLost("restore the append-only file")] * 10)
        async with service.up(), AsyncClient(service.url, "r") as client:
            await wait_for_run(client, 0.3)

    with pytest.raises(DataLost, match=r"restore the append-only file \(waited 0\.3 s\)"):
        asyncio.run(main())


async def test_each_reason_for_waiting_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not at every try."""
    service = ServiceDouble(group_size=8)
    faults = [ServiceUnavailable("starting")] * 3 + [NotFound("run 'r' is not known")] * 2
    service.faults["run"] = deque(faults)
    async with service.up(), AsyncClient(service.url, "r") as client:
        await wait_for_run(client, TIMEOUT_S)
    assert [record.message.partition(": ")[2] for record in caplog.records if "waiting for" in record.message] == [
        "starting",
        "run 'r' is not known",
    ]


def test_after_the_timeout_the_error_names_the_service() -> None:
    async def main() -> None:
        async with AsyncClient("http://127.0.0.1:9", "r") as client:
            await wait_for_run(client, 0.3)

    with pytest.raises(ServiceUnavailable, match=r"http://127\.0\.0\.1:9.*waited 0\.3 s"):
        asyncio.run(main())


@pytest.mark.parametrize(("asked", "configured", "size"), [(4, None, 4), (None, 8, 8), (8, 8, 8)])
def test_the_group_size_is_that_of_the_option_or_the_run(asked: int | None, configured: int | None, size: int) -> None:
    assert check_group_size(asked, facts(group_size=configured)) == size


@pytest.mark.parametrize(
    ("asked", "configured", "message"),
    [
        (4, 8, "group_size is 4; the run's group_size is 8"),
        (None, None, "group_size is not set"),
        (0, None, "group_size is 0; the minimum is 1"),
    ],
)
def test_an_invalid_group_size_is_rejected(asked: int | None, configured: int | None, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        check_group_size(asked, facts(group_size=configured))


def test_a_fitting_configuration_passes() -> None:
    fit(facts(batch={"seq_len": 13, "tokens_per_batch": 8}), "a", "abc", longest={"the engine's max_model_len": 13})


def test_a_rollout_that_can_exceed_seq_len_is_rejected_with_the_bound() -> None:
    with pytest.raises(Invalid, match=r"prompt 'abc' .* a rollout has 13; the run's batch.seq_len is 12") as caught:
        fit(facts(batch={"seq_len": 12}), "a", "abc")
    assert (caught.value.name, caught.value.bound) == ("max_tokens", 9)


def test_a_run_that_truncates_accepts_any_length() -> None:
    fit(facts(batch={"seq_len": 12, "overlong": "truncate"}), "abc")


def test_a_rollout_that_can_exceed_the_engines_context_is_rejected() -> None:
    with pytest.raises(Invalid, match="the engine's max_model_len is 12"):
        fit(facts(), "abc", longest={"the engine's max_model_len": 12})


def test_a_group_that_fits_no_batch_is_rejected() -> None:
    with pytest.raises(Invalid, match=r"a group of 2 rollouts .* at least 8 tokens; .*tokens_per_batch is 7"):
        fit(facts(batch={"tokens_per_batch": 7}), "abc")


def test_an_unknown_estimator_is_rejected() -> None:
    with pytest.raises(Invalid, match="advantage is 'ppo'"):
        fit(facts(advantage="ppo"), "a")


def test_a_tokenizer_with_more_ids_than_the_model_is_rejected(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 28}')
    with pytest.raises(Invalid, match=r"has ids up to 28; vocab_size in .*config\.json is 28"):
        check_vocabulary(facts(), Tokenizer(tmp_path))


def test_a_tokenizer_with_more_ids_than_the_run_is_rejected(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    with pytest.raises(Invalid, match=r"has ids up to 28; the run's vocab_size is 28"):
        check_vocabulary(facts(vocab_size=28), tokenizer)
    check_vocabulary(facts(vocab_size=29), tokenizer)
    check_vocabulary(facts(vocab_size=64), tokenizer)

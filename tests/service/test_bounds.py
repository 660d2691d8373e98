"""Each string and number of a request at its bound and above it, found from the shapes of the contract."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import msgspec.inspect as inspect
import numpy as np
import pytest
import redis

from replaybuf import Client
from replaybuf.service.http.body.requests import Number, Real, Text
from replaybuf.service.http.call.calls import CALLS, Call
from replaybuf.store.entries import EntryStrings, encode_strings
from replaybuf.wire.batch import read_batch
from tests.conftest import RunClient, ServeProcess, group

SPEC = {"name": "one-step-off-policy", "options": {}}
LIMITS = {"max_tokens_live": 10**6, "max_bytes_live": 2**30, "max_bytes_in_memory": 2**30, "max_group_bytes": 2**20}
EXAMPLES: dict[str, Any] = {
    "RunConfig": {
        "batch": {
            "tokens_per_batch": 1024,
            "groups_per_batch": 1,
            "seq_len": 64,
            "pad_to_multiple_of": 1,
            "overlong": "reject",
            "tail": "train",
            "timeout_s": 1.0,
            "min_groups": 1,
        },
        "strategy": SPEC,
        "filters": [{"name": "zero-variance", "options": {}}],
        "admissions": [{"name": "toploc", "options": {}, "timeout_s": 1.0}],
        "group_size": 2,
        "min_group_size": 1,
        "vocab_size": 100,
        "steps_per_publish": 1,
        "max_steps": 1000,
        "stale_token_mask": 1,
        "on_stale": {"math": "mask"},
        "max_reissues": 2,
        "seed": 0,
        "advantage": "grpo",
        "tickets": {
            "ttl_s": 600.0,
            "max_attempts": 3,
            "prompts": 1000,
            "heartbeat_s": 15.0,
            "max_failed_share": 0.5,
            "on_failed_share": "alarm",
        },
        "limits": LIMITS,
        "adapters": {
            "a": {"groups_per_batch": 1, "prompts": 1, "steps_per_publish": 1, "paused": False, "removed": False}
        },
        "history": {"samples_per_step": 4},
        "spill": {"url": f"file://{tempfile.gettempdir()}/replaybuf-test-bounds"},
    },
    "ConfigPatch": {
        "strategy": SPEC,
        "filters": [{"name": "zero-variance", "options": {}}],
        "admissions": [{"name": "toploc", "options": {}, "timeout_s": 1.0}],
        "limits": LIMITS | {"max_bytes_in_memory": None},  # it needs a spill folder
        "batch": {
            "tokens_per_batch": {"per_rank": 1024},
            "groups_per_batch": 1,
            "tail": "train",
            "timeout_s": 1.0,
            "min_groups": 1,
        },
        "on_stale": {"math": "mask"},
        "max_reissues": 2,
        "state": "running",
        "adapters": {"a": {"groups_per_batch": 1, "prompts": 1, "steps_per_publish": 1, "paused": False}},
    },
    "HeartbeatRequest": {
        "in_flight": 0,
        "slots": 1,
        "engines": 1,
        "held_back_by": "p",
        "failure": {"reason": "reward_raised", "prompt_index": 0, "traceback": "ValueError"},
    },
    "TicketRequest": {"producer": "p", "count": 1, "adapter": "", "wait_ms": 0, "max_tokens": 1},
    "EvaluationRequest": {
        "name": "x",
        "adapter": "",
        "version": 0,
        "versions": [0],
        "reward_mean": 0.0,
        "standard_error": 0.0,
        "parts": {"a": 0.0},
        "rollouts": 1,
        "failed": 0,
        "samples": 1,
        "temperature": 1.0,
        "max_tokens": 1,
        "seconds": 1.0,
        "producer": "p",
    },
    "AttachRequest": {
        "dp_world_size": 1,
        "resume_step": 0,
        "on_resume": "redeliver",
        "seq_len": 64,
        "pad_to_multiple_of": 1,
        "cost": {"linear": 1.0, "quadratic": 1.0},
        "fixed": True,
        "per_token_versions": True,
        "lengths": True,
        "reward_parts": True,
        "metadata": True,
    },
    "AckRequest": {"epoch": 1, "feedback": {}, "metrics": {"loss": 0.5}},
    "PolicyRequest": {"epoch": 1, "version": 0, "weights_uri": "s3://w", "adapter": ""},
    "ColumnsRequest": {"columns": {}},
    "CursorRequest": {"position": "s0"},
    "CheckpointRequest": {"epoch": 1, "step": 0, "keep": 1},
    "LossRequest": {"entries": 0, "groups": 0},
}
"""One body per shape, with every field."""


class Case(NamedTuple):
    """A field of a request, a value at its bound and one above. `error`: the name that the error gives."""

    call: Call
    path: tuple[str | int, ...]
    allowed: Any
    above: Any
    error: str


def cases_in(call: Call, kind: inspect.Type, path: tuple[str | int, ...], example: Any) -> Iterator[Case]:
    """List the bounded fields inside a type."""
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    match kind:
        case inspect.Metadata() if kind.extra and "most_bytes" in kind.extra:
            most = kind.extra["most_bytes"]
            yield Case(call, path, "x" * most, "x" * (most + 1), name)
            yield Case(call, path, "\u00e9" * (most // 2), "\u00e9" * (most // 2 + 1), name)
            breaks = kind.extra.get("lines", False)
            yield Case(call, path, "a\n\tb" if breaks else "a b", "a\rb" if breaks else "a\nb", name)
        case inspect.Metadata():
            yield from cases_in(call, kind.type, path, example)
        case inspect.UnionType():
            for part in kind.types:
                yield from cases_in(call, part, path, example)
        case inspect.IntType() | inspect.FloatType() if kind.le is not None:
            more = kind.le * 2 if isinstance(kind, inspect.FloatType) else kind.le + 1
            yield Case(call, path, kind.le, more, name)
            if kind.ge is not None:
                yield Case(call, path, kind.ge, kind.ge - 1, name)
        case inspect.StructType() if isinstance(example, dict):  # else the example is another part of a union
            assert example.keys() == {field.name for field in kind.fields}, f"complete the example of {kind.cls}"
            for field in kind.fields:
                yield from cases_in(call, field.type, (*path, field.name), example[field.name])
        case inspect.ListType():
            assert kind.max_length
            yield Case(call, path, example * kind.max_length, example * (kind.max_length + 1), name)
            yield from cases_in(call, kind.item_type, (*path, 0), example[0])
        case inspect.DictType() if example:
            assert kind.max_length
            (key,) = example
            value = example[key]
            many = {f"k{n}": value for n in range(kind.max_length + 1)}
            yield Case(call, path, {f"k{n}": value for n in range(kind.max_length)}, many, name)
            yield Case(call, path, {"x" * 63: value}, {"x" * 257: value}, f"{name} key")
            yield from cases_in(call, kind.value_type, (*path, key), value)


CASES = [
    case
    for call in CALLS
    if call.body and call.body.__name__ != "GroupsRequest"
    for case in cases_in(call, inspect.type_info(call.body), (), EXAMPLES[call.body.__name__])
]


def with_value(body: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return a copy of a body with another value at `path`."""
    changed = copy.deepcopy(body)
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.call.body.__name__} {case.error} {str(case.allowed)[:12]}"
)
def test_a_value_is_accepted_at_its_bound_and_rejected_above_by_name(run: RunClient, case: Case) -> None:
    """At the bound another check may still reject the value, for example a `pad_to_multiple_of` beyond `seq_len`."""
    assert case.call.body
    if case.call.path != "/v1/runs/{run}" or case.call.method != "PUT":
        run.put(batch={"groups_per_batch": 1})
        run.attach()
    path = case.call.path.replace("{run}", run.run).replace("{step}", "0").replace("{producer:path}", "p")
    example = EXAMPLES[case.call.body.__name__]
    above = run.http.request(case.call.method, path, json=with_value(example, case.path, case.above))
    assert above.status_code == 422, above.text
    assert above.json()["name"] == case.error, above.text
    allowed = run.http.request(case.call.method, path, json=with_value(example, case.path, case.allowed))
    assert allowed.status_code < 500, allowed.text
    if allowed.status_code == 422:
        assert allowed.json()["bound"] != above.json()["bound"], allowed.text
        assert "bytes; the maximum" not in allowed.json()["detail"]


PARAMETERS = [(call, parameter) for call in CALLS for parameter in call.query or ()]


@pytest.mark.parametrize(
    ("call", "parameter"),
    PARAMETERS,
    ids=lambda part: part.name if isinstance(part, Number | Real | Text) else part.template,
)
def test_every_query_parameter_is_bounded(run: RunClient, call: Call, parameter: Number | Real | Text) -> None:
    run.put(batch={"groups_per_batch": 1})
    run.attach()
    run.post("tickets", producer="p")
    path = call.path.replace("{run}", run.run).replace("{step}", "0").replace("{ticket:path}", "t0-0-1-1")
    above: tuple[Any, ...] = ("x" * 5000, "a\nb") if isinstance(parameter, Text) else (parameter.high * 2,)
    for value in above:
        body = EXAMPLES.get(call.body.__name__) if call.body else None
        answer = run.http.request(call.method, path, params={"epoch": 1, parameter.name: value}, json=body)
        unknown = "epoch" not in {field.name for field in call.query or ()}
        if unknown:
            answer = run.http.request(call.method, path, params={parameter.name: value}, json=body)
        assert (answer.status_code, answer.json()["name"]) == (422, parameter.name), answer.text
        assert len(answer.content) < 3000


LONG, UNPRINTABLE = "x" * 257, "a\nb"


@pytest.mark.parametrize("value", [LONG, UNPRINTABLE, "\u00e9" * 129])
@pytest.mark.parametrize("place", ["group_id", "prompt_id", "ticket", "adapter", "rewards", "finish_reason"])
def test_a_group_with_a_string_above_its_bound_is_rejected(run: RunClient, place: str, value: str) -> None:
    run.put(batch={"groups_per_batch": 1})
    made = group("a")
    for rollout in made["rollouts"]:
        if place == "rewards":
            rollout["rewards"] = {value: 1.0}
        if place == "finish_reason":
            rollout["finish_reason"] = value
    if place in ("group_id", "prompt_id", "ticket", "adapter"):
        made[place] = value
    (result,) = run.append(made)
    assert (result["status"], result["reason"]) == ("rejected", "bad_name" if place != "ticket" else result["reason"])
    assert run.state()["groups"]["stored"] == 0


@pytest.mark.parametrize(
    "group_id", ["x" * 256, "\u00e9" * 128, "a b", "/", "a//b/", "..", ".", "%2F", "?#", "\U0001f600"]
)
def test_every_id_that_is_stored_can_be_read_back(run: RunClient, service: ServeProcess, group_id: str) -> None:
    run.put(batch={"groups_per_batch": 1})
    assert run.append(group(group_id, prompt_id="p"))[0]["status"] == "stored"
    with Client(service.url, run.run) as client:
        assert client.get_group(group_id).group_id == group_id


EXTREMES = [-(2**70), -(2**63), -1, 2**31, 2**53, 2**63, 2**64, 2**70, 3.5e38, 1e308, -1e308]


@pytest.mark.parametrize("value", EXTREMES)
def test_no_number_in_a_group_breaks_the_run(run: RunClient, value: float) -> None:
    """The group is rejected or its request is invalid, or it is trained on as it is, and the next group enters."""
    run.put(batch={"groups_per_batch": 1}, advantage="rloo", steps_per_publish=1000)
    for name in ("policy_version", "prompt_index"):
        answer = run.post("groups", groups=[group("a") | {name: value}])
        assert 400 <= answer.status_code < 500 or answer.status_code == 200
    spans = [[[value, 0, 3]], [[0, value, 3]], [[0, 0, value]]]
    for name, values in (
        ("prompt_ids", [[value]]),
        ("completion_ids", [[value] * 3]),
        ("completion_mask", [[value] * 3]),
        ("inference_logprobs", [[value] * 3]),
        ("ref_logprobs", [[value] * 3]),
        ("token_advantages", [[value] * 3]),
        ("reward", [value]),
        ("rewards", [{"a": value}]),
        ("advantage", [value]),
        ("temperature", [value]),
        ("version_spans", spans),
    ):
        for field_value in values:
            wire = group(f"{name}-{field_value}")
            for rollout in wire["rollouts"]:
                rollout[name] = field_value
            answer = run.post("groups", groups=[wire])
            assert 400 <= answer.status_code < 500 or answer.status_code == 200, answer.text
    assert run.append(group("good"))[0]["status"] == "stored"
    epoch = run.attach()
    stored = run.state()["groups"]["stored"]
    for step in range(stored):
        body = run.batch(step, epoch)
        assert body.status_code == 200, body.text
        for micro_batch in read_batch(body.content).micro_batches:
            assert np.isfinite(micro_batch.advantages).all()
        assert run.ack(step, epoch).status_code == 200


def test_opposite_rewards_near_the_largest_float32_are_rejected(run: RunClient) -> None:
    """Their difference is infinite in the float32 that the trainer gets."""
    run.put(batch={"groups_per_batch": 1}, advantage="dr-grpo")
    made = group("a")
    made["rollouts"][0]["reward"], made["rollouts"][1]["reward"] = 3.3e38, -3.3e38
    made["rollouts"].append(dict(made["rollouts"][0]))
    (result,) = run.append(made)
    assert (result["status"], result["reason"]) == ("rejected", "non_finite_advantages")


def test_a_group_with_long_ids_written_past_the_service_becomes_a_dead_letter(
    run: RunClient, service: ServeProcess
) -> None:
    """A record of many such groups is larger than Redis accepts; the run continues without them."""
    run.put(batch={"groups_per_batch": 1})
    run.append(group("long"), group("short"))
    with redis.Redis(unix_socket_path=service.valkey_socket) as valkey:
        index = f"rb:{{{run.run}}}:idx"
        (_, first), (_, second) = valkey.xrange(index)
        strings = msgspec.msgpack.decode(first[b"s"], type=EntryStrings)
        strings = msgspec.structs.replace(strings, group_id="x" * 1000)
        with valkey.pipeline(transaction=True) as at_once:  # a service that looks between would report lost data
            at_once.delete(index)
            at_once.xadd(index, {"n": first[b"n"], "s": encode_strings(strings)}, id="1-0")
            at_once.xadd(index, {"n": second[b"n"], "s": second[b"s"]}, id="2-0")
            at_once.execute()
    assert run.batch(0, run.attach()).status_code == 200
    state = run.state()["groups"]
    assert (state["dead_lettered"], state["in_batches"]) == (1, 1)


def test_a_page_of_the_ledger_ends_after_8_mib(run: RunClient) -> None:
    """Acks with large feedback would make a page of 1 GB; `next` continues where the page ended."""
    run.put(batch={"groups_per_batch": 1}, steps_per_publish=1000)
    epoch = run.attach()
    for step in range(11):
        run.append(group(f"g{step}"))
        assert run.batch(step, epoch).status_code == 200
        assert run.ack(step, epoch, feedback={"notes": "x" * 1_000_000}).status_code == 200
    pages: list[dict[str, Any]] = []
    after = 0
    while not pages or pages[-1]["next"]:
        answer = run.get("ledger", after=after, limit=1000)
        assert len(answer.content) < 10 << 20
        pages.append(answer.json())
        after = pages[-1]["next"]
    assert len(pages) == 2
    entries = [record["entry"] for page in pages for record in page["records"]]
    assert entries == list(range(1, len(entries) + 1))
    assert sum(record["type"] == "ACK" for page in pages for record in page["records"]) == 11

"""Invalid requests get a 4xx problem with name, value and bound."""

from __future__ import annotations

import pytest

from replaybuf.service.http.call.calls import CALLS, Call
from tests.conftest import JSON, RunClient, group

PLACES = {"run": "nested", "step": "0", "ticket": "t0-0-1-1", "group_id": "a", "producer": "p", "name": "c"}
WITH_BODY = [call for call in CALLS if call.body is not None]


def path_of(run: RunClient, template: str) -> str:
    """Fill in the parameters of a path."""
    return template.format(**PLACES | {"run": run.run})


def name_of(call: Call) -> str:
    """Return the name of a call in docs/http/."""
    return f"{call.method} {call.template}"


@pytest.mark.parametrize("call", WITH_BODY, ids=name_of)
@pytest.mark.parametrize("body", ["@", '{"x": @}', '{"groups": [@]}', '{"metadata": @}', '{"feedback": @}'])
def test_40_000_nested_brackets_are_malformed_on_every_route(run: RunClient, call: Call, body: str) -> None:
    """Closed or not: no JSON parser recurses into them."""
    run.put(batch={"groups_per_batch": 1})
    for brackets in ("[" * 40_000, "[" * 40_000 + "]" * 40_000, '{"x":' * 40_000 + "1" + "}" * 40_000):
        answer = run.http.request(
            call.method, path_of(run, call.template), content=body.replace("@", brackets), headers=JSON
        )
        assert (answer.status_code, answer.json()["name"]) == (400, "body"), answer.text


BEYOND = ["-1", "9007199254740992", "18446744073709551616", "1" + "0" * 400, "9" * 5000]


@pytest.mark.parametrize("value", BEYOND, ids=["below 0", "above 2^53", "above 64 bits", "401 digits", "5000 digits"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("after", "ledger?after={}"),
        ("limit", "ledger?limit={}"),
        ("dp_rank", "batches/0?epoch=1&dp_rank={}"),
        ("step", "batches/{}?epoch=1"),
        ("generation", "batches/0/record?generation={}"),
    ],
)
def test_a_number_in_a_query_or_path_outside_its_bounds_is_rejected(
    run: RunClient, name: str, call: str, value: str
) -> None:
    """Of all parameters in test_bounds.py and test_openapi.py."""
    run.put(batch={"groups_per_batch": 1})
    run.attach()
    answer = run.http.get(f"{run.path}/{call.format(value)}")
    assert (answer.status_code, answer.json()["name"]) == (422, name), answer.text
    low, high = answer.json()["bound"]
    shown = value if len(value) < 500 else f"a number of {len(value)} digits"
    assert answer.json()["detail"] == f"{name} is {shown}; it must be in {low}..{high}"
    assert (low, high) == ((1, 1000) if name == "limit" else (0, 2**53 - 1))


@pytest.mark.parametrize("value", ["1_0", "\uff11", "\u0663", "+5", " 5", "5 ", "1.0", "1e3", "0x1", "-", "", "true"])
def test_a_number_must_consist_of_ascii_digits(run: RunClient, value: str) -> None:
    """Python's `int` also accepts underscores, digits of other scripts and blanks."""
    run.put(batch={"groups_per_batch": 1})
    answer = run.get("ledger", after=value)
    assert (answer.status_code, answer.json()["name"], answer.json()["value"]) == (400, "after", value), answer.text


@pytest.mark.parametrize("value", BEYOND[:4], ids=["below 0", "above 2^53", "above 64 bits", "401 digits"])
def test_a_number_in_a_body_of_any_length_is_rejected_by_its_bounds(run: RunClient, value: str) -> None:
    """The bounds of all fields are in test_bounds.py."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    answer = run.http.post(
        f"{run.path}/checkpoints", content=f'{{"epoch": {epoch}, "step": {value}}}'.encode(), headers=JSON
    )
    assert (answer.status_code, answer.json()["name"]) == (422, "step"), answer.text
    assert value in answer.json()["detail"] and "=" in answer.json()["bound"]


@pytest.mark.parametrize("call", [call for call in CALLS if call.query is not None], ids=name_of)
def test_an_unknown_parameter_is_rejected_on_every_route(run: RunClient, call: Call) -> None:
    """The error lists the valid parameters."""
    run.put(batch={"groups_per_batch": 1})
    answer = run.http.request(call.method, f"{path_of(run, call.template)}?nonsense=1")
    valid = [parameter.name for parameter in call.query or ()]
    assert (answer.status_code, answer.json().get("name")) == (400, "nonsense"), answer.text
    assert (answer.json()["value"], answer.json()["bound"]) == ("1", valid)
    assert f"this call accepts {', '.join(valid) or 'none'}" in answer.json()["detail"]


@pytest.mark.parametrize("misspelled", ["dprank", "dp-rank", "rank", "DP_RANK"])
def test_a_misspelled_dp_rank_does_not_fetch_rank_0(run: RunClient, misspelled: str) -> None:
    """The error suggests the nearest parameter."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach(dp_world_size=2)
    run.append(group("a"))
    rejection = run.batch(0, epoch, **{misspelled: 1})
    assert rejection.status_code == 400
    if misspelled != "DP_RANK":
        assert rejection.json()["detail"].endswith("; did you mean dp_rank?")
    assert run.batch(0, epoch, dp_rank=1).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/", "/openapi.json"])
def test_probes_ignore_unknown_parameters(run: RunClient, path: str) -> None:
    """Prometheus sends the parameters of its own configuration."""
    assert run.http.get(f"{path}?collect[]=x&after=nothing").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/runs/{run}", "DELETE, GET, HEAD, PATCH, PUT"),
        ("OPTIONS", "/v1/runs/{run}/groups", "GET, HEAD, POST"),
        ("PUT", "/v1/runs/{run}/policy", "GET, HEAD, POST"),
        ("POST", "/v1/runs", "GET, HEAD"),
        ("GET", "/v1/runs/{run}/tickets/t0-0-1", "DELETE"),
        ("GET", "/v1/runs/{run}/attach", "POST"),
        ("POST", "/healthz", "GET, HEAD"),
    ],
)
def test_the_answer_to_a_wrong_method_lists_the_methods_of_the_path(
    run: RunClient, method: str, path: str, allowed: str
) -> None:
    """405 with `Allow` (RFC 9110 section 15.5.6); the title is the phrase of the status (RFC 9457 section 4.2.1)."""
    answer = run.http.request(method, path_of(run, path))
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    path = path_of(run, path)
    assert answer.json() == {
        "type": "about:blank",
        "title": "Method Not Allowed",
        "status": 405,
        "detail": f"{method} {path}: Method Not Allowed",
    }


@pytest.mark.parametrize("call", WITH_BODY, ids=name_of)
def test_a_body_above_its_limit_is_refused_on_every_route(run: RunClient, call: Call) -> None:
    """Only appends and acks may have large bodies."""
    run.put(batch={"groups_per_batch": 1})
    limit = {"post_groups": 64 << 20, "post_ack": 1 << 20}.get(call.handler.__name__, 256 << 10)
    answer = run.http.request(
        call.method,
        path_of(run, call.template),
        content=b" " * (limit + 1),
        headers={"content-type": "application/json"},
    )
    assert (answer.status_code, answer.json()["bound"]) == (413, limit), answer.text


def test_a_path_may_end_with_a_slash(run: RunClient) -> None:
    """Clients with a base URL send one."""
    assert run.http.put(f"{run.path}/", json={"batch": {"groups_per_batch": 1}}).status_code == 201
    assert run.http.get(f"{run.path}/").json()["run"] == run.run

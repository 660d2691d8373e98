"""What is wrong with a request is told as the caller's mistake, with its name, value and bound; never as a fault."""

from __future__ import annotations

import pytest

from replaybuf.service.http import CALLS, Call
from tests.conftest import RunClient

PLACES = {"run": "nested", "step": "0", "ticket": "t0-0-1-1", "group_id": "a"}
WITH_BODY = [call for call in CALLS if call.body is not None]


def path_of(run: RunClient, template: str) -> str:
    """Fill in the places of a path."""
    return template.format(**PLACES | {"run": run.run})


@pytest.mark.parametrize("call", WITH_BODY, ids=lambda call: f"{call.method} {call.template}")
@pytest.mark.parametrize("body", ["@", '{"x": @}', '{"groups": [@]}', '{"metadata": @}', '{"feedback": @}'])
def test_a_body_of_100_000_brackets_is_malformed_on_every_route(run: RunClient, call: Call, body: str) -> None:
    """Closed or not: no reader of JSON follows it down."""
    run.put(batch={"groups_per_batch": 1})
    for brackets in ("[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"x":' * 100_000 + "1" + "}" * 100_000):
        answer = run.http.request(call.method, path_of(run, call.template), content=body.replace("@", brackets))
        assert (answer.status_code, answer.json()["name"]) == (400, "body"), answer.text

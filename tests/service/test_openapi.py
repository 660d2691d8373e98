"""OpenAPI document: requests and answers of every route match it."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from replaybuf.service.http.call.calls import CALLS, OPEN_CALLS
from replaybuf.wire.frame import MEDIA_TYPE as FRAMES_TYPE
from replaybuf.wire.plan import MEDIA_TYPE as PLAN_TYPE
from tests.conftest import RunClient, ServeProcess, group
from tests.service.test_groups import frame

EVALUATION = {"name": "held-out", "version": 0, "versions": [0], "reward_mean": 0.5, "rollouts": 4}


class CheckedClient:
    """Client that checks every answer, and every request unless it is `wrong`, against the document."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.document: dict[str, Any] = http.get("/openapi.json").json()
        self.answered: set[tuple[str, str, str]] = set()

    def ask(self, method: str, template: str, *, wrong: bool = False, **sent: Any) -> httpx.Response:
        """Send one request; `sent` has `query`, `body` (JSON), `frames`, `headers` and the path parameters."""
        query, headers = sent.pop("query", {}), sent.pop("headers", {})
        body, frames = sent.pop("body", None), sent.pop("frames", b"")
        operation = self.document["paths"][template][method.lower()]
        if not wrong:
            self._check_sent(operation, query, sent, body)
        form = {"content-type": FRAMES_TYPE if frames else "application/json"}
        content = frames or (json.dumps(body).encode() if body is not None else None)
        answer = self.http.request(
            method,
            re.sub(r"\{(\w+)\}", lambda place: str(sent[place[1]]), template),
            params=query,
            content=content,
            headers=headers | (form if content else {}),
        )
        status = str(answer.status_code)
        assert wrong or status in operation["responses"], answer.text
        self._check_answer(operation["responses"].get(status, operation["responses"]["default"]), answer)
        self.answered.add((method, template, status))
        return answer

    def fits(self, value: Any, schema: dict[str, Any]) -> None:
        """Fail if a value does not match a schema of the document."""
        jsonschema.Draft202012Validator(schema | {"components": self.document["components"]}).validate(value)

    def _check_sent(
        self, operation: dict[str, Any], query: dict[str, Any], places: dict[str, Any], body: dict[str, Any] | None
    ) -> None:
        values = {"query": query, "path": places}
        for parameter in operation["parameters"]:
            if parameter["name"] in values[parameter["in"]]:
                self.fits(values[parameter["in"]][parameter["name"]], parameter["schema"])
            else:
                assert not parameter.get("required"), parameter
        assert query.keys() <= {p["name"] for p in operation["parameters"] if p["in"] == "query"}
        if body is not None:
            self.fits(body, operation["requestBody"]["content"]["application/json"]["schema"])

    def _check_answer(self, response: dict[str, Any], answer: httpx.Response) -> None:
        form = answer.headers.get("content-type", "").partition(";")[0]
        if "content" not in response:
            assert not answer.content
            return
        assert form in response["content"], (form, list(response["content"]))
        if form.endswith("json"):
            self.fits(answer.json(), response["content"][form]["schema"])


R = "/v1/runs/{run}"


def call_every_route(api: CheckedClient, name: str) -> None:
    """Call every route of a run, through its life, to see most answers."""

    def ask(method: str, path: str = "", **sent: Any) -> httpx.Response:
        return api.ask(method, R + path, run=name, **sent)

    config = {"batch": {"groups_per_batch": 1, "tokens_per_batch": None}, "max_steps": 1}
    config |= {"limits": {"max_group_bytes": 4000}, "tickets": {"max_attempts": 1}}
    for _ in range(2):
        ask("PUT", body=config)
    ask("PUT", body={"batch": {}})
    ask("GET")
    api.ask("GET", "/v1/runs")
    ask("PATCH", body={"state": "running", "strategy": {"options": {"max_staleness": 2}}})
    epoch = ask("POST", "/attach", body={"dp_world_size": 1, "cost": {"linear": 1.0, "quadratic": 0.0}}).json()["epoch"]
    ask("POST", "/attach", body={"resume_step": 5})
    step = {"step": 0, "query": {"epoch": epoch, "dp_rank": 0, "wait_ms": 0}}
    assert ask("GET", "/batches/{step}", **step).status_code == 202
    tickets = ask("POST", "/tickets", body={"producer": "p", "count": 2, "wait_ms": 5}).json()["tickets"]
    ask("POST", "/tickets", body={"producer": "p", "count": 100})
    ask(
        "PUT",
        "/producers/{producer}",
        producer="p",
        body={
            "in_flight": 1,
            "slots": 1,
            "engines": 1,
            "held_back_by": "no_room",
            "failure": {"reason": "r", "traceback": "a\n\tb"},
        },
    )
    ask("GET", "/producers")
    assert "waiting" in ask("POST", "/tickets", body={"producer": "p"}).json()
    ask("DELETE", "/tickets/{ticket}", ticket=tickets[1]["ticket"], query={"reason": "engine"})
    ask("POST", "/groups", body=group(None, ticket=tickets[0]["ticket"], metadata={"env": "test"}))
    ask("POST", "/groups", body={"groups": [group("a"), group("a"), group("late", version=9)]})
    ask("POST", "/groups", frames=frame(group("f")))
    assert ask("POST", "/groups", body=group("late", version=9)).status_code == 422
    assert ask("POST", "/groups", body=group("big", tokens=900)).status_code == 413
    for group_id, status in (("a", 200), ("nobody", 404)):
        columns = {"columns": {"rewards.judge": [0.5, 1.0], "ref_logprobs": [[-1.0] * 3] * 2}}
        reply = ask("PUT", "/groups/{group_id}/columns", group_id=group_id, body=columns)
        assert reply.status_code == status, reply.text
    columns = {"columns": {"rewards.judge": [0.5, 2.0]}}
    assert ask("PUT", "/groups/{group_id}/columns", group_id="a", body=columns).status_code == 409
    for query in ({}, {"state": "live", "limit": 1, "after": 0}, {"contains": "x"}):
        ask("GET", "/groups", query=query)
    ask("GET", "/groups/{group_id}", group_id="a")
    assert ask("GET", "/groups/{group_id}", group_id="nobody").status_code == 404
    answer = ask("GET", "/batches/{step}", **step)
    ask("GET", "/batches/{step}", **step, headers={"if-none-match": answer.headers["etag"]})
    ask("GET", "/batches/{step}", **step, headers={"accept": PLAN_TYPE})
    ask("GET", "/batches/{step}", **step, headers={"accept-encoding": "br, identity;q=0"})
    ask("GET", "/batches/{step}/record", step=0)
    ask("GET", "/batches/{step}/explain", step=0, query={"limit": 1})
    ask("GET", "/batches/{step}/explain", step=1)
    ask("POST", "/batches/{step}/ack", step=0, body={"epoch": epoch, "feedback": {"loss": 1.0}})
    ask("POST", "/batches/{step}/ack", step=5, body={"epoch": epoch})
    ask("GET", "/flow")
    ask("GET", "/history", query={"from_step": 0, "to_step": 5, "points": 10})
    ask("GET", "/report")
    ask("POST", "/policy", body={"epoch": epoch, "version": 1, "weights_uri": "file:///weights/1"})
    ask("POST", "/policy", body={"epoch": epoch + 1, "version": 1})
    ask("GET", "/policy", query={"after": 0, "wait_ms": 0})
    ask("POST", "/checkpoints", body={"epoch": epoch, "step": 1, "keep": 1})
    ask("POST", "/checkpoints", body={"epoch": epoch, "step": 7})
    ask("GET", "/batches/{step}/record", step=0, query={"generation": 0})
    ask("GET", "/batches/{step}/record", step=3)
    ask("GET", "/batches/{step}/explain", step=3)
    for freed_or_future in (0, 9):
        ask("GET", "/batches/{step}", step=freed_or_future, query={"epoch": epoch})
    ask("GET", "/groups/{group_id}", group_id="p0")
    ask("GET", "/samples", query={"step": 0, "before": 1, "contains": "x", "limit": 1})
    ask("GET", "/cursors/{name}", name="c", query={"kind": "trained", "limit": 1, "wait_ms": 0})
    assert ask("GET", "/cursors/{name}", name="c", query={"kind": "stored"}).status_code == 409
    ask("POST", "/cursors/{name}", name="c", body={"position": "t0.0.1"})
    ask("POST", "/cursors/{name}", name="unknown", body={"position": "s1"})
    ask("GET", "/cursors")
    ask("DELETE", "/cursors/{name}", name="c")
    ask("POST", "/evaluations", body=EVALUATION | {"parts": {"length": 2.0}, "standard_error": None})
    ask("GET", "/evaluations", query={"limit": 1})
    ask("GET", "/failed-prompts", query={"limit": 10})
    ask("GET", "/dead-letters")
    ask("DELETE", "/dead-letters")
    assert ask("PATCH", body={"state": "paused"}).status_code == 409
    assert ask("POST", "/accept-loss", body={"entries": 0, "groups": 0}).status_code == 409
    entries = {record["type"] for record in ask("GET", "/ledger", query={"limit": 1000}).json()["records"]}
    assert entries >= {"CONFIG", "ATTACH", "BATCH", "ACK", "POLICY", "CHECKPOINT"}


def delete_run(api: CheckedClient, name: str) -> None:
    """Delete a run: too early, then after its end, then again."""
    api.ask("PUT", R, run=name, body={"batch": {"groups_per_batch": 1}})
    statuses = [api.ask("DELETE", R, run=name).status_code]
    api.ask("PATCH", R, run=name, body={"state": "finished"})
    statuses += [api.ask("DELETE", R, run=name).status_code for _ in range(2)]
    assert statuses == [409, 204, 410]


def test_requests_and_answers_of_every_route_match_the_document(run: RunClient) -> None:
    """Every route succeeds once, and every documented status is seen except 410, 429 and 503."""
    from openapi_spec_validator import validate  # 0.4 s, which each worker that collects this file would take

    api = CheckedClient(run.http)
    validate(api.document)
    call_every_route(api, run.run)
    delete_run(api, f"{run.run}-deleted")
    for call in OPEN_CALLS:
        api.ask("GET", call.template, file="app.js")
    script = api.ask("GET", "/console/{file}", file="app.js")
    api.ask("GET", "/console/{file}", file="app.js", headers={"if-none-match": script.headers["etag"]})
    api.ask("GET", "/console/{file}", file="nothing.js")
    api.ask("GET", "/v1/overview")
    api.ask("GET", "/metrics")
    api.answered.add(("POST", f"{R}/accept-loss", "200"))  # after a loss only: test_older_redis.py
    done = {(method, template) for method, template, status in api.answered if status < "400"}
    assert done == {(call.method, call.template) for call in (*CALLS, *OPEN_CALLS)}
    described = {(call.method, call.template, status) for call in (*CALLS, *OPEN_CALLS) for status in call.answers}
    assert {status for _, _, status in described - api.answered} <= {"410", "429", "503"}, described


def test_answers_of_a_run_with_adapters_match_the_document(run: RunClient) -> None:
    """They have additional fields."""
    api = CheckedClient(run.http)
    config = {"batch": {}, "adapters": {"math": {"groups_per_batch": 1}, "code": {"groups_per_batch": 1}}}
    api.ask("PUT", R, run=run.run, body=config)
    epoch = api.ask("POST", f"{R}/attach", run=run.run, body={}).json()["epoch"]
    assert api.ask("GET", f"{R}/batches/{{step}}", run=run.run, step=0, query={"epoch": epoch}).json()["adapter"]
    api.ask("POST", f"{R}/groups", run=run.run, body=group("a", adapter="math"))
    api.ask("GET", f"{R}/batches/{{step}}", run=run.run, step=0, query={"epoch": epoch})
    assert api.ask("GET", f"{R}/batches/{{step}}/record", run=run.run, step=0).json()["adapters_completed"] == {
        "math": 0
    }
    assert set(api.ask("GET", R, run=run.run).json()["adapters"]) == {"math", "code"}
    api.ask("GET", f"{R}/policy", run=run.run, query={"adapter": "math"})
    api.ask("GET", f"{R}/ledger", run=run.run)


def test_values_that_the_document_forbids_are_rejected_by_parameter_name(run: RunClient) -> None:
    """Missing required parameters, numbers out of range and unknown enum values."""
    api = CheckedClient(run.http)
    run.put(batch={"groups_per_batch": 1})
    operations = [operation for path in api.document["paths"].values() for operation in path.values()]
    queries = [field for operation in operations for field in operation["parameters"] if field["in"] == "query"]
    assert {parameter["name"] for parameter in queries if parameter["required"]} == {"epoch"}
    requests = 0
    for call in CALLS:
        places = {"run": run.run, "step": 0, "ticket": "t0-0-1-1", "group_id": "a", "name": "c"}
        for parameter in api.document["paths"][call.template][call.method.lower()]["parameters"]:
            name = parameter["name"]
            for wrong in (
                wrong_values(parameter) if call.body is None else ()
            ):  # otherwise the missing body is the first error
                query = {"epoch": 1} if call.template.endswith("{step}") else {}
                sent = query if parameter["in"] == "query" else places
                if wrong is None:
                    del sent[name]
                answer = api.ask(
                    call.method,
                    call.template,
                    wrong=True,
                    query=query | ({name: wrong} if sent is query and wrong is not None else {}),
                    **places | ({name: wrong} if sent is places else {}),
                )
                assert answer.status_code in (400, 422), (call, name, wrong, answer.text)
                assert answer.json()["name"] == name
                requests += 1
    assert requests > 30


def wrong_values(parameter: dict[str, Any]) -> list[Any]:
    """List forbidden values of a parameter; None means that it is missing."""
    schema = parameter["schema"]
    values: list[Any] = [schema["minimum"] - 1, schema["maximum"] + 1, "x"] if schema["type"] == "integer" else []
    values += ["nonsense"] if "enum" in schema else []
    return values + ([None] if parameter["in"] == "query" and parameter["required"] else [])


def test_the_document_describes_metrics_and_probes(service: ServeProcess) -> None:
    """Metrics are text and need a token; probes need none."""
    paths = httpx.get(f"{service.url}/openapi.json").json()["paths"]
    assert set(paths["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    assert set(paths["/"]["get"]["responses"]["200"]["content"]) == {"text/html"}
    assert [paths[path]["get"]["security"] for path in ("/healthz", "/readyz", "/openapi.json", "/")] == [[]] * 4
    assert paths["/metrics"]["get"]["security"]


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("Policy", {"version": "1", "weights_uri": None, "adapters": {}, "generation": 0}),
        ("RunStatus", {"run": "r"}),
        ("LedgerPage", {"records": [{"type": "PURGE", "numbers": []}], "next": None}),
    ],
)
def test_a_wrong_answer_does_not_match_the_schemas(run: RunClient, path: str, wrong: dict[str, Any]) -> None:
    """A wrong type, a missing field, a record without its fields."""
    api = CheckedClient(run.http)
    with pytest.raises(jsonschema.ValidationError):
        api.fits(wrong, {"$ref": f"#/components/schemas/{path}"})

"""Requests and answers of the clients, on a mock transport."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from replaybuf.client.calls import RunCalls
from replaybuf.client.client import AsyncClient, Client
from replaybuf.client.retries import Backoff, Patience
from replaybuf.client.transport import AsyncHttpxTransport, HttpxTransport
from replaybuf.errors import (
    Conflict,
    Fenced,
    Invalid,
    Malformed,
    NoRoom,
    NotFound,
    NotLeader,
    ReplaybufError,
    RunFinished,
    ServiceUnavailable,
    UnsupportedServer,
)
from replaybuf.wire.contract import AppendResult, WaitingAnswer
from replaybuf.wire.frame import MEDIA_TYPE, decode_frame, is_compressed, split_frames
from replaybuf.wire.group import Group
from tests.builders import RUN_STATUS, group_of_lengths, waiting_answer

Answer = Callable[[httpx.Request], httpx.Response]


def make_group(group_id: str = "g", *, rollouts: int = 2, logprob: float = -0.5) -> Group:
    tokens = 3 * rollouts
    return Group(
        group_id=group_id,
        prompt_id="p",
        policy_version=0,
        prompt_ids=np.ones(2 * rollouts, np.int32),
        prompt_lengths=np.full(rollouts, 2, np.int32),
        completion_ids=np.arange(tokens, dtype=np.int32),
        completion_lengths=np.full(rollouts, 3, np.int32),
        completion_mask=np.ones(tokens, np.bool_),
        inference_logprobs=np.full(tokens, logprob, np.float32),
        rewards=np.zeros(rollouts),
        version_spans=np.array([[number, 0, 0, 3] for number in range(rollouts)], np.int32),
        temperatures=np.ones(rollouts, np.float32),
        finish_reasons=("stop",) * rollouts,
    )


class Service:
    """Answer from a list or by a function; record the requests."""

    def __init__(self, *answers: httpx.Response | Exception | Answer) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else answer(request)

    def client(self, url: str = "http://buffer:8900", **options: Any) -> Client:
        made = Client(url, "r", **options)
        for address in made._transports:
            made._transports[address] = transport = HttpxTransport(address, {})
            transport._http = httpx.Client(transport=httpx.MockTransport(self), headers=made._servers.headers)
        return made

    def async_client(self, url: str = "http://buffer:8900", **options: Any) -> AsyncClient:
        made = AsyncClient(url, "r", **options)
        for address in made._transports:
            made._transports[address] = transport = AsyncHttpxTransport(address, {})
            transport._http = httpx.AsyncClient(transport=httpx.MockTransport(self), headers=made._servers.headers)
        return made

    @property
    def last(self) -> httpx.Request:
        return self.requests[-1]

    @property
    def hosts(self) -> list[str]:
        return [request.url.host for request in self.requests]


def ok(document: Any = None, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=RUN_STATUS if document is None else document)


def problem(error: ReplaybufError, **headers: str) -> httpx.Response:
    return httpx.Response(error.status, json=error.problem(), headers=headers)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between retries in seconds, without sleeping."""
    made: list[float] = []
    monkeypatch.setattr("time.sleep", made.append)

    async def pause(delay: float) -> None:
        made.append(delay)

    monkeypatch.setattr("asyncio.sleep", pause)
    return made


def test_a_waiting_answer_has_its_reason_and_amounts() -> None:
    answer = {
        "status": "waiting",
        "reason": "too_few_groups",
        "have": {"groups": 3, "tokens": 90},
        "need": {"groups": 8, "tokens": 0},
        "blocked_on": "producers",
        "retry_after_s": 0.25,
        "new": 1,
    }
    with Service(ok(answer, 202)).client() as client:
        waiting = client.fetch_batch(4, epoch=2)
    assert isinstance(waiting, WaitingAnswer)
    assert (waiting.reason, waiting.have.groups, waiting.need.groups) == ("too_few_groups", 3, 8)
    assert (waiting.blocked_on, waiting.retry_after_s) == ("producers", 0.25)


def test_a_batch_is_returned_as_the_bytes_of_its_body() -> None:
    service = Service(httpx.Response(200, content=b"\x00body"))
    with service.client() as client:
        assert client.fetch_batch(4, epoch=2, dp_rank=1, wait_ms=700) == b"\x00body"
    assert service.last.url == "http://buffer:8900/v1/runs/r/batches/4?epoch=2&dp_rank=1&wait_ms=700"


def test_a_long_poll_adds_its_wait_to_the_timeout() -> None:
    service = Service(ok({"version": 3}))
    with service.client(timeout_s=5) as client:
        client.get_policy(after=2, wait_ms=1500)
    assert service.last.extensions["timeout"]["read"] == 6.5


def test_the_token_is_sent_in_the_authorization_header() -> None:
    service = Service(ok())
    with service.client(token="secret") as client:
        client.get_run()
    assert service.last.headers["authorization"] == "Bearer secret"


def test_attach_omits_arguments_that_are_none() -> None:
    service = Service(ok({"epoch": 3, "step": 5, "seq_len": 128, "published_version": 5, "unknown": []}))
    with service.client() as client:
        attached = client.attach(dp_world_size=2, resume_step=5)
    assert (attached.epoch, attached.step, attached.seq_len) == (3, 5, 128)
    assert json.loads(service.last.content) == {"dp_world_size": 2, "resume_step": 5, "on_resume": "redeliver"}


def test_tickets_include_the_published_version_and_the_waiting_reason() -> None:
    answer = {
        "tickets": [{"ticket": "t0-3-1", "prompt_index": 3, "attempt": 1, "expires_in_s": 60}],
        "published_version": 7,
        "waiting": msgspec.to_builtins(waiting_answer("rate_limited")),
    }
    with Service(ok(answer)).client() as client:
        tickets = client.take_tickets("me", 4, wait_ms=100)
    assert [(t.ticket, t.prompt_index, t.expires_in_s) for t in tickets.tickets] == [("t0-3-1", 3, 60.0)]
    assert tickets.published_version == 7
    assert tickets.waiting is not None and tickets.waiting.reason == "rate_limited"


def test_a_slash_in_a_ticket_is_escaped_in_the_path() -> None:
    service = Service(ok())
    with service.client() as client:
        client.return_ticket("lora/t0-1-1", "reward_timeout")
    assert service.last.url.raw_path == b"/v1/runs/r/tickets/lora%2Ft0-1-1?reason=reward_timeout"


@pytest.mark.parametrize("error", [Conflict("c", name="n", value=1, bound=2), Fenced("f"), NotFound("n"), Invalid("i")])
def test_a_problem_document_raises_the_matching_error(error: ReplaybufError) -> None:
    with Service(problem(error)).client() as client, pytest.raises(type(error), match=error.detail) as caught:
        client.ack(3, epoch=1)
    assert (caught.value.name, caught.value.value, caught.value.bound) == (error.name, error.value, error.bound)


def test_a_finished_run_raises_run_finished() -> None:
    with Service(problem(RunFinished("done"))).client() as client, pytest.raises(RunFinished):
        client.fetch_batch(9, epoch=1)


def test_a_proxy_error_page_raises_service_unavailable_with_its_text() -> None:
    page = httpx.Response(502, text="<h1>Bad Gateway</h1>")
    with Service(page).client() as client, pytest.raises(ServiceUnavailable, match=r"status 502.*Bad Gateway"):
        client.get_run()


def test_an_answer_that_does_not_decode_is_malformed() -> None:
    with Service(ok({"tickets": "none"})).client() as client, pytest.raises(Malformed, match=r"POST .*/tickets .*none"):
        client.take_tickets("me", 1)


def test_an_answer_that_is_not_utf8_is_malformed() -> None:
    page = b'{"detail": "\xe9t\xe9", "version": "\xe9"}'
    with (
        Service(httpx.Response(200, content=page)).client() as client,
        pytest.raises(Malformed, match=r"GET .*/policy"),
    ):
        client.get_policy()
    with Service(httpx.Response(502, content=page)).client() as client, pytest.raises(ServiceUnavailable, match="502"):
        client.get_run()


def test_a_connection_error_contains_the_address_and_the_cause() -> None:
    service = Service(httpx.ConnectError("connection refused"))
    with service.client() as client, pytest.raises(ServiceUnavailable, match=r"http://buffer:8900.*connection refused"):
        client.get_run()


def test_a_timeout_error_contains_the_wait() -> None:
    service = Service(httpx.ReadTimeout(""))
    with service.client(timeout_s=2) as client, pytest.raises(ServiceUnavailable, match=r"no answer within 3 s"):
        client.get_policy(wait_ms=1000)


def test_an_address_without_a_scheme_is_rejected() -> None:
    with pytest.raises(Invalid, match=r"url is 'localhost:8900'"):
        Client("localhost:8900", "r")


def test_groups_are_sent_as_frames_and_results_keep_their_order() -> None:
    answer = {"results": [{"group_id": "a", "status": "stored"}, {"group_id": "b", "status": "duplicate"}]}
    service = Service(ok(answer))
    with service.client() as client:
        results = client.append([make_group("a"), make_group("b")])
    assert [(r.group_id, r.status) for r in results] == [("a", "stored"), ("b", "duplicate")]
    assert service.last.headers["content-type"] == MEDIA_TYPE
    assert [decode_frame(frame).group_id for frame in split_frames(service.last.content)] == ["a", "b"]


@pytest.mark.parametrize("compress", [False, True])
def test_frames_are_compressed_on_request(compress: bool) -> None:
    service = Service(ok({"results": [{"group_id": "a", "status": "stored"}]}))
    with service.client() as client:
        client.append([group_of_lengths([2000], group_id="a")], compress=compress)
    assert is_compressed(service.last.content) == compress


def test_an_invalid_group_is_rejected_before_it_is_sent() -> None:
    service = Service(ok({"results": [{"group_id": "good", "status": "stored"}]}))
    with service.client() as client:
        results = client.append([make_group("bad", logprob=float("nan")), make_group("good")])
    assert [(r.group_id, r.status, r.reason) for r in results] == [
        ("bad", "rejected", "non_finite_logprobs"),
        ("good", "stored", None),
    ]
    assert len(list(split_frames(service.last.content))) == 1


def test_invalid_metadata_rejects_one_group_before_it_is_sent() -> None:
    """The service reports the same reason."""
    service = Service(ok({"results": [{"group_id": "good", "status": "stored"}]}))
    bad = msgspec.structs.replace(make_group("bad"), metadata={"seed": 2**64})
    with service.client() as client:
        results = client.append([bad, make_group("good")])
    assert [(r.group_id, r.reason) for r in results] == [("bad", "bad_metadata"), ("good", None)]
    assert results[0].detail == "metadata.seed is 18446744073709551616; integers are from -2^63 to 2^64 - 1"


def test_the_error_for_a_dict_shows_how_to_convert_it() -> None:
    """The HTTP API accepts this dict as JSON, so the mistake is easy to make."""
    service = Service(ok())
    with (
        service.client() as client,
        pytest.raises(TypeError, match=r"group is a dict; .*msgspec.convert\(it, GroupJson\)"),
    ):
        client.append([{"prompt_id": "p", "rollouts": []}])  # type: ignore[list-item]
    assert service.requests == []


def test_nothing_is_sent_when_every_group_is_invalid() -> None:
    service = Service(ok())
    with service.client() as client:
        assert [r.status for r in client.append([make_group(logprob=1.0)])] == ["rejected"]
    assert service.requests == []


def test_groups_are_checked_against_the_run_after_get_run() -> None:
    config = {"group_size": 4, "batch": {"seq_len": 64, "future": True}, "future": 1}
    stored = ok({"results": [{"group_id": "g", "status": "stored"}]})
    service = Service(ok(RUN_STATUS | {"config": config, "future": 1}), stored)
    with service.client() as client:
        client.get_run()
        results = client.append([make_group(rollouts=2), make_group(rollouts=4)])
    assert [r.reason for r in results] == ["wrong_group_size", None]


def test_a_422_with_results_returns_the_results() -> None:
    rejection = {
        "type": "urn:replaybuf:problem:invalid-groups",
        "title": "t",
        "status": 422,
        "detail": "d",
        "results": [{"group_id": "g", "status": "rejected", "reason": "version_above_published"}],
    }
    with Service(httpx.Response(422, json=rejection)).client() as client:
        results = client.append([make_group()])
    assert results == [AppendResult(group_id="g", status="rejected", reason="version_above_published")]


def test_a_422_without_results_is_an_error() -> None:
    with Service(problem(Invalid("no such field"))).client() as client, pytest.raises(Invalid, match="no such field"):
        client.append([make_group()])


def test_a_missing_result_is_an_error() -> None:
    with Service(ok({"results": []})).client() as client, pytest.raises(Malformed, match=r"1 group .* 0 results"):
        client.append([make_group()])


def test_a_large_append_is_split_into_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replaybuf.client.append_bodies.APPEND_BODY_BYTES", 1)
    service = Service(lambda request: ok({"results": [{"group_id": _only_id(request), "status": "stored"}]}))
    with service.client() as client:
        results = client.append([make_group("a"), make_group("b")])
    assert [r.group_id for r in results] == ["a", "b"]
    assert len(service.requests) == 2


def _only_id(request: httpx.Request) -> str | None:
    (frame,) = split_frames(request.content)
    return decode_frame(frame).group_id


def test_an_idempotent_call_is_retried_until_it_succeeds(pauses: list[float]) -> None:
    service = Service(httpx.ConnectError("refused"), problem(ServiceUnavailable("starting")), ok({"version": 2}))
    with service.client(retry_for_s=60) as client:
        assert client.get_policy().version == 2
    assert len(service.requests) == 3
    assert len(pauses) == 2


def test_an_append_waits_for_the_time_in_retry_after(pauses: list[float]) -> None:
    service = Service(
        problem(NoRoom("full"), **{"Retry-After": "7"}), ok({"results": [{"group_id": "g", "status": "stored"}]})
    )
    with service.client(retry_for_s=60) as client:
        assert client.append([make_group()])[0].status == "stored"
    assert pauses == [7.0]
    assert service.requests[0].content == service.requests[1].content


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.take_tickets("me", 1),
        lambda client: client.return_ticket("t", "r"),
        lambda client: client.attach(),
    ],
    ids=["take_tickets", "return_ticket", "attach"],
)
def test_a_call_that_is_not_idempotent_is_not_retried(call: Callable[[Client], object], pauses: list[float]) -> None:
    service = Service(httpx.ConnectError("refused"))
    with service.client(retry_for_s=60) as client, pytest.raises(ServiceUnavailable):
        call(client)
    assert len(service.requests) == 1


def test_without_retry_for_s_the_first_error_is_raised(pauses: list[float]) -> None:
    service = Service(httpx.ConnectError("refused"))
    with service.client() as client, pytest.raises(ServiceUnavailable):
        client.get_run()
    assert len(service.requests) == 1


def test_a_permanent_error_is_not_retried(pauses: list[float]) -> None:
    service = Service(problem(Conflict("no")))
    with service.client(retry_for_s=60) as client, pytest.raises(Conflict):
        client.put_run({"batch": {}})
    assert len(service.requests) == 1


def test_a_pause_beyond_the_retry_limit_raises_the_error() -> None:
    now_s = 100.0
    patience = Patience(10.0, clock=lambda: now_s)
    error = NoRoom("full", retry_after_s=9.0)
    assert patience.pause_s(error) == 9.0
    now_s = 105.0
    with pytest.raises(NoRoom):
        patience.pause_s(error)


def test_an_unsupported_server_is_not_retried() -> None:
    with pytest.raises(UnsupportedServer):
        Patience(1000.0).pause_s(UnsupportedServer("Redis 6"))


def test_pauses_grow_to_the_ceiling_with_jitter() -> None:
    pauses_s = Backoff(first_s=1.0, factor=2.0, ceiling_s=4.0).pauses_s()
    first, second, third, fourth = (next(pauses_s) for _ in range(4))
    assert 0.5 <= first <= 1.0 <= second <= 2.0 <= third <= 4.0
    assert 2.0 <= fourth <= 4.0


TWO = "http://a:1, http://b:2/"


def not_leader(leader: str | None) -> httpx.Response:
    return problem(NotLeader("ask the leader", name="leader", value=leader), **{"Retry-After": "1"})


def test_a_failed_request_goes_to_the_next_server_at_once(pauses: list[float]) -> None:
    """After every server has failed, the client pauses."""
    service = Service(httpx.ConnectError("refused"), problem(ServiceUnavailable("no redis")), ok({"version": 2}))
    with service.client(TWO, retry_for_s=60) as client:
        assert client.get_policy().version == 2
    assert service.hosts == ["a", "b", "a"]
    assert pauses[0] == 0.0 < pauses[1]


def test_the_next_call_starts_with_the_server_that_answered_last(pauses: list[float]) -> None:
    service = Service(httpx.ConnectError("refused"), ok({"version": 2}))
    with service.client(TWO, retry_for_s=60) as client:
        client.get_policy()
        client.get_policy()
        assert client.address == "http://b:2"
    assert service.hosts == ["a", "b", "b"]


def test_a_call_that_is_not_retried_still_selects_the_next_server() -> None:
    """The caller's next call reaches the other server."""
    service = Service(httpx.ConnectError("refused"), ok({"epoch": 1, "step": 0}))
    with service.client(TWO, retry_for_s=60) as client:
        with pytest.raises(ServiceUnavailable, match="http://a:1/"):
            client.attach()
        assert client.attach().epoch == 1
    assert service.hosts == ["a", "b"]


def test_a_redirect_to_the_leader_skips_other_servers(pauses: list[float]) -> None:
    service = Service(not_leader("http://c:3"), ok({"version": 2}))
    with service.client(f"{TWO},http://c:3", retry_for_s=60) as client:
        client.get_policy()
    assert service.hosts == ["a", "c"]


@pytest.mark.parametrize("named", ["http://evil:9", "http://a:1.evil", None], ids=["unknown", "similar", "none"])
def test_a_leader_outside_the_configured_servers_gets_no_request(named: str | None, pauses: list[float]) -> None:
    """It must not get the token. The client uses the next configured server."""
    service = Service(not_leader(named), ok({"version": 2}))
    with service.client(TWO, retry_for_s=60, token="secret") as client:
        client.get_policy()
    assert service.hosts == ["a", "b"]


def test_any_call_is_retried_after_not_leader(pauses: list[float]) -> None:
    """A server that is not the leader has changed nothing."""
    service = Service(not_leader("http://b:2"), ok({"tickets": [], "published_version": 0}))
    with service.client(TWO, retry_for_s=60) as client:
        client.take_tickets("me", 1)
    assert service.hosts == ["a", "b"]
    assert pauses == [0.0]


def test_the_client_pauses_when_two_servers_redirect_to_each_other(pauses: list[float]) -> None:
    """This lasts until the lease ends; the client must not spin."""
    service = Service(not_leader("http://b:2"), not_leader("http://a:1"), not_leader("http://b:2"), ok({"version": 1}))
    with service.client(TWO, retry_for_s=60) as client:
        client.get_policy()
    assert service.hosts == ["a", "b", "a", "b"]
    assert pauses == [0.0, 1.0, 0.0]


def test_a_trailing_comma_in_the_list_of_addresses_is_rejected() -> None:
    with pytest.raises(Invalid, match=r"url is 'http://a:1,'"):
        Client("http://a:1,", "r")


def test_the_async_client_follows_the_leader(pauses: list[float]) -> None:
    service = Service(not_leader("http://b:2"), ok({"tickets": [], "published_version": 0}))

    async def main() -> None:
        async with service.async_client(TWO, retry_for_s=60) as client:
            await client.take_tickets("me", 1)
            assert client.address == "http://b:2"

    asyncio.run(main())
    assert service.hosts == ["a", "b"]


def test_the_async_client_decodes_answers_and_retries(pauses: list[float]) -> None:
    service = Service(httpx.ConnectError("refused"), ok({"version": 2, "weights_uri": "/w"}))

    async def main() -> None:
        async with service.async_client(retry_for_s=60) as client:
            policy = await client.get_policy(after=1)
            assert (policy.version, policy.weights_uri) == (2, "/w")

    asyncio.run(main())
    assert len(pauses) == 1


def test_the_async_client_raises_the_same_errors() -> None:
    async def main() -> None:
        async with Service(problem(Fenced("newer"))).async_client() as client:
            with pytest.raises(Fenced, match="newer"):
                await client.ack(1, epoch=1)

    asyncio.run(main())


def test_both_clients_have_every_call_with_its_signature() -> None:
    calls = {name: call for name, call in vars(RunCalls).items() if inspect.isgeneratorfunction(call)}
    assert calls
    for name, call in calls.items():
        for client in (Client, AsyncClient):
            offered, made_of = inspect.signature(getattr(client, name)), inspect.signature(call)
            assert offered.parameters == made_of.parameters
            assert f"Exchange[{offered.return_annotation}]" == made_of.return_annotation
            assert inspect.getdoc(getattr(client, name)) == inspect.getdoc(call)

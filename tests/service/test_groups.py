"""Appends of frames and JSON: results, limits, browsing."""

from __future__ import annotations

import json

import httpx
import msgspec
import pytest
import redis

from replaybuf.wire.batch import read_batch
from replaybuf.wire.frame import LARGEST_HEADER_BYTES, MEDIA_TYPE, decode_frame, encode_frame, is_compressed
from replaybuf.wire.group import GroupJson, group_from_json
from tests.conftest import JSON, RunClient, ServeProcess, group


def frame(wire: dict[str, object], *, compress: bool = False) -> bytes:
    """Encode a JSON group as a frame."""
    return encode_frame(group_from_json(msgspec.convert(wire, GroupJson)), compress=compress)


def post(run: RunClient, *frames: bytes) -> httpx.Response:
    """Append frames."""
    return run.http.post(f"{run.path}/groups", content=b"".join(frames), headers={"content-type": MEDIA_TYPE})


def test_an_append_is_idempotent_by_group_id(run: RunClient) -> None:
    """The second append returns `duplicate` and changes nothing."""
    run.put(batch={"groups_per_batch": 2})
    assert run.append(group("a")) == [{"group_id": "a", "status": "stored"}]
    assert run.append(group("a", tokens=9)) == [{"group_id": "a", "status": "duplicate"}]
    assert run.state()["groups"]["stored"] == 1
    assert run.state()["tokens"]["live"] == 10


def test_a_rejected_group_does_not_affect_other_groups(run: RunClient) -> None:
    """Each group has its own result. The request succeeds if one group was stored."""
    run.put(batch={"groups_per_batch": 2}, group_size=2)
    results = run.append(group("a"), group("odd", rollouts=3), group("b"))
    assert [result["status"] for result in results] == ["stored", "rejected", "stored"]
    assert results[1]["reason"] == "wrong_group_size"
    assert run.state()["groups"]["rejected"] == {"wrong_group_size": 1}


def broken(**change: object) -> dict[str, object]:
    """Return a group whose first rollout has these fields changed."""
    wire = group("x")
    wire["rollouts"][0].update(change)
    return wire


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (broken(inference_logprobs=[-0.1]), "length_mismatch"),
        (broken(completion_mask=[1]), "length_mismatch"),
        (broken(inference_logprobs=[-0.1, float("nan"), -0.1]), "non_finite_logprobs"),
        (broken(inference_logprobs=[-0.1, 0.01, -0.1]), "positive_logprobs"),
        (broken(reward=float("inf")), "non_finite_rewards"),
        (broken(completion_ids=[3, 4, 99]), "token_out_of_range"),
        (broken(version_spans=[[0, 0, 2]]), "bad_version_spans"),
        (broken(advantage=1.0), "partial_advantages"),
        (group("x", version=1), "version_above_published"),
        (group("x", tokens=33), "overlong"),
        (group("x", rollouts=0), "no_rollouts"),
        (group("x", adapter="nobody"), "unknown_adapter"),
        (group("x", rollouts=20, tokens=20), "over_budget"),
        (group(None), "missing_group_id"),
        (group(None, ticket="t0-7-1"), "unknown_ticket"),
    ],
)
def test_a_group_that_fails_a_check_is_rejected_with_its_reason(
    run: RunClient, wire: dict[str, object], reason: str
) -> None:
    """A request with only this group gets a 422 problem that contains the result."""
    run.put(batch={"tokens_per_batch": 200, "seq_len": 32}, vocab_size=99)
    response = run.http.post(f"{run.path}/groups", content=json.dumps(wire), headers=JSON)
    assert response.status_code == 422, response.text
    assert response.json()["results"][0]["reason"] == reason
    assert response.json()["detail"].startswith(f"the group was rejected: {reason}: ")
    state = run.state()["groups"]
    assert (state["stored"], state["rejected"]) == (0, {reason: 1})


@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"groups": 1}', "application/json", 400),
        (b'{"group_id": "a"}', "application/json", 400),
        (b"x", "text/plain", 415),
        (b"RBF1 but not a frame at all, really", MEDIA_TYPE, 400),
        (b'{"groups": []}', "application/json", 422),
    ],
)
def test_an_invalid_body_is_rejected(run: RunClient, content: bytes, media_type: str, status: int) -> None:
    """400 if it does not decode, 415 for another media type, 422 without groups."""
    run.put(batch={"groups_per_batch": 2})
    response = run.http.post(f"{run.path}/groups", content=content, headers={"content-type": media_type})
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"


def test_frames_and_json_store_the_same_group(run: RunClient) -> None:
    """Two frames in one body. Browsing returns the same rollouts."""
    run.put(batch={"groups_per_batch": 2})
    body = frame(group("a")) + frame(group("b"))
    response = run.http.post(f"{run.path}/groups", content=body, headers={"content-type": MEDIA_TYPE})
    assert [result["status"] for result in response.json()["results"]] == ["stored", "stored"]
    run.append(group("c"))
    shown = [run.get(f"groups/{name}").json() for name in ("a", "c")]
    assert shown[0]["rollouts"] == shown[1]["rollouts"]
    assert shown[0]["rollouts"][0]["completion_ids"] == [3, 3, 3]


def test_a_flipped_bit_in_a_frame_is_rejected_alone(run: RunClient) -> None:
    """The other frame is stored."""
    run.put(batch={"groups_per_batch": 2})
    bad = bytearray(frame(group("bad")))
    bad[-1] ^= 1
    body = bytes(bad) + frame(group("good"))
    response = run.http.post(f"{run.path}/groups", content=body, headers={"content-type": MEDIA_TYPE})
    assert [result["status"] for result in response.json()["results"]] == ["rejected", "stored"]
    assert response.json()["results"][0]["reason"] == "broken_frame"


def test_a_compressed_frame_stores_the_same_group(run: RunClient) -> None:
    """Browsing and batches return the same data as for a raw frame."""
    run.put(batch={"groups_per_batch": 1, "tokens_per_batch": None})
    packed = frame(group("a", tokens=900), compress=True)
    assert len(packed) < len(frame(group("b", tokens=900))) * 0.7
    assert post(run, packed, frame(group("b", tokens=900))).json()["results"][0] == {
        "group_id": "a",
        "status": "stored",
    }
    shown = [run.get(f"groups/{name}").json() for name in ("a", "b")]
    assert shown[0]["rollouts"] == shown[1]["rollouts"] and len(shown[0]["rollouts"][0]["completion_ids"]) == 898
    bodies = run.train(run.attach(), range(2))
    rows = [read_batch(body).micro_batches[0] for body in bodies]
    assert rows[0].input_ids.tolist() == rows[1].input_ids.tolist()
    assert rows[0].loss_mask.tolist() == rows[1].loss_mask.tolist()


def test_stored_frames_keep_the_compression_of_the_producer(run: RunClient, service: ServeProcess) -> None:
    """The service adds advantages and encodes the frame again."""
    run.put(batch={"groups_per_batch": 2})
    post(run, frame(group("packed", tokens=900), compress=True), frame(group("plain", tokens=900)))
    for name in ("packed", "plain"):
        with redis.Redis(unix_socket_path=service.valkey_socket) as client:
            (key,) = client.keys(f"rb:p:{{{run.path.rpartition('/')[2]}:{name}}}:*")
            stored = client.get(key)
        assert isinstance(stored, bytes)
        assert decode_frame(stored).advantages is not None
        assert is_compressed(stored) == (name == "packed")


def test_max_group_bytes_limits_the_uncompressed_size_of_a_frame(run: RunClient) -> None:
    """The compressed frame is below the limit. It is rejected alone and with other groups."""
    run.put(batch={"groups_per_batch": 2}, limits={"max_group_bytes": 12_000})
    big, small = group("big", tokens=1200), frame(group("small"))
    packed = frame(big, compress=True)
    assert len(packed) < 12_000 < len(frame(big))
    rejection = post(run, packed)
    assert (rejection.status_code, rejection.json()["bound"]) == (413, 12_000)
    assert rejection.json()["value"] > 12_000
    assert post(run, packed, small).json()["results"][0]["reason"] == "too_large"


def test_metadata_larger_than_a_frame_header_rejects_only_its_group(run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 2})
    results = run.append(group("a", metadata={"text": "x" * LARGEST_HEADER_BYTES}), group("b"))
    assert [(result["status"], result.get("reason")) for result in results] == [
        ("rejected", "too_large"),
        ("stored", None),
    ]
    assert f"the maximum is {LARGEST_HEADER_BYTES}" in results[0]["detail"]


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ("18446744073709551616", "metadata.seed is 18446744073709551616; integers are from -2^63 to 2^64 - 1"),
        ("[" * 64 + "]" * 64, "metadata is nested 65 deep; the maximum is 64"),
        ("[" * 900 + "]" * 900, "metadata is nested 901 deep; the maximum is 64"),
    ],
    ids=["number", "depth", "much depth"],
)
def test_invalid_metadata_rejects_only_its_group(run: RunClient, value: str, detail: str) -> None:
    """The metadata of the other groups is stored unchanged."""
    run.put(batch={"groups_per_batch": 2})
    fits = {"seed": 2**64 - 1, "low": -(2**63), "x": [[[]]]}
    body = json.dumps({"groups": [group("a", metadata=fits), group("bad", metadata={"seed": "@"}), group("b")]})
    answer = run.http.post(f"{run.path}/groups", content=body.replace('"@"', value), headers=JSON)
    assert answer.status_code == 200, answer.text
    assert answer.json()["results"] == [
        {"group_id": "a", "status": "stored"},
        {"group_id": "bad", "status": "rejected", "reason": "bad_metadata", "detail": detail},
        {"group_id": "b", "status": "stored"},
    ]
    assert run.get("groups/a").json()["metadata"] == fits
    assert run.state()["groups"]["rejected"] == {"bad_metadata": 1}


def test_deeply_nested_metadata_in_a_frame_rejects_only_its_group(run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 2})
    deep: list[object] = []
    for _ in range(64):
        deep = [deep]
    results = post(run, frame(group("bad", metadata={"x": deep})), frame(group("a"))).json()["results"]
    assert [(result["status"], result.get("reason")) for result in results] == [
        ("rejected", "bad_metadata"),
        ("stored", None),
    ]


def test_a_group_above_max_group_bytes_answers_413(run: RunClient) -> None:
    """The problem contains the size and the limit."""
    run.put(batch={"groups_per_batch": 2}, limits={"max_group_bytes": 2000})
    response = run.http.post(f"{run.path}/groups", json=group("big", tokens=500))
    problem = response.json()
    assert (response.status_code, problem["name"], problem["bound"]) == (413, "limits.max_group_bytes", 2000)
    assert problem["detail"].startswith(f"the group has {problem['value']} bytes; ") and problem["value"] > 2000


def test_max_tokens_live_rejects_an_append_without_a_ticket(run: RunClient) -> None:
    """The answer is 429 with Retry-After; nothing is stored."""
    run.put(batch={"groups_per_batch": 1}, limits={"max_tokens_live": 15})
    run.append(group("a"))
    response = run.http.post(f"{run.path}/groups", json=group("b"))
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert run.state()["groups"]["stored"] == 1


@pytest.mark.parametrize("bound", ["max_tokens_live", "max_bytes_live"])
def test_a_group_with_a_ticket_may_exceed_a_limit_when_the_next_batch_needs_it(run: RunClient, bound: str) -> None:
    """Tickets are issued by a mean size that may be too low. Until a batch needs the group, the answer is 429."""
    run.put(batch={"groups_per_batch": 2, "tokens_per_batch": None}, strategy={"options": {"max_staleness": 9}})
    epoch = run.attach()
    tickets = [ticket["ticket"] for ticket in run.post("tickets", producer="p", count=4).json()["tickets"]]
    run.append(group(None, ticket=tickets[0]), group(None, ticket=tickets[1]))
    used = run.state()["tokens" if bound == "max_tokens_live" else "bytes"]["live"]
    limits = {"max_group_bytes": 4000, bound: max(4000, used) if bound == "max_bytes_live" else used + 4}
    assert run.http.patch(run.path, json={"limits": limits}).status_code == 200
    big = [group(None, ticket=tickets[2], tokens=60), group(None, ticket=tickets[3], tokens=60)]
    rejection = run.http.post(f"{run.path}/groups", json={"groups": big})
    assert (rejection.status_code, rejection.json()["name"]) == (429, f"limits.{bound}")
    assert run.state()["groups"]["stored"] == 2
    run.batch(0, epoch)
    run.append(*big)
    assert run.state()["groups"]["live"] == 2
    assert run.append(big[0])[0]["status"] == "duplicate"


@pytest.mark.parametrize("bound", ["max_tokens_live", "max_bytes_live"])
def test_a_partly_stored_request_can_be_retried(run: RunClient, bound: str) -> None:
    """Also without tickets. Stored groups do not count against the limit again."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(group("first"))
    used = run.state()["tokens" if bound == "max_tokens_live" else "bytes"]["live"]
    limits = {bound: 2 * used, "max_group_bytes": used if bound == "max_bytes_live" else 4000}
    assert run.http.patch(run.path, json={"limits": limits}).status_code == 200
    body = [group("a"), group("b")]
    assert run.http.post(f"{run.path}/groups", json={"groups": body}).status_code == 429
    assert run.state()["groups"]["stored"] == 2
    run.train(epoch, range(2))
    assert [result["status"] for result in run.append(*body)] == ["duplicate", "stored"]


def test_a_stored_group_is_a_duplicate_after_a_limit_was_lowered(run: RunClient) -> None:
    """The new limit applies only to new groups."""
    run.put(batch={"groups_per_batch": 2})
    run.append(group("a", tokens=500))
    assert run.http.patch(run.path, json={"limits": {"max_group_bytes": 2000}}).status_code == 200
    results = run.append(group("a", tokens=500), group("b", tokens=500))
    assert [(result["status"], result.get("reason")) for result in results] == [
        ("duplicate", None),
        ("rejected", "too_large"),
    ]
    assert run.state()["groups"]["rejected"] == {"too_large": 1}


def test_a_stored_group_is_a_duplicate_after_a_rewind_below_its_version(run: RunClient) -> None:
    """With and without a ticket. A new group of that version is rejected."""
    run.put(batch={"groups_per_batch": 1}, strategy={"options": {"max_staleness": 3}})
    epoch = run.attach()
    run.append(group("a"))
    run.train(epoch, range(1))
    (ticket,) = (ticket["ticket"] for ticket in run.post("tickets", producer="p", count=1).json()["tickets"])
    late = [group("b", version=1), group(None, ticket=ticket, version=1)]
    assert [result["status"] for result in run.append(*late)] == ["stored", "stored"]
    run.attach(resume_step=0)
    results = run.append(*late, group("c", version=1))
    assert [result["status"] for result in results] == ["duplicate", "duplicate", "rejected"]


def test_overlong_truncate_shortens_rollouts_to_seq_len(run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 1, "seq_len": 8, "overlong": "truncate"})
    assert run.append(group("a", tokens=20))[0]["status"] == "stored"
    rollout = run.get("groups/a").json()["rollouts"][0]
    assert (len(rollout["completion_ids"]), rollout["finish_reason"]) == (6, "length")


def test_groups_are_listed_in_pages_by_state(run: RunClient) -> None:
    """`next` is the start of the following page."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    run.append(*(group(f"g{n}") for n in range(5)))
    run.batch(0, epoch)
    first = run.get("groups", state="live", limit=2).json()
    second = run.get("groups", state="live", limit=10, after=first["next"]).json()
    assert [g["group_id"] for g in first["groups"] + second["groups"]] == ["g1", "g2", "g3", "g4"]
    assert run.get("groups/g0").json()["batches"] == [0]
    assert run.get("groups/none").status_code == 404
    assert run.get("groups", state="nope").status_code == 422


def test_a_retired_group_lists_the_steps_that_used_it(run: RunClient) -> None:
    """Also after a checkpoint has freed the batches, alone and on a page."""
    strategy = {"name": "replay", "options": {"max_uses": 2, "max_staleness": 3, "order": "fifo", "look_ahead": 1}}
    assert run.put(batch={"groups_per_batch": 1}, strategy=strategy).is_success
    epoch = run.attach()
    run.append(group("a"), group("b"))
    run.train(epoch, range(4))
    assert run.post("checkpoints", epoch=epoch, step=4).is_success
    steps = {}
    for entry in run.get("groups", limit=10).json()["groups"]:
        details = run.get(f"groups/{entry['group_id']}").json()
        assert (details["state"], details["times_sampled"]) == ("retired", 2)
        assert details["batches"] == entry["batches"]
        steps[details["group_id"]] = details["batches"]
    assert sorted(steps["a"] + steps["b"]) == [0, 1, 2, 3]


def test_a_finished_run_takes_no_groups_and_says_so(run: RunClient) -> None:
    """Also to producers without tickets. A repeat of a stored group is a duplicate still; reopened, it takes groups."""
    run.put(batch={"groups_per_batch": 4})
    run.append(group("before"))
    assert run.http.patch(run.path, json={"state": "finished"}).status_code == 200
    late = run.post("groups", groups=[group("late"), group("later")])
    assert (late.status_code, late.json()["type"]) == (410, "urn:replaybuf:problem:finished"), late.text
    assert late.json()["value"] == "run_finished" and run.run in late.json()["detail"]
    assert run.append(group("before")) == [{"group_id": "before", "status": "duplicate"}]
    _, rejected = run.append(group("before"), group("late"))
    assert (rejected["status"], rejected["reason"]) == ("rejected", "run_finished")
    counts = run.state()["groups"]
    assert (counts["stored"], counts["rejected"]) == (1, {"run_finished": 3})
    assert run.http.patch(run.path, json={"state": "running"}).status_code == 200
    assert run.append(group("late")) == [{"group_id": "late", "status": "stored"}]


def test_a_run_that_reached_its_last_step_takes_no_groups(run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 1}, max_steps=1)
    epoch = run.attach()
    run.append(group("trained"))
    run.train(epoch, range(1))
    assert run.post("groups", groups=[group("late")]).status_code == 410

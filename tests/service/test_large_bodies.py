"""Bodies of appends that are large or hostile: they cost other calls neither time nor memory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from replaybuf.service.http.body.append_bodies import MAX_FRAMES_BYTES, MAX_GROUPS, MAX_JSON_BYTES
from replaybuf.wire.frame import MEDIA_TYPE, encode_frame
from replaybuf.wire.group import group_from_json
from tests.builders import rollout, wire_group
from tests.conftest import JSON, RunClient, ServeProcess, group
from tests.waiting import eventually

MIB = 1 << 20
BODY_BYTES = 16 * MIB
START = b'{"group_id": "a", "prompt_id": "p", "policy_version": 0, "rollouts": [{"reward": 1.0, "prompt_ids": [1], '
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def filled(start: bytes, element: bytes, end: bytes) -> bytes:
    """Build a body of `BODY_BYTES` out of many equal elements."""
    return start + element * (BODY_BYTES // len(element)) + end


HOSTILE = {
    "numbers": filled(b"[", b"1,", b"1]"),
    "lists": filled(b"[", b"[],", b"1]"),
    "an unknown field": filled(b'{"x": [', b"1,", b"1]}"),
    "text": filled(b'{"prompt_id": "', b"x", b'"}'),
    "metadata": filled(
        START + b'"completion_ids": [1], "inference_logprobs": [0]}], "metadata": {"a": [', b"{},", b"0]}}"
    ),
    "rollouts": filled(b'{"prompt_id": "p", "policy_version": 0, "rollouts": [', b"{},", b"{}]}"),
    "spans": filled(
        START + b'"completion_ids": [1], "inference_logprobs": [0], "version_spans": [', b"[0,0,1],", b"[0,0,1]]}]}"
    ),
    "a wrong value at the end": filled(START + b'"inference_logprobs": [', b"-0.12345678901234567,", b'"x"]}]}'),
    "NaN at the end": filled(START + b'"inference_logprobs": [', b"-1,", b"NaN]}]}"),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedClient]:
    """A run on a service of this module, whose memory no other test has used."""
    server = ServeProcess(tmp_path_factory.mktemp("large") / "data").start()
    client = LoadedClient(server)
    client.put(batch={"tokens_per_batch": 1 << 24, "seq_len": 1 << 22})
    yield client
    client.http.close()
    server.end()


class LoadedClient(RunClient):
    """Client that measures what the service process takes."""

    def __init__(self, server: ServeProcess) -> None:
        super().__init__(server.url, "large")
        self.pid = server.pid

    def loop_s(self) -> float:
        """Return the processor time of the thread of the event loop, in seconds."""
        fields = Path(f"/proc/{self.pid}/task/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def reset_peak(self) -> int:
        """Forget the peak; return the memory that the process uses."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return self.peak_bytes()

    def peak_bytes(self) -> int:
        """Return the largest memory that the process has used."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

    def decoders(self) -> list[int]:
        """List the processes that decode bodies."""
        children = Path(f"/proc/{self.pid}/task").glob("*/children")
        pids = [int(pid) for child in children for pid in child.read_text().split()]
        return [pid for pid in pids if b"decoder_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def held_bytes(self) -> int:
        """Return the memory of the service and its decoders, and of the files in memory that they share."""
        held, files = 0, {}
        for pid in [self.pid, *self.decoders()]:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            held += next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if "memfd:replaybuf" in str(file.readlink()):
                        files[file.stat().st_ino] = 512 * file.stat().st_blocks
        return held + sum(files.values())

    def send(self, body: bytes, kind: str = "application/json") -> httpx.Response:
        """Append a body."""
        return self.http.post(f"{self.path}/groups", content=body, headers={"content-type": kind})


def own_decoding_s(body: bytes) -> float:
    """Measure the processor time that Python takes to decode a body."""
    started_s = time.thread_time()
    with contextlib.suppress(ValueError):
        json.loads(body)
    return time.thread_time() - started_s


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_body_takes_neither_time_of_the_event_loop_nor_memory(loaded: LoadedClient, kind: str) -> None:
    """Reading it takes a fraction of the time that decoding it takes."""
    body, before_s, before = HOSTILE[kind], loaded.loop_s(), loaded.reset_peak()
    answer = loaded.send(body)
    spent_s, taken = loaded.loop_s() - before_s, loaded.peak_bytes() - before
    assert answer.status_code in (400, 413, 422) and len(answer.content) < 2000, answer.text[:2000]
    assert spent_s < 0.25 or spent_s < own_decoding_s(body) / 2
    assert taken < BODY_BYTES


def test_a_large_group_is_decoded_beside_other_calls(loaded: LoadedClient) -> None:
    """It is stored as it was sent."""
    sent = group("large", tokens=200_000, rollouts=8, metadata={"env": "x", "deep": [[1]]})
    body = json.dumps(sent).encode()
    before_s = loaded.loop_s()
    assert loaded.send(body).json()["results"] == [{"group_id": "large", "status": "stored"}]
    assert loaded.loop_s() - before_s < max(0.25, own_decoding_s(body))
    assert loaded.send(body).json()["results"] == [{"group_id": "large", "status": "duplicate"}]


def test_errors_of_a_large_body_name_the_value(loaded: LoadedClient) -> None:
    fine, wrong = group("fine"), group("wrong", tokens=100_000)
    wrong["rollouts"][1]["completion_ids"][77_000] = "x"
    answer = loaded.send(json.dumps({"groups": [fine, wrong]}).encode())
    assert answer.status_code == 400
    assert answer.json()["name"] == "groups[1].rollouts[1].completion_ids[77000]" and answer.json()["value"] == "x"
    assert loaded.get("groups/fine").status_code == 404


def test_groups_of_a_large_body_are_rejected_one_by_one(loaded: LoadedClient) -> None:
    """Each rejection names its group and its reason."""
    long = group("long", tokens=100_000)
    bad = group("bad", tokens=50_000)
    bad["rollouts"][0]["inference_logprobs"][-1] = 2.0
    uneven = group("uneven", tokens=50_000)
    uneven["rollouts"][0]["inference_logprobs"].pop()
    large = group("metadata", metadata={"text": "x" * 300_000})
    deep = group("deep", metadata={"a": [[]] * 10})
    deep["metadata"]["a"].append(json.loads("[" * 70 + "]" * 70))
    answer = loaded.send(json.dumps({"groups": [bad, long, uneven, large, deep]}).encode())
    assert [(result["group_id"], result.get("reason")) for result in answer.json()["results"]] == [
        ("bad", "positive_logprobs"),
        ("long", None),
        ("uneven", "length_mismatch"),
        ("metadata", "too_large"),
        ("deep", "bad_metadata"),
    ]


def test_a_body_that_takes_too_much_memory_is_refused(loaded: LoadedClient) -> None:
    """The process that decodes it goes on."""
    answer = loaded.send(HOSTILE["spans"])
    assert (answer.status_code, answer.json()["name"]) == (413, "body"), answer.text
    assert "needs more than 125829120 bytes of memory to decode" in answer.json()["detail"]
    assert loaded.send(json.dumps(group("next", tokens=100_000)).encode()).status_code == 200


def groups_of(body_bytes: int) -> bytes:
    """Build a body of many groups. A frame takes 9 bytes per token, and the JSON 4, the fewest that it can."""
    template = b'{"reward": 1, "prompt_ids": [1], "completion_ids": [%b1], "inference_logprobs": [%b0]}'
    many = b",".join([template % (b"1," * 20_000, b"0," * 20_000)] * 8)
    count = body_bytes // (len(many) + 100)
    start = b'{"group_id": "%d", "prompt_id": "p", "policy_version": 0, "rollouts": ['
    return b'{"groups": [' + b",".join(start % n + many + b"]}" for n in range(count)) + b"]}"


LARGEST = MAX_JSON_BYTES - 4096
LARGE = {
    "rollouts": lambda: HOSTILE["rollouts"][:-3] + b",{}" * ((LARGEST - BODY_BYTES) // 3) + b"]}",
    "spans": lambda: HOSTILE["spans"][:-4] + b",[0,0,1]" * ((LARGEST - BODY_BYTES) // 8) + b"]}]}",
    "empty groups": lambda: b'{"groups": [' + b"{}," * (LARGEST // 3 - 8) + b"{}]}",
    "groups whose frames have 137 MiB": lambda: groups_of(LARGEST),
    "groups, then rollouts": lambda: (
        groups_of(LARGEST // 2)[:-2]
        + b',{"prompt_id": "p", "policy_version": 0, "rollouts": ['
        + b"{}," * (LARGEST // 6 - 100)
        + b"{}]}]}"
    ),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_body_takes_at_most_three_times_its_limit(loaded: LoadedClient, kind: str) -> None:
    """The service, its decoders and the files that they share, for the worst bodies of 64 MiB."""
    body = LARGE[kind]()
    assert MAX_JSON_BYTES - MIB < len(body) <= MAX_JSON_BYTES
    loaded.send(json.dumps(group("warm", tokens=100_000)).encode())  # starts a decoder
    before, sent = loaded.held_bytes(), threading.Event()

    def watch() -> int:
        peak = 0
        while not sent.wait(0.02):
            peak = max(peak, loaded.held_bytes() - before)
        return peak

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            assert loaded.http.post(f"{loaded.path}/groups", content=body, headers=JSON, timeout=300).status_code < 500
        finally:
            sent.set()
        assert watching.result() <= 3 * MAX_JSON_BYTES


def test_a_killed_decoder_is_replaced(loaded: LoadedClient) -> None:
    """The system may kill it to free memory."""
    for name in ("one", "two"):
        assert loaded.send(json.dumps(group(name, tokens=100_000)).encode()).status_code == 200
        for pid in loaded.decoders():
            os.kill(pid, 9)


@pytest.mark.parametrize(("kind", "limit"), [("application/json", MAX_JSON_BYTES), (MEDIA_TYPE, MAX_FRAMES_BYTES)])
def test_a_body_above_its_limit_is_refused_before_it_is_sent(loaded: LoadedClient, kind: str, limit: int) -> None:
    host, _, port = loaded.http.base_url.netloc.decode().partition(":")
    head = f"POST {loaded.path}/groups HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: {kind}\r\n"
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(f"{head}content-length: {limit + 1}\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_a_body_of_unknown_length_is_refused_at_its_limit(loaded: LoadedClient) -> None:
    parts = iter([b"[" + b"1," * (4 * MIB)] * (MAX_JSON_BYTES // (8 * MIB) + 1))
    answer = loaded.http.post(f"{loaded.path}/groups", content=parts, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["bound"]) == (413, MAX_JSON_BYTES)


@pytest.mark.parametrize("kind", ["application/json", MEDIA_TYPE])
def test_too_many_groups_are_refused(loaded: LoadedClient, kind: str) -> None:
    """Their results must fit one answer."""
    if kind == MEDIA_TYPE:
        body = encode_frame(group_from_json(wire_group(rollout(), group_id="many", adapter="x"))) * (MAX_GROUPS + 1)
    else:
        body = json.dumps({"groups": [group("many", adapter="x", rollouts=1)] * (MAX_GROUPS + 1)}).encode()
    answer = loaded.send(body, kind)
    assert (answer.status_code, answer.json()["name"], answer.json()["bound"]) == (413, "groups", MAX_GROUPS)


# ---------------------------------------------------------------------- acks

ACK = b'{"epoch": 1, "feedback": {"metrics": ['
ACK_BYTES = MIB - 1000
HOSTILE_ACKS = {
    "an error at the end": ACK + b"[]," * (ACK_BYTES // 3) + b"}",
    "lists and NaN": ACK + b"[]," * (ACK_BYTES // 3) + b"NaN]}}",
    "numbers and NaN": ACK + b"0.1," * (ACK_BYTES // 4) + b'NaN], "x": ' + b"[" * 80 + b"]" * 80 + b"}}",
}


@pytest.mark.parametrize("kind", HOSTILE_ACKS)
def test_a_hostile_ack_takes_no_time_of_the_event_loop(loaded: LoadedClient, kind: str) -> None:
    """Feedback may have 1 MiB: decoding it on the event loop would hold it for up to 94 ms."""
    body, times = HOSTILE_ACKS[kind], 5
    bound_s = times * max(0.01, own_decoding_s(body) / 4)
    spent_s = []
    for _ in range(5):  # a busy processor adds to the time of a round, and takes nothing from it
        before_s = loaded.loop_s()
        for _ in range(times):
            answer = loaded.http.post(f"{loaded.path}/batches/0/ack", content=body, headers=JSON)
            assert answer.status_code in (400, 422) and len(answer.content) < 2000, answer.text[:2000]
        spent_s.append(loaded.loop_s() - before_s)
        if spent_s[-1] < bound_s:
            break
    assert min(spent_s) < bound_s


@contextlib.contextmanager
def _client(url: str, name: str) -> Iterator[RunClient]:
    client = RunClient(url, name)
    with client.http:
        yield client


def test_large_feedback_is_recorded_as_it_was_sent(loaded: LoadedClient) -> None:
    """Its priorities count, its NaN stays, and the errors in it are named as in a small ack."""
    with _client(str(loaded.http.base_url), f"{loaded.run}-acked") as run:
        run.put(batch={"groups_per_batch": 1}, strategy={"name": "replay", "options": {"max_uses": 2}})
        epoch = run.attach()
        run.append(group("a"))
        assert run.batch(0, epoch).status_code == 200
        feedback = {"priorities": {"a": 3.5}, "text": "é" * 100_000, "losses": [0.25, None, True], "big": 2**64 - 1}

        def ack(extra: str) -> httpx.Response:
            body = json.dumps({"epoch": epoch, "feedback": feedback})[:-2] + extra
            return run.http.post(f"{run.path}/batches/0/ack", content=body.encode(), headers=JSON)

        deep = ack(', "deep": ' + "[" * 64 + "]" * 64 + "}}")
        assert (deep.status_code, deep.json()["name"], deep.json()["bound"]) == (422, "feedback", 64)
        unknown = ack('}, "feedbak": 1}')
        assert unknown.status_code == 400 and "valid: epoch, feedback" in unknown.json()["detail"]
        assert ack(', "nan": NaN}}').status_code == 200
        (recorded,) = [record for record in run.get("ledger").json()["records"] if record["type"] == "ACK"]
        assert recorded["feedback"] == feedback | {"nan": None} and list(recorded["priorities"].values()) == [3.5]


# ---------------------------------------------------------------------- frames


def frame(group_id: str, tokens: int = 5, **fields: Any) -> bytes:
    """Encode a group of one rollout."""
    ids, logprobs = [3] * tokens, [-0.5] * tokens
    made = wire_group(rollout(completion_ids=ids, inference_logprobs=logprobs), group_id=group_id, **fields)
    return encode_frame(group_from_json(made))


def test_frames_are_stored_while_the_rest_of_the_body_is_on_its_way(loaded: LoadedClient) -> None:
    """The body waits until its first group can be read."""

    def parts() -> Iterator[bytes]:
        yield b"".join(frame(f"first-{number}") for number in range(100))
        with contextlib.closing(httpx.Client(base_url=loaded.http.base_url)) as other:
            eventually(lambda: other.get(f"{loaded.path}/groups/first-0").status_code != 404, 30.0)
        yield frame("last")

    answer = loaded.http.post(f"{loaded.path}/groups", content=parts(), headers={"content-type": MEDIA_TYPE})
    assert len(answer.json()["results"]) == 101 and loaded.get("groups/last").status_code == 200


def test_a_frame_above_the_limit_is_skipped_as_it_arrives(loaded: LoadedClient) -> None:
    before = loaded.reset_peak()
    name = f"{loaded.run}-small"
    with contextlib.closing(httpx.Client(base_url=loaded.http.base_url, timeout=60)) as http:
        config = {"batch": {"groups_per_batch": 1}, "limits": {"max_group_bytes": 100_000}}
        assert http.put(f"/v1/runs/{name}", json=config).status_code == 201
        body = frame("a") + frame("b", 2 * MIB) + frame("c")
        answer = http.post(f"/v1/runs/{name}/groups", content=body, headers={"content-type": MEDIA_TYPE}).json()
    assert [result["status"] for result in answer["results"]] == ["stored", "rejected", "stored"]
    rejection = answer["results"][1]
    assert (rejection["reason"], rejection["bound"]) == ("too_large", 100_000)
    assert loaded.peak_bytes() - before < 12 * MIB


@pytest.mark.parametrize("end", [b"RBF1", b"RBF2" + bytes(40), b"RBF1" + bytes(20)], ids=["cut", "magic", "length"])
def test_frames_before_a_broken_length_are_stored(loaded: LoadedClient, end: bytes) -> None:
    """The producer sends all again and gets `duplicate` for them."""
    many = [frame(f"kept-{len(end)}-{number}") for number in range(100)]
    answer = loaded.send(b"".join(many) + end, MEDIA_TYPE)
    assert (answer.status_code, answer.json()["name"]) == (400, "length")
    assert loaded.send(b"".join(many), MEDIA_TYPE).json()["results"][0]["status"] == "duplicate"


# ---------------------------------------------------------------------- answers


def test_a_large_group_is_read_beside_other_calls(loaded: LoadedClient) -> None:
    """It is encoded while it is sent, and nothing is lost or changed."""
    sent = group("read", tokens=300_000, rollouts=4, metadata={"rollouts": [], "x": [{}, {"a": 1}]})
    for number, entry in enumerate(sent["rollouts"]):
        entry["completion_ids"][-1] = number
    assert loaded.send(json.dumps(sent).encode()).status_code == 200
    with loaded.http.stream("GET", f"{loaded.path}/groups/read") as answer:
        assert "content-length" not in answer.headers
        read = json.loads(answer.read())
    assert read["metadata"] == sent["metadata"]
    for entry, was in zip(read["rollouts"], sent["rollouts"], strict=True):
        assert {name: entry[name] for name in was} == was
        assert entry["completion_mask"] == [1] * 299_998 and entry["version_spans"] == [[0, 0, 299_998]]


def test_the_first_large_answer_loads_no_module(tmp_path: Path) -> None:
    """Loading those of a streamed answer would hold the event loop for 30 ms."""
    server = ServeProcess(tmp_path / "data")
    server.environment = {"PYTHONPROFILEIMPORTTIME": "1"}
    try:
        with _client(server.start().url, "r") as client:
            client.put(batch={"tokens_per_batch": 1 << 20, "seq_len": 1 << 17})
            client.append(group("large", tokens=30_000, rollouts=4))
            loaded_before = server.log().count("import time:")
            assert len(client.get("groups/large").content) > 1 << 20
            assert server.log().count("import time:") == loaded_before > 100
    finally:
        server.end()

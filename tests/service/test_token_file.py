"""The tokens file: several tokens per name, expiry, limits to runs, revoking and reloading without a restart."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from replaybuf.cli.main import main
from replaybuf.errors import Forbidden, Invalid, NotFound, Unauthorized
from replaybuf.service.http.guard.auth import Tokens
from replaybuf.service.http.guard.token_file import new_token, read_tokens, read_uses, revoke_token, write_uses
from tests.conftest import ServeProcess
from tests.waiting import eventually

READER = frozenset({"reader"})
Run = Callable[..., str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a tokens file that does not exist yet."""
    return tmp_path / "secrets" / "tokens"


@pytest.fixture
def command(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `replaybuf tokens ...` on the file; return what it prints."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> str:
        main(["tokens", *arguments, "--tokens-file", str(path)])
        return capsys.readouterr().out.strip()

    return run


def test_a_token_expires(path: Path) -> None:
    """From that second on it is refused, and the message says so."""
    header = f"Bearer {new_token('reader', 'grafana', path, now_s=100.0, expires_in_s=60.0)}"
    now_s = 159.9
    tokens = Tokens.read(path, lambda: now_s)
    tokens.check(header, READER)
    now_s = 160.0
    with pytest.raises(Unauthorized, match=r"token 'grafana' has expired.*replaybuf tokens new --role reader"):
        tokens.check(header, READER)


def test_a_token_limited_to_runs_reaches_no_other_and_lists_only_these(path: Path) -> None:
    header = f"Bearer {new_token('operator', 'team', path, runs=['mine', 'ours'])}"
    tokens = Tokens.read(path)
    for run in ("mine", "ours"):
        tokens.check(header, frozenset(), run)
    with pytest.raises(Forbidden, match="is limited to the runs mine, ours; this call is for theirs") as caught:
        tokens.check(header, READER, "theirs")
    assert caught.value.bound == ["mine", "ours"]
    with pytest.raises(Forbidden, match="this call is for all runs"):
        tokens.check(header, READER, None)
    caller = tokens.check(header, READER, None, lists_runs=True)
    assert [run for run in ("mine", "ours", "theirs") if caller.may_see(run)] == ["mine", "ours"]


def test_a_name_may_have_several_tokens_and_each_is_revoked_alone(path: Path) -> None:
    """As in a rotation: the old one goes after the new one is in use."""
    old, new = (new_token("trainer", "host-1", path) for _ in range(2))
    first, second = read_tokens(path)
    with pytest.raises(Invalid, match=f"2 tokens have the name 'host-1'; .*{first.id}, {second.id}"):
        revoke_token("host-1", path)
    assert revoke_token(first.id, path) == first
    tokens = Tokens.read(path)
    tokens.check(f"Bearer {new}", frozenset({"trainer"}))
    with pytest.raises(Unauthorized):
        tokens.check(f"Bearer {old}", frozenset({"trainer"}))
    assert revoke_token("host-1", path) == second
    with pytest.raises(NotFound, match="no token with the name or id 'host-1'"):
        revoke_token("host-1", path)


def test_tokens_of_an_older_release_are_read_and_kept(path: Path) -> None:
    """Lines without the later fields, and without a line break at the end."""
    path.parent.mkdir()
    path.write_text('\n{"name":"old","role":"reader","sha256":"' + "ab" * 32 + '"}')
    new_token("reader", "new", path)
    assert [token.name for token in read_tokens(path)] == ["old", "new"]
    revoke_token("new", path)
    assert [(token.name, token.runs, token.expires_s) for token in read_tokens(path)] == [("old", (), None)]


def test_changes_at_the_same_time_lose_no_token(path: Path) -> None:
    """Some processes create tokens while others revoke; each change is there at the end."""
    for n in range(10):
        new_token("reader", f"gone-{n}", path)
    changes = [lambda n=n: new_token("reader", f"kept-{n}", path) for n in range(10)]
    changes += [lambda n=n: revoke_token(f"gone-{n}", path).name for n in range(10)]
    threads = [threading.Thread(target=change) for change in changes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(token.name for token in read_tokens(path)) == sorted(f"kept-{n}" for n in range(10))


def test_the_file_stays_private_and_holds_no_token(path: Path) -> None:
    tokens = [new_token("reader", name, path) for name in "ab"]
    path.chmod(0o640)
    revoke_token("a", path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert not any(token in path.read_text() for token in tokens)
    assert [entry.name for entry in path.parent.iterdir()] == ["tokens"]


def test_a_file_that_breaks_changes_nothing_in_a_running_service(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    header = f"Bearer {new_token('reader', 'a', path)}"
    tokens = Tokens.read(path)
    path.write_text("{")
    tokens.reload()
    tokens.check(header, READER)
    path.unlink()
    tokens.reload()
    tokens.check(header, READER)
    assert caplog.text.count("tokens not reloaded, the old ones stay") == 2


def test_the_last_use_is_the_newest_of_all_servers_and_goes_with_the_token(path: Path) -> None:
    for name in "ab":
        new_token("reader", name, path)
    first, second = (token.sha256 for token in read_tokens(path))
    write_uses(path, {first: 5.0, second: 7.0, "unknown": 9.0})
    write_uses(path, {first: 4.0, second: 8.0})
    assert read_uses(path) == {first: 5.0, second: 8.0}
    revoke_token("a", path)
    write_uses(path, {second: 9.0})
    assert read_uses(path) == {second: 9.0}
    path.with_name("tokens.used").write_text("{")
    assert read_uses(path) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--expires-in", "30"], "expires_in is '30'; it must be a whole number with m, h or d"),
        (["--expires-in", "0d"], "expires_in is '0d'"),
        (["--run", "No/Pe"], "run is 'No/Pe'; it must match"),
        (["--name", "a\nb"], "name"),
    ],
)
def test_wrong_options_create_no_token(
    path: Path, command: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        command("new", "--role", "reader", *(["--name", "x"] if "--name" not in arguments else []), *arguments)
    assert message in capsys.readouterr().err and not path.exists()


def test_the_list_shows_facts_and_never_a_token(path: Path, command: Run) -> None:
    token = command("new", "--role", "reader", "--name", "grafana", "--expires-in", "30d", "--run", "a", "--run", "b")
    command("new", "--role", "operator", "--name", "root")
    (stored, _) = read_tokens(path)
    write_uses(path, {stored.sha256: 1_700_000_000.0})
    shown = command("list")
    for text in ("grafana", "a, b", "2023-11-14", stored.id, "root", "all", "never"):
        assert text in shown, text
    raw = command("list", "--json")
    facts = json.loads(raw)[-1]  # the newest token comes first
    assert facts["expires_s"] - facts["created_s"] == 30 * 86_400 and facts["last_used_s"] == 1_700_000_000.0
    assert all(secret not in shown + raw for secret in (token, stored.sha256))
    assert f"revoked {stored.id} grafana (reader)" in command("revoke", "grafana")


@pytest.fixture
def guarded(path: Path, tmp_path: Path) -> Iterator[tuple[ServeProcess, str]]:
    """A service with one token, of a reader."""
    token = new_token("reader", "first", path)
    server = ServeProcess(tmp_path / "data", "--tokens-file", str(path)).start()
    yield server, token
    server.end()


def status(server: ServeProcess, token: str, path: str = "/v1/runs") -> int:
    """Return the status of a call with a token."""
    return httpx.get(f"{server.url}{path}", headers={"authorization": f"Bearer {token}"}).status_code


def test_a_running_service_reads_tokens_again_on_sighup(guarded: tuple[ServeProcess, str], path: Path) -> None:
    """A rotation without a restart: the new token works, the old one stops, and the last uses are written."""
    server, old = guarded
    new = new_token("reader", "second", path, runs=["only-this"])
    assert (status(server, old), status(server, new)) == (200, 401)
    os.kill(server.pid, signal.SIGHUP)
    eventually(lambda: status(server, new) == 200, 60.0)
    assert (status(server, new, "/v1/runs/only-this"), status(server, new, "/v1/runs/other")) == (404, 403)
    revoke_token("first", path)
    assert status(server, old) == 200, "it is still known"
    os.kill(server.pid, signal.SIGHUP)
    eventually(lambda: status(server, old) == 401, 60.0)
    assert server.stop() == 0
    (left,) = read_tokens(path)
    assert read_uses(path).keys() == {left.sha256}

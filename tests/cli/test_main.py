"""The command line: options from three sources, and one clear message for each error."""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from replaybuf.cli.main import COMMANDS, main
from replaybuf.cli.short_help import FIRST_OPTIONS
from replaybuf.tracing import spans
from tests.command_lines import options_of
from tests.conftest import RunClient, ServeProcess, group
from tests.forked import run_forked


def replaybuf(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would."""
    return run_forked("replaybuf", arguments, os.environ | environment)


def test_help_lists_every_command_with_a_summary() -> None:
    """The summaries of lazily imported commands too."""
    shown = replaybuf("--help", COLUMNS="200").stdout
    assert re.findall(r"^╭─ (\w+) ─", shown, re.MULTILINE) == ["Run", "Look", "Operate", "Develop"]
    summaries = dict(re.findall(r"^│ ([a-z][a-z-]+) +(\w.*\w\.?) +│$", shown, re.MULTILINE))
    commands = {
        "serve",
        "status",
        "doctor",
        "tokens",
        "strategies",
        "generate",
        "stage",
        "eval",
        "simulate",
        "size",
        "study",
        "demo",
    }
    commands |= {
        "export",
        "import",
        "backup",
        "restore",
        "up",
        "config",
        "runs",
        "groups",
        "ledger",
        "explain",
        "completion",
        "top",
        "evals",
        "report",
    }
    assert summaries.keys() == commands | {"engine", "fetch-weights", "init-model", "train"}
    assert summaries["generate"].startswith("Generate scored groups of rollouts")
    assert summaries["generate"] in replaybuf(COLUMNS="200").stdout


@pytest.mark.parametrize("words", [words for paths in COMMANDS.values() for words in paths])
def test_the_help_of_a_command_describes_each_of_its_arguments(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are required too."""
    main([*words.split(), "--help-all"])
    shown = capsys.readouterr().out
    assert "Usage: " in shown and not re.search(r"│ \*? *[A-Z-]+ +\[", shown), shown


def test_the_terminal_breaks_the_text_of_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of a docstring do not show as lines of their own: each continuation starts where the text starts."""
    main(["serve", "--help-all"])
    panel = capsys.readouterr().out.partition("Options of every command")[0]
    columns = {len(space) for space in re.findall(r"^│( {20,})\S", panel, re.MULTILINE)}
    assert len(columns) == 1, panel


@pytest.mark.parametrize("words", FIRST_OPTIONS)
def test_the_help_of_a_command_with_many_options_shows_those_that_a_user_needs_first(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all that are required, and --help-all, which shows the others too."""
    pages = []
    for flag in ("--help", "--help-all"):
        main([*words.split(), flag])
        shown = capsys.readouterr().out.partition("Options of every command")[0]
        required = set(re.findall(r"^│ \*  (--[a-z-]+)", shown, re.MULTILINE))
        pages.append((set(re.findall(r"^│ (?:\*  |   )?(--[a-z-]+)", shown, re.MULTILINE)), required))
    (short, required), (every, all_required) = pages
    first = {f"--{option}" for option in FIRST_OPTIONS[words].split()}
    assert first <= every and len(every) > len(first) + 3
    assert short == first | required | {"--help-all"} and required == all_required and len(short) <= 15


@pytest.mark.parametrize("command", ["generate", "train", "eval", "fetch-weights"])
def test_the_run_is_an_argument_and_wins_over_environment_and_file(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"REPLAYBUF_{command.replace('-', '_').upper()}_RUN"
    values = {"engine": "http://e", "environment": "e", "prompts": "p", "tokenizer": "t", "max-tokens": "8"}
    values |= {"model": "m", "url": "http://u"}
    needed = [
        word for key, value in values.items() for word in (f"--{key}", value) if f"--{key}" in options_of(command)
    ]

    file = tmp_path / "c.toml"
    file.write_text(f'[{command}]\nrun = "file"\n')

    def stop(_: str, run: str) -> None:
        raise LookupError(run)

    def run_of(*words: str) -> str:
        with pytest.raises(LookupError) as stopped:
            main([command, *words, *needed, "--traces"])
        return str(stopped.value)

    monkeypatch.setattr(spans, "enable", stop)
    assert run_of("--config", str(file)) == "file"
    monkeypatch.setenv(variable, "environment")
    assert run_of("--config", str(file)) == "environment"
    assert run_of("argument") == run_of("--run", "argument") == "argument"


def test_everything_that_a_command_misses_is_named_at_once() -> None:
    """From the environment it counts as given."""
    needed = ("--engine", "--environment", "--prompts", "--tokenizer", "--max-tokens", "--url", "RUN")
    message = replaybuf("generate").stderr
    assert all(f" {option}" in message for option in needed), message
    message = replaybuf("generate", "--url", "http://127.0.0.1:1", REPLAYBUF_GENERATE_RUN="x").stderr
    assert "RUN" not in message and "--url" not in message and " --engine, --environment" in message
    assert "needs RUN, STEP;" in replaybuf("explain").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--host", "0.0.0.0"], "without tokens the service binds loopback only"),
        (["serve", "--host", "0.0.0.0"], f"Make one: {sys.executable} -m replaybuf tokens new --role"),
        (["serve", "--port", "0", "--redis-url", "redis://127.0.0.1:1"], "cannot be reached"),
        (["serve", "--port", "0", "--redis-url", "http://x"], "redis_url is 'http://x'; use redis://HOST:PORT/DB"),
        (
            ["serve", "--port", "0", "--redis-url", "redis://me:pass:w@rd@127.0.0.1:1"],
            "Redis at redis://me:***@127.0.0.1:1 cannot",
        ),
        (["serve", "--advertise-url", "a:8900"], "advertise_url is 'a:8900'; use http://HOST:PORT or unix:/PATH"),
        (["--config", "nowhere.toml", "serve"], "config file nowhere.toml cannot be read"),
        (["status", "--url", "http://127.0.0.1:1"], "no answer from http://127.0.0.1:1"),
        (["status", "No/Pe"], "run is 'No/Pe'; it must match"),
        (["status", "--token", "s\u00e9cret "], "token has an invalid character"),
        (["simulate", "--run", "x"], "--run is 'x'; it needs --from"),
        (["simulate", "--save-recording", "x"], "--save-recording is 'x'; it needs --from"),
        (["simulate", "--steps", "1", "--report-dir", "/dev/null/x"], "report folder /dev/null/x cannot be created"),
        (["demo", "--data-dir", "/dev/null/x"], "data folder /dev/null/x cannot be created: Not a directory"),
        (["serve", "--tls-cert", "a.pem"], "tls_key is not set"),
        (["serve", "--tls-cert", "a.pem", "--tls-key", "b.pem"], "certificate a.pem with key b.pem cannot be used"),
        (["serve", "--tls-cert", "a", "--tls-key", "b", "--uds", "s"], "with TLS a server listens on TCP only"),
        (["token", "new", "--role", "reader", "--name", "", "--tokens-file", "x"], "name is ''"),
        (["token", "new", "--role", "king", "--name", "x", "--tokens-file", "x"], "role is 'king'"),
    ],
)
def test_a_failure_is_one_line_on_standard_error_and_exit_code_1(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    """The message names the value; there is no traceback."""
    done = replaybuf(*arguments, REPLAYBUF_SERVE_DATA_DIR=str(tmp_path), REPLAYBUF_SERVE_PORT="0")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr and "cret" not in done.stderr


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = replaybuf("serve", "--port", str(port), "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_flags_beat_the_environment_and_the_environment_beats_the_file(tmp_path: Path) -> None:
    config = tmp_path / "replaybuf.toml"
    config.write_text('[serve]\nhost = "file"\nport = 1\n')
    from_file = replaybuf("--config", str(config), "serve")
    from_environment = replaybuf("--config", str(config), "serve", REPLAYBUF_SERVE_HOST="environment")
    from_flag = replaybuf("--config", str(config), "serve", "--host", "flag", REPLAYBUF_SERVE_HOST="environment")
    for done, host in ((from_file, "file"), (from_environment, "environment"), (from_flag, "flag")):
        assert f"host is '{host}'" in done.stderr


def test_environment_variables_name_the_configuration_file(tmp_path: Path) -> None:
    """The variable of the command wins over the global one; a flag wins over both."""
    files = {}
    for name in ("of_serve", "of_all", "flag"):
        files[name] = str(tmp_path / f"{name}.toml")
        Path(files[name]).write_text(f'[serve]\nhost = "{name}"\n')
    both = {"REPLAYBUF_SERVE_CONFIG": files["of_serve"], "REPLAYBUF_CONFIG": files["of_all"]}
    of_all = {"REPLAYBUF_CONFIG": files["of_all"], "REPLAYBUF_GENERATE_CONFIG": "of another"}
    for done, host in (
        (replaybuf("serve", REPLAYBUF_SERVE_CONFIG=files["of_serve"]), "of_serve"),
        (replaybuf("serve", **both, REPLAYBUF_SERVE_LOG_LEVEL="debug"), "of_serve"),
        (replaybuf("serve", **of_all), "of_all"),
        (replaybuf("serve", "--config", files["flag"], **both), "flag"),
        (replaybuf("serve", f"--config={files['flag']}", **both), "flag"),
    ):
        assert f"host is '{host}'" in done.stderr and "not an option of" not in done.stderr


def test_a_configuration_file_has_only_tables_of_commands(tmp_path: Path) -> None:
    """A misspelled name would otherwise be ignored, and a default used instead."""
    for written, message in (
        ("[srve]\nport = 1\n", "an unknown table [srve]"),
        ("port = 1\n", "key 'port' outside the tables"),
    ):
        config = tmp_path / "replaybuf.toml"
        config.write_text(written)
        done = replaybuf("serve", REPLAYBUF_CONFIG=str(config))
        assert done.returncode == 1
        assert message in done.stderr and "serve, simulate, size, stage, status" in done.stderr


def test_an_unknown_environment_variable_of_a_command_is_logged() -> None:
    """It is not an error: Kubernetes sets such variables."""
    done = replaybuf("serve", REPLAYBUF_SERVE_PROT="1", REPLAYBUF_SERVE_HOST="a", REPLAYBUF_STATUS_URL="b")
    assert "REPLAYBUF_SERVE_PROT is not an option of serve; did you mean REPLAYBUF_SERVE_PORT?" in done.stderr
    assert done.stderr.count("not an option of") == 1
    assert (
        "not an option of"
        not in replaybuf(
            "serve", REPLAYBUF_SERVE_PROT="1", REPLAYBUF_SERVE_HOST="a", REPLAYBUF_LOG_LEVEL="error"
        ).stderr
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "70000"], "Must be <= 65535"),
        (["serve", "--log-level", "loud"], '"warning"'),
        (["doctor", "--port", "-1"], "Must be >= 0"),
        (["engine", "--model", "x", "--threads", "0"], "Must be > 0"),
        (["train", "x", "--model", "x", "--engine", "x", "--learning-rate", "-1"], "Must be > 0"),
    ],
)
def test_an_option_out_of_range_is_rejected_before_anything_starts(arguments: list[str], message: str) -> None:
    """The exit code is 2; the message has option, value and bound."""
    done = replaybuf(*arguments)
    assert done.returncode == 2
    assert f'Invalid value "{arguments[-1]}' in done.stderr and arguments[-2] in done.stderr and message in done.stderr


def test_a_log_level_may_be_in_capitals() -> None:
    """Manifests of other Python services write it so."""
    variable = {"REPLAYBUF_SERVE_PROT": "1"}
    assert (
        "not an option of"
        in replaybuf("serve", REPLAYBUF_SERVE_HOST="a", REPLAYBUF_LOG_LEVEL="WARNING", **variable).stderr
    )
    assert (
        "not an option of"
        not in replaybuf("--log-level", "ERROR", "serve", REPLAYBUF_SERVE_HOST="a", **variable).stderr
    )


def test_status_prints_the_waiting_reason_of_a_run(service: ServeProcess, run: RunClient) -> None:
    """The same reason as over HTTP."""
    run.put(batch={"groups_per_batch": 2})
    run.append(group("a"))
    shown = replaybuf("status", "--url", service.url, run.run).stdout
    assert "too_few_groups" in shown
    assert "stored 5.0, used -, dropped -" in shown and "issued 0, stored 0, trained 0, dropped 0" in shown
    shown = replaybuf("status", "--url", f"http://127.0.0.1:1,{service.url}", run.run).stdout
    assert "too_few_groups" in shown, "unreachable servers are skipped"
    run.append(group("b"))
    run.train(run.attach(), range(1))
    evaluation = {"name": "held-out", "version": 0, "reward_mean": 0.5, "rollouts": 20, "failed": 1}
    assert run.post("evaluations", **evaluation | {"reward_mean": 0.25, "versions": [0]}).status_code == 200
    assert run.post("evaluations", **evaluation, versions=[0, 1]).status_code == 200
    shown = replaybuf("status", "--url", service.url, run.run).stdout
    assert "evaluation held-out" in shown and "version 0, 1: reward 0.500" in shown and "0.250" not in shown
    assert re.search(r"staleness at use +│ 0: 2", shown) and re.search(r"times sampled at use +│ 1: 2", shown)
    assert replaybuf("status", "--url", service.url, "nobody").returncode == 1


@pytest.mark.parametrize(
    ("answered", "message"),
    [(200, "does not fit the contract: JSON is malformed"), (404, "returned status 404: '<p>hi</p>'")],
)
def test_status_quotes_the_answer_of_another_web_server(answered: int, message: str) -> None:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answered)
            self.end_headers()
            self.wfile.write(b"<p>hi</p>")

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as page:
        answering = threading.Thread(target=page.handle_request)
        answering.start()
        done = replaybuf("status", "--url", f"http://127.0.0.1:{page.server_port}")
        answering.join(10)
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr


def test_doctor_finds_the_embedded_valkey_strict(tmp_path: Path) -> None:
    done = replaybuf("doctor", "--data-dir", str(tmp_path), "--port", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "strict" in done.stdout


def test_doctor_reports_a_running_replaybuf_on_its_port(service: ServeProcess, tmp_path: Path) -> None:
    """The port is not reported as taken by an unknown program."""
    port = service.url.rpartition(":")[2]
    done = replaybuf("doctor", "--data-dir", str(tmp_path), "--port", port, COLUMNS="300")
    assert re.search(
        rf"port +│ ok +│ 127.0.0.1:{port}: a running replaybuf answers, ready, durability strict", done.stdout
    )


def test_doctor_fails_for_a_data_folder_that_is_a_file_and_for_a_foreign_host(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = replaybuf("doctor", "--data-dir", str(tmp_path / "file"), "--port", "0", COLUMNS="300")
    assert done.returncode == 1
    assert re.search(r"data folder +│ fail .*file: Not a directory", done.stdout)
    done = replaybuf("doctor", "--data-dir", str(tmp_path / "new"), "--host", "192.0.2.1", COLUMNS="300")
    assert done.returncode == 1
    assert re.search(r"port +│ fail .*192.0.2.1:8900: Cannot assign requested address +│ choose a --host", done.stdout)
    assert re.search(rf"data folder +│ ok +│ to be created in {tmp_path}", done.stdout)


def test_doctor_fails_if_redis_is_unreachable() -> None:
    """The JSON has the checks of the table and the same exit code."""
    command = ("doctor", "--redis-url", "redis://127.0.0.1:1", "--port", "0")
    table, listed = replaybuf(*command, COLUMNS="300"), replaybuf(*command, "--json")
    assert table.returncode == listed.returncode == 1
    checks = json.loads(listed.stdout)
    assert all(check.keys() == {"name", "state", "text", "way_out"} for check in checks)
    assert re.findall(r"^│ (\w[\w ]*?) +│ (\w+) ", table.stdout, re.MULTILINE) == [
        (check["name"], check["state"]) for check in checks
    ]
    (failed,) = (check for check in checks if check["state"] == "fail")
    assert failed["name"] == "redis" and "redis://127.0.0.1:1" in failed["text"] and "--redis-url" in failed["way_out"]


def test_a_wide_table_wraps_strategy_names() -> None:
    names = ["one-step-off-policy:max_staleness=2", "one-step-off-policy", "on-policy"]
    done = replaybuf("simulate", "--steps", "3", *(word for name in names for word in ("--strategy", name)))
    assert done.returncode == 0
    assert "…" not in done.stdout

"""Send requests that Schemathesis derives from `/openapi.json` to a private service: `python -m tests.schema`.

Every call gets valid and invalid data. Each answer must have a documented status, content type and shape, and none may
be a fault of the service. The last line is the verdict.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from replaybuf.client.client import Client
from tests.chaos.content import make_group
from tests.chaos.processes import Child, python, read_address

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
RUNS = [f"r{number}" for number in range(40)]
CONFIG = {"batch": {"groups_per_batch": 1, "tokens_per_batch": None}, "strategy": {"options": {"max_staleness": 9}}}
GROUPS = 4
"""Stored in every run, so that batches are served."""
START_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 20
END_TIMEOUT_S = 300.0


def main() -> None:
    """Start the service, run Schemathesis, and exit with 1 after a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.schema", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--environment", type=Path, default=Path(".venv-schema"), help="of Schemathesis")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="schema-") as folder:
        code = check(Path(folder), args.environment.absolute(), args.seconds, args.seed)
    print("GOOD: every answer matches /openapi.json" if code == 0 else "BAD: see the failures above")
    sys.exit(min(code, 1))


def check(folder: Path, environment: Path, seconds: int, seed: int) -> int:
    """Send requests for about `seconds`; return the exit code of Schemathesis, or 1 if the service ended."""
    command = python("replaybuf", "serve", "--port", "0", "--data-dir", str(folder / "data"))
    serve = Child("serve", "server", command, folder)
    serve.start()
    try:
        url = read_address(serve, START_TIMEOUT_S)
        for run in RUNS:
            with Client(url, run) as client:
                client.put_run(CONFIG)
                client.append([make_group(f"p{number}", 0, named=True) for number in range(GROUPS)])
        code = subprocess.run(
            [
                *(str(environment / "bin/st"), "run", f"{url}/openapi.json"),
                *("--checks", ",".join(CHECKS), "--mode", "all", "--phases", "coverage,fuzzing"),
                *("--seed", str(seed), "--max-time", str(seconds), "--continue-on-failure"),
                *("--request-timeout", str(REQUEST_TIMEOUT_S), "--warnings", "off"),
            ],
            cwd=folder,
            env=os.environ
            | {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(Path(__file__).parent)}
            | {"REPLAYBUF_SCHEMA_RUNS": ",".join(RUNS)},
            timeout=seconds + END_TIMEOUT_S,
            check=False,
        ).returncode
        if serve.exit_code is not None:
            print(f"the service ended with {serve.exit_code}: {serve.log.read_text()[-2000:]}")
            return 1
        return code
    finally:
        serve.ask_to_end()
        if serve.wait_end() is None:
            serve.kill()


if __name__ == "__main__":
    main()

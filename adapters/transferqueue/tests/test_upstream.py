"""TransferQueue's own end-to-end tests, which its wheel contains, on this back end."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest

from tests.valkeys import Valkey

ONLY_FOR_SIMPLE_STORAGE = (
    "TestCheckpointRoundtrip and test_tensor_fields",  # looks for the folder of SimpleStorage
    "test_storage_saved_is_true",  # SimpleStorage ignores include_storage=False
    "test_load_raises_on_storage_unit_count_mismatch",  # edits a file of SimpleStorage
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", ["kv_interface", "e2e_lifecycle_consistency", "checkpoint"])
def test_its_end_to_end_tests_pass(module: str, valkey: Valkey, tmp_path: Path) -> None:
    name = f"test_{module}.py" if module.startswith("e2e") else f"test_{module}_e2e.py"
    (path,) = [Path(str(file.locate())) for file in files("TransferQueue") or () if file.name == name]
    here = Path(__file__).parent
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "replaybuf_upstream", "-c", os.devnull, "-p", "no:cacheprovider"),
            *("--rootdir", str(path.parent), "-q", "-o", "asyncio_mode=auto", str(path)),
            *("-k", f"not ({') and not ('.join(ONLY_FOR_SIMPLE_STORAGE)})"),
        ],
        env=os.environ | {"UPSTREAM_URL": valkey.url, "PYTHONPATH": str(here)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:]
    print(finished.stdout.splitlines()[-1])

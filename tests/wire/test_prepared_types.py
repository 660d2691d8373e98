"""Shapes that several threads decode for the first time at once."""

from __future__ import annotations

import subprocess
import sys

_THREADS = """
import sys
import threading
from typing import Any

import msgspec

from replaybuf.wire.decoding import decode_json

sys.setswitchinterval(1e-6)
FIELDS = [f"field_{number}" for number in range(20)]
BODY = msgspec.json.encode({"items": [dict.fromkeys(FIELDS, 1)] * 20})
ITEMS = [msgspec.defstruct(f"Item{number}", [(name, int) for name in FIELDS]) for number in range(60)]
PAGES: list[Any] = [msgspec.defstruct("Page", [("items", list[item])]) for item in ITEMS]
together = threading.Barrier(8)


def decode_all() -> None:
    for page in PAGES:
        together.wait(60)
        assert len(decode_json(BODY, page).items) == 20


threads = [threading.Thread(target=decode_all) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("decoded")
"""


def test_threads_may_decode_a_shape_for_the_first_time_together() -> None:
    """msgspec alone ends the process with a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", _THREADS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "decoded\n"), done.stderr

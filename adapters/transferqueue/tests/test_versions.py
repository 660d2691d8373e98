"""A release of TransferQueue that nobody tested is a warning at the import."""

from __future__ import annotations

import subprocess
import sys


def test_an_untested_transferqueue_is_named_with_the_tested_range() -> None:
    code = "from replaybuf.client import peers; peers.version = lambda _: '0.2.0'; import replaybuf_transferqueue"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "TransferQueue is 0.2.0; replaybuf-transferqueue is tested with 0.1.11 up to but not 0.1.12" in done.stderr

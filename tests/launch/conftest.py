"""The recorded progress that the views show."""

from __future__ import annotations

import pytest

from replaybuf.launch.progress import Progress
from tests.launch.recorded import recorded_progress


@pytest.fixture
def progress() -> Progress:
    """The recorded progress of ten steps."""
    return recorded_progress()

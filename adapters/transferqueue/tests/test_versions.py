"""The tested releases: another TransferQueue is a warning at the import, and verl gets what verl allows."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement


def test_an_untested_transferqueue_is_named_with_the_tested_range() -> None:
    code = "from replaybuf.client import peers; peers.version = lambda _: '0.2.0'; import replaybuf_transferqueue"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "TransferQueue is 0.2.0; replaybuf-transferqueue is tested with 0.1.11 up to but not 0.1.12" in done.stderr


def test_verl_is_tested_with_releases_that_it_allows() -> None:
    """verl is installed without its dependencies, so pip does not check them."""
    needed = [Requirement(line) for line in requires("verl") or ()]
    forbidden = []
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:  # such as wandb, which the tests do not need
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            forbidden.append(f"{requirement}: {installed}")
    assert forbidden == []

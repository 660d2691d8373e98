"""Start the process. This folder becomes a package by itself, without the one around it."""

import importlib.util
import sys
from pathlib import Path

NAME = "replaybuf_taskset_worker"


def package() -> None:
    """Make the modules of this folder importable as NAME, with nothing else of their neighbourhood."""
    here = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(NAME, here / "__init__.py", submodule_search_locations=[str(here)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{here} is no package")
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])


if __name__ == "__main__":
    package()
    importlib.import_module(f"{NAME}.process").main()

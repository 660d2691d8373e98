"""Start the process, with this folder as a package of its own."""

import importlib.util
import sys
from pathlib import Path

NAME = "replaybuf_taskset_worker"


def register_package() -> None:
    """Make the modules of this folder importable as NAME, without those around it."""
    here = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(NAME, here / "__init__.py", submodule_search_locations=[str(here)])
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import the package {here}")
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])


if __name__ == "__main__":
    register_package()
    importlib.import_module(f"{NAME}.process").main()

"""Start the process, with this folder as a package of its own. Its argument is the file of `replaybuf.wire.pipes`."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

NAME = "replaybuf_taskset_worker"


def import_file(name: str, file: Path, submodules: list[str] | None = None) -> ModuleType:
    """Import a file under a name, without the package around it; `submodules`: folders of a package."""
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=submodules)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {file}")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    import_file(NAME, here / "__init__.py", [str(here)])
    pipes = import_file(f"{NAME}_pipes", Path(sys.argv[1]))
    importlib.import_module(f"{NAME}.process").main(pipes)

"""Import Python files outside of packages, such as those of ``experiments/``."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_script(path: str) -> ModuleType:
    """Import a file as a new module at each call; ``path`` is relative to the root of the repository.

    The file may import its neighbours, as it may when it is run.
    """
    name, folder = Path(path).stem, str((ROOT / path).parent)
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look up their annotations
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module

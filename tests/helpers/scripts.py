"""Python files that are no part of a package, such as those of ``experiments/``, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_script(path: str) -> ModuleType:
    """A module of a file, anew at each call; ``path`` begins at the root of the repository."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module

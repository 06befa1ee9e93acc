"""Compiles the C++ part on first use. The result is kept in PyTorch's extension folder (``TORCH_EXTENSIONS_DIR``)."""

import hashlib
import os
import sys
import sysconfig
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from filelock import FileLock

_NAME = "ptx_executor_core"
_FOLDER = Path(__file__).resolve().parent / "core"
_FLAGS = ["-O2", "-std=c++20", "-fwrapv", "-Wall", "-Wextra"]


@cache
def core() -> ModuleType:
    """The extension. Two processes do not compile it at the same time."""
    import torch
    from torch.utils import cpp_extension

    files = sorted(path for path in _FOLDER.rglob("*") if path.suffix in (".cpp", ".h"))
    # One folder for each state of the sources, shared by checkouts with the same sources.
    made_of = hashlib.sha256(f"{sys.version} {torch.__version__} {_FLAGS}".encode())
    for path in files:
        made_of.update(path.read_bytes())
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder = Path(root) / f"ptx_executor_{made_of.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    complete = folder / "complete"
    with FileLock(folder.with_suffix(".lock")):
        if complete.exists():
            return _imported(folder / f"{_NAME}.so")
        # If a process was killed, PyTorch's own lock remains and the next process would wait for ever.
        (folder / "lock").unlink(missing_ok=True)
        # ninja is a Python package: its program is next to Python's.
        os.environ["PATH"] = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        sources = [str(path) for path in files if path.suffix == ".cpp"]
        module = cpp_extension.load(_NAME, sources, extra_cflags=_FLAGS, build_directory=str(folder))
        # Without this, ninja would compile again for another checkout, whose sources have other paths.
        complete.touch()
    return module


def _imported(library: Path) -> ModuleType:
    spec = spec_from_file_location(_NAME, library)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""The part in C++, compiled on first use and kept where PyTorch keeps its extensions (``TORCH_EXTENSIONS_DIR``)."""

import hashlib
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent / "core"
_FLAGS = ["-O2", "-std=c++20", "-fwrapv", "-Wall", "-Wextra"]


@cache
def core() -> ModuleType:
    """The extension. Takes half a minute where it is not compiled yet; two processes do not compile it twice."""
    import torch
    from torch.utils import cpp_extension

    files = sorted(path for path in _FOLDER.rglob("*") if path.suffix in (".cpp", ".h"))
    # A folder for each state of the sources: two checkouts do not take each other's.
    made_of = hashlib.sha256(f"{sys.version} {torch.__version__} {_FLAGS}".encode())
    for path in files:
        made_of.update(path.read_bytes())
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder = Path(root) / f"ptx_executor_{made_of.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    # ninja comes as a package: its program is beside Python's.
    os.environ["PATH"] = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    sources = [str(path) for path in files if path.suffix == ".cpp"]
    return cpp_extension.load("ptx_executor_core", sources, extra_cflags=_FLAGS, build_directory=str(folder))

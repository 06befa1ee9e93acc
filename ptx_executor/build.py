"""The part in C++, compiled on first use and kept where PyTorch keeps its extensions (``TORCH_EXTENSIONS_DIR``)."""

import os
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent / "core"


@cache
def core() -> ModuleType:
    """The extension. Takes half a minute where it is not compiled yet; two processes do not compile it twice."""
    from torch.utils import cpp_extension

    # ninja comes as a package: its program is beside Python's.
    os.environ["PATH"] = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return cpp_extension.load(
        "ptx_executor_core",
        sorted(str(path) for path in _FOLDER.rglob("*.cpp")),
        extra_cflags=["-O2", "-std=c++20", "-fwrapv", "-Wall", "-Wextra"],
    )

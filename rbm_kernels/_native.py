"""Finds and loads the compiled libraries in ``rbm_kernels/lib``, and reports their status."""

import json
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch

LIBRARY_DIR = Path(__file__).parent / "lib"
MEND = "rebuild it with `pip install -e .` in a checkout, or reinstall rbm-kernels"
WITHOUT_LIBRARIES = "this package was built without compiled libraries (RBM_BUILD=none)"

_status: dict[str, dict] = {}


def load() -> None:
    """Load librbm_cpu, and librbm_cuda if CUDA is available; nothing if the package was built without libraries.

    Raises:
        ImportError: librbm_cpu is missing or cannot be loaded. If librbm_cuda cannot be loaded, a warning is issued,
            and Triton serves its operators, or the eager references if Triton is not installed. If librbm_cuda is
            missing, as after a build without nvcc, the warning is issued only if Triton is not installed.
    """
    _load_library("cpu")
    if not _path("cpu").exists() and is_built_without_libraries():
        for name in ("cpu", "cuda"):
            _record(name, loaded=False, reason=WITHOUT_LIBRARIES)
        return
    if not _status["cpu"]["loaded"]:
        raise ImportError(f"{_status['cpu']['reason']}: {MEND}.")
    if not torch.cuda.is_available():
        _record("cuda", loaded=False, reason="CUDA is not available")
        return
    _load_library("cuda")
    has_triton = find_spec("triton") is not None
    if not _status["cuda"]["loaded"] and (_path("cuda").exists() or not has_triton):
        instead = "Triton serves" if has_triton else "the slower eager references serve"
        warnings.warn(
            f"{_status['cuda']['reason']}: {instead} its operators on CUDA tensors; {MEND}.",
            RuntimeWarning,
            stacklevel=2,
        )


def status() -> dict[str, dict]:
    """For ``cpu`` and ``cuda``: the library's ``path``, whether it is ``loaded``, and the ``reason`` if it is not."""
    return {name: dict(entry) for name, entry in _status.items()}


def build_info() -> dict[str, str | None]:
    """What was built: version, compilers, flags, CUDA version and architectures (None without CUDA), ABI target.

    In a package built without libraries, ``build_type`` is ``none`` and everything else except the version is None.

    Raises:
        ImportError: the file that the build wrote next to the libraries is missing or damaged.
    """
    path = LIBRARY_DIR / "build_info.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ImportError(f"{path} is missing: {MEND}.") from None
    except ValueError as error:
        raise ImportError(f"{path} is damaged ({error}): {MEND}.") from error


def is_built_without_libraries() -> bool:
    """Whether this package was built with ``RBM_BUILD=none``, so that no library is expected."""
    return (LIBRARY_DIR / "build_info.json").exists() and build_info()["build_type"] == "none"


def _path(name: str) -> Path:
    return LIBRARY_DIR / f"librbm_{name}.so"


def _record(name: str, *, loaded: bool, reason: str | None) -> None:
    _status[name] = {"path": str(_path(name)), "loaded": loaded, "reason": reason}


def _load_library(name: str) -> None:
    path = _path(name)
    if not path.exists():
        _record(name, loaded=False, reason=f"{path} is missing")
        return
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        _record(name, loaded=False, reason=f"{path} cannot be loaded ({error})")
    else:
        _record(name, loaded=True, reason=None)

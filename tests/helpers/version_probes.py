"""Probes that ``tests/versions.py`` runs in the Python under test; the first argument names a function of this file.

Each prints one line on standard output. The working folder is the root of a source tree, which is also importable.
"""

import json
import sys
from pathlib import Path


def requirements() -> str:
    """The requirements of the build, the package and its tests, as JSON; runs before anything is installed."""
    try:
        import tomllib
    except ImportError:  # Python 3.10: pip brings its own
        from pip._vendor import tomli as tomllib
    metadata = tomllib.loads(Path("pyproject.toml").read_text())
    extras = metadata["project"]["optional-dependencies"]
    own = metadata["build-system"]["requires"] + metadata["project"]["dependencies"]
    # Without these, tests of files, of the server and of searches would skip, and their lower bounds stay untested.
    return json.dumps(sum((extras[name] for name in ("bench", "files", "serve", "tune", "test")), own))


def versions() -> str:
    """Versions of the most important packages, as JSON."""
    import platform
    from importlib.metadata import version

    import torch

    names = ("torch", "triton", "numpy", "torch-geometric", "setuptools")
    installed = {name: version(name) for name in names}
    return json.dumps({"Python": platform.python_version(), **installed, "CUDA of torch": torch.version.cuda or "none"})


def libraries() -> str:
    """Load both libraries; a missing symbol is an error of the dynamic linker."""
    import torch

    from rbm_kernels import _native

    cuda = _native.LIBRARY_DIR / "librbm_cuda.so"
    if not cuda.exists():
        return "librbm_cpu loaded; librbm_cuda not built: no nvcc"
    if torch.version.cuda is None:
        return "librbm_cpu loaded; librbm_cuda built, not loaded: this torch has no CUDA"
    torch.ops.load_library(cuda)
    return f"librbm_cpu and librbm_cuda loaded, for {_native.build_info()['cuda_architectures']}"


def kernels(architecture: str) -> str:
    """Compile every case for an architecture with the Triton that is installed."""
    from benchmarks.compiled.cases import CASES
    from benchmarks.compiled.static_report import compiled_rows

    rows = [row for _, row in compiled_rows(CASES, int(architecture))]
    return f"{len(rows)} kernels in {len(CASES)} cases, {sum(row.spilled_bytes > 0 for row in rows)} spill"


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(
        {"requirements": requirements, "versions": versions, "libraries": libraries, "kernels": kernels}[name](
            *arguments
        )
    )

"""Builds the package: Python files as setuptools does it, libraries as CMakeLists.txt does it.

``pyproject.toml`` holds everything else. Nothing here decides how the libraries are made; only which Python is asked
for PyTorch, and where they go: into the source tree for an editable installation, into the wheel otherwise.

The environment variable ``RBM_BUILD`` chooses: ``native`` (the default on Linux) compiles them; ``none`` (the default
elsewhere) needs no compiler, no CMake and no PyTorch, and makes a package for any platform whose operators are the
eager references, and Triton's kernels on CUDA.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
# PyTorch is pinned because an isolated build must not fetch the newest and largest; the libraries use its stable ABI
# alone and run with every PyTorch from 2.11 on. CMake is expected on PATH.
NATIVE_REQUIREMENTS = ["torch==2.13.0", "ninja>=1.11.1"]


def is_native() -> bool:
    """Whether libraries are compiled.

    Raises:
        SetupError: ``RBM_BUILD`` is neither of the two words, or asks for a build that only Linux has.
    """
    chosen = os.environ.get("RBM_BUILD") or ("native" if sys.platform == "linux" else "none")
    if chosen not in ("native", "none"):
        raise SetupError(f"RBM_BUILD is {chosen!r}, expected native or none.")
    if chosen == "native" and sys.platform != "linux":
        raise SetupError(
            f"RBM_BUILD=native compiles on Linux alone, and this is {sys.platform}: unset it, or set RBM_BUILD=none."
        )
    return chosen == "native"


class CMakeBuild(build_ext):
    """Configure and build CMakeLists.txt in place of compiling extensions one by one; or build none of it."""

    def run(self) -> None:
        package = ROOT / "rbm_kernels" if self._is_in_place else Path(self.build_lib).resolve() / "rbm_kernels"
        # Version 0.1.0 had this module while it was developed; a build folder may still hold it.
        _remove(package.glob("_build_info*.so"))
        if not is_native():
            self._build_none(package / "lib")
            return
        # ninja, and perhaps cmake, stand beside this Python, whose environment need not be activated.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        cmake = shutil.which("cmake", path=path)
        if cmake is None:
            raise SetupError(
                "building rbm-kernels needs cmake 3.24 or newer on PATH: install it and try again, or set"
                " RBM_BUILD=none for a package without compiled libraries, which is slower on a CPU."
            )
        for arguments in (self._configure_arguments(package), ["--build", self.build_temp]):
            subprocess.run([cmake, *arguments], check=True, env={**os.environ, "PATH": path})

    def _configure_arguments(self, package: Path) -> list[str]:
        return [
            *("-S", str(ROOT), "-B", str(Path(self.build_temp).resolve())),
            *("-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DRBM_OUTPUT_DIR={package}",
        ]

    @staticmethod
    def _build_none(folder: Path) -> None:
        """Write what CMakeLists.txt writes, for a build without libraries; an earlier build's do not stay."""
        _remove(folder.glob("librbm_*.so"))
        folder.mkdir(parents=True, exist_ok=True)
        version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
        absent = ("cxx_compiler", "cxx_flags", "cuda_version", "cuda_architectures", "abi_target", "torch_version")
        told = {"version": version, "build_type": "none", **dict.fromkeys(absent)}
        (folder / "build_info.json").write_text(json.dumps(told, indent=2) + "\n")

    @property
    def _is_in_place(self) -> bool:
        return bool(self.inplace or self.editable_mode)

    def get_output_mapping(self) -> dict[str, str]:
        """No file is copied after the build: CMake writes each one where it belongs."""
        return {}

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "rbm_kernels"
        return [os.fspath(path) for path in package.glob("lib/*")]


class Wheel(bdist_wheel):
    """A wheel for every Python: the libraries call PyTorch, and nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2] if is_native() else "any"


def _remove(paths) -> None:
    for path in list(paths):
        path.unlink()


setup(
    # Named so that setuptools makes a wheel for this platform; CMakeLists.txt knows the sources.
    ext_modules=[Extension("rbm_kernels.lib", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel},
    # Required of an isolated build alone: pip and `python -m build` ask for them before they build.
    setup_requires=NATIVE_REQUIREMENTS if is_native() else [],
)

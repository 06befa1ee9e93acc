"""Builds the package: setuptools handles the Python files, CMakeLists.txt the libraries.

All other settings are in ``pyproject.toml``. This file does not decide how the libraries are built. It only selects the
Python that is asked for PyTorch, and the destination: the source tree for an editable installation, else the wheel.

The environment variable ``RBM_BUILD`` selects the build. ``native`` (the default on Linux) compiles the libraries.
``none`` (the default elsewhere) needs no compiler, CMake or PyTorch. It makes a package for any platform, whose
operators are the eager references, and Triton's kernels on CUDA.
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
# PyTorch is pinned because an isolated build must not download the newest, largest release. The libraries only use its
# stable ABI and run with every PyTorch from 2.11 on. CMake must be on PATH.
NATIVE_REQUIREMENTS = ["torch==2.13.0", "ninja>=1.11.1"]


def is_native() -> bool:
    """Whether libraries are compiled.

    Raises:
        SetupError: ``RBM_BUILD`` is neither of the two words, or requests a build that only works on Linux.
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
    """Configure and build CMakeLists.txt instead of individual extensions, or write a build without libraries."""

    def run(self) -> None:
        package = ROOT / "rbm_kernels" if self._is_in_place else Path(self.build_lib).resolve() / "rbm_kernels"
        # Development versions of 0.1.0 had this module; a build folder may still contain it.
        _remove(package.glob("_build_info*.so"))
        if not is_native():
            self._build_none(package / "lib")
            return
        # ninja, and perhaps cmake, are next to this Python, whose environment need not be activated.
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
        """Write what CMakeLists.txt would write for a build without libraries; remove libraries of an earlier build."""
        _remove(folder.glob("librbm_*.so"))
        folder.mkdir(parents=True, exist_ok=True)
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        version = re.search(r'^version = "(.*)"$', project, re.MULTILINE)[1]
        absent = ("cxx_compiler", "cxx_flags", "cuda_version", "cuda_architectures", "abi_target", "torch_version")
        info = {"version": version, "build_type": "none", **dict.fromkeys(absent)}
        (folder / "build_info.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")

    @property
    def _is_in_place(self) -> bool:
        return bool(self.inplace or self.editable_mode)

    def get_output_mapping(self) -> dict[str, str]:
        """No file is copied after the build: CMake writes each file to its destination."""
        return {}

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "rbm_kernels"
        return [os.fspath(path) for path in package.glob("lib/*")]


class Wheel(bdist_wheel):
    """A wheel for every Python version: the libraries call PyTorch, but not Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2] if is_native() else "any"


def _remove(paths) -> None:
    for path in list(paths):
        path.unlink()


setup(
    # Declared so that setuptools makes a wheel for this platform; CMakeLists.txt lists the sources.
    ext_modules=[Extension("rbm_kernels.lib", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel},
    # Only for isolated builds: pip and `python -m build` ask for these before they build.
    setup_requires=NATIVE_REQUIREMENTS if is_native() else [],
)

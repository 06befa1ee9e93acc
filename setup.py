"""Builds the package: Python files as setuptools does it, binaries as CMakeLists.txt does it.

``pyproject.toml`` holds everything else. Nothing here decides how the binaries are made; only for which Python, and
where they go: into the source tree for an editable installation, into the wheel otherwise.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Configure and build CMakeLists.txt in place of compiling extensions one by one."""

    def run(self) -> None:
        package = ROOT / "rbm_kernels" if self._is_in_place else Path(self.build_lib).resolve() / "rbm_kernels"
        # ninja, and perhaps cmake, stand beside this Python, whose environment need not be activated.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        cmake = shutil.which("cmake", path=path)
        if cmake is None:
            raise SetupError("building rbm-kernels needs cmake 3.24 or newer on PATH: install it and try again.")
        for arguments in (self._configure_arguments(package), ["--build", self.build_temp]):
            subprocess.run([cmake, *arguments], check=True, env={**os.environ, "PATH": path})

    def _configure_arguments(self, package: Path) -> list[str]:
        return [
            *("-S", str(ROOT), "-B", str(Path(self.build_temp).resolve())),
            *("-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DRBM_OUTPUT_DIR={package}",
        ]

    @property
    def _is_in_place(self) -> bool:
        return bool(self.inplace or self.editable_mode)

    def get_output_mapping(self) -> dict[str, str]:
        """No file is copied after the build: CMake writes each one where it belongs."""
        return {}

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "rbm_kernels"
        return [os.fspath(path) for path in package.rglob("*.so")]


setup(
    # Named so that setuptools makes a wheel for this Python and this platform; CMakeLists.txt knows the sources.
    ext_modules=[Extension("rbm_kernels._build_info", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)

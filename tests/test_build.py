"""The build: requirements and metadata of the binaries, and messages of a failing build or a missing library."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from scripts import load_script

import rbm_kernels
from rbm_kernels import _native

pytestmark = pytest.mark.native
ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = sorted(_native.LIBRARY_DIR.glob("librbm_*.so"))

BUILD_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
needs_cmake = pytest.mark.skipif(
    shutil.which("cmake", path=BUILD_PATH) is None
    or shutil.which("ninja", path=BUILD_PATH) is None
    or not (ROOT / "CMakeLists.txt").exists(),
    reason="needs cmake, ninja and the sources",
)
NVCC = shutil.which("nvcc", path=f"{os.environ['PATH']}{os.pathsep}/usr/local/cuda/bin")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")
needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")


def configure(build: Path, *, imports_torch: bool = False, **environment: str) -> subprocess.CompletedProcess:
    """Configure CMakeLists.txt like a user, in seconds and without compiling anything.

    CMake asks Python for the location of PyTorch. Importing PyTorch takes longer than everything else, so unless
    ``imports_torch`` is set, a module that only knows the location replaces it.
    """
    if not imports_torch:
        stand_in = build / "stand_in" / "torch.py"
        stand_in.parent.mkdir(parents=True)
        stand_in.write_text(f"__file__, __version__ = {torch.__file__!r}, {str(torch.__version__)!r}\n")
        environment["PYTHONPATH"] = str(stand_in.parent)
    return subprocess.run(
        ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"],
        env={**os.environ, "PATH": BUILD_PATH, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@needs_nm
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_stable_abi_only(library):
    """One undefined C++ symbol of PyTorch would tie the library to one version of it."""
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", "--demangle", library], capture_output=True, text=True, check=True
    ).stdout
    symbols = [line.split(maxsplit=1)[1] for line in listing.splitlines()]
    assert any(name.startswith(("aoti_torch_", "torch_")) for name in symbols), "expected calls into the stable ABI"
    assert [name for name in symbols if re.search(r"\b(at|c10|torch|caffe2)::", name)] == []


@needs_nm
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_exports_nothing_of_its_own(library):
    """Operators are found through PyTorch's registry; an exported symbol could clash with one of another library."""
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", "--demangle", library], capture_output=True, text=True, check=True
    ).stdout
    assert "rbm::" not in listing


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_no_path_of_the_building_machine(library):
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("needs readelf (binutils)")
    dynamic = subprocess.run([readelf, "-d", library], capture_output=True, text=True, check=True).stdout
    assert "RUNPATH" not in dynamic
    assert "RPATH" not in dynamic
    assert "libtorch.so" in dynamic, "librbm_cuda finds the CUDA functions through libtorch.so"


def test_build_info():
    info = _native.build_info()
    assert set(info) == {
        *("version", "build_type", "cxx_compiler", "cxx_flags"),
        *("cuda_version", "cuda_architectures", "abi_target", "torch_version"),
    }
    assert info["version"] == rbm_kernels.__version__
    assert info["abi_target"] == "2.11"
    assert re.match(r"\w+ \d+\.", info["cxx_compiler"])
    assert "-std=c++20" in info["cxx_flags"]
    assert "-march=native" not in info["cxx_flags"], "a wheel must run on any processor of its architecture"
    if info["cuda_version"]:
        *machine_code, ptx = info["cuda_architectures"].split()
        assert all(re.fullmatch(r"sm_\d+", name) for name in machine_code)
        assert ptx == machine_code[-1].replace("sm", "compute"), "newer GPUs compile the PTX of the newest"


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the sources")
def test_one_version():
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert version == rbm_kernels.__version__ == _native.build_info()["version"]


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the sources")
def test_setup_changes_no_flag(monkeypatch, tmp_path):
    """The shell and pip build the same binaries: setup.py may only choose the Python and the output folder."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    from setuptools import Distribution

    command = load_script("setup.py").CMakeBuild(Distribution())
    command.build_temp = str(tmp_path)
    arguments = command._configure_arguments(ROOT / "rbm_kernels")
    definitions = {argument.split("=")[0] for argument in arguments if argument.startswith("-D")}
    assert definitions == {"-DPython_EXECUTABLE", "-DRBM_OUTPUT_DIR"}
    assert arguments[arguments.index("-G") + 1] == "Ninja"


@needs_cmake
def test_asking_for_cuda_without_nvcc_fails_with_one_sentence(tmp_path):
    result = configure(tmp_path, RBM_BUILD_CUDA="1", CUDACXX=str(tmp_path / "no-nvcc"))
    assert result.returncode != 0
    message = " ".join(result.stderr.split())
    assert (
        "RBM_BUILD_CUDA=1 asks for librbm_cuda, but no working nvcc was found in CUDACXX, CUDA_HOME, PATH or"
        " /usr/local/cuda: install the CUDA toolkit, name its nvcc in CUDACXX, or set RBM_BUILD_CUDA=0." in message
    )


@needs_cmake
def test_an_old_nvcc_is_named(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    result = configure(tmp_path / "build", RBM_BUILD_CUDA="1", CUDACXX=str(nvcc))
    assert result.returncode != 0
    assert "is of CUDA 11.8 and at least 12.8 is needed" in " ".join(result.stderr.split())


@needs_cmake
@pytest.mark.parametrize("choice", ["0", "auto"])
def test_without_nvcc_the_cpu_library_is_still_built(tmp_path, choice):
    result = configure(tmp_path, imports_torch=True, RBM_BUILD_CUDA=choice, CUDACXX=str(tmp_path / "no-nvcc"))
    assert result.returncode == 0, result.stderr
    assert "librbm_cuda is not built" in result.stdout
    targets = (tmp_path / "build.ninja").read_text()
    assert "librbm_cpu.so" in targets
    assert "librbm_cuda.so" not in targets


@needs_cmake
def test_a_misspelt_choice_is_named(tmp_path):
    result = configure(tmp_path, RBM_BUILD_CUDA="yes")
    assert result.returncode != 0
    assert "RBM_BUILD_CUDA is 'yes', expected 0, 1 or auto." in result.stderr


@needs_cmake
@pytest.mark.parametrize(
    "architectures", ["75", "80,90", "90 100", "90;", "sm_90", "native"], ids=lambda value: re.sub(r"\W", "_", value)
)
def test_a_misspelt_architecture_is_named(tmp_path, architectures):
    """With or without nvcc, so that a typo is found before the build reaches a machine with nvcc."""
    result = configure(tmp_path, RBM_CUDA_ARCHITECTURES=architectures, RBM_BUILD_CUDA="0")
    assert result.returncode != 0
    assert (
        f"RBM_CUDA_ARCHITECTURES is '{architectures}', expected numbers from 80 on, separated by semicolons, such as"
        " '90' or '80;90'." in " ".join(result.stderr.split())
    )


@needs_cmake
@needs_nvcc
def test_an_architecture_that_nvcc_does_not_know_is_named(tmp_path):
    result = configure(tmp_path, RBM_CUDA_ARCHITECTURES="90;199")
    assert result.returncode != 0
    message = " ".join(result.stderr.split())
    assert re.search(r"RBM_CUDA_ARCHITECTURES names 199, which \S+nvcc does not know: it knows (\d+ )+\d+\.", message)


@needs_cmake
@needs_nvcc
@pytest.mark.parametrize(
    ("architectures", "built"),
    [
        ("", "sm_80 sm_90 sm_100 sm_120 compute_120"),
        ("90", "sm_90 compute_90"),
        ("100;90;90", "sm_90 sm_100 compute_100"),
    ],
    ids=["all", "one", "two"],
)
def test_architectures(tmp_path, architectures, built):
    """CMake's output, nvcc's arguments and ``rbm info`` agree."""
    result = configure(tmp_path, RBM_CUDA_ARCHITECTURES=architectures)
    assert result.returncode == 0, result.stderr
    assert f"librbm_cuda is built for {built}\n" in result.stdout
    commands = (tmp_path / "compile_commands.json").read_text()
    told = re.findall(r"code=\[(\w+)\]", next(line for line in commands.splitlines() if "generate-code" in line))
    assert sorted(told) == sorted(built.split())
    assert json.loads((tmp_path / "build_info.json").read_text())["cuda_architectures"] == built


@pytest.fixture
def another_library_dir(monkeypatch, tmp_path):
    """Replace ``rbm_kernels/lib`` by an empty folder, and restore the status afterwards."""
    monkeypatch.setattr(_native, "LIBRARY_DIR", tmp_path)
    monkeypatch.setattr(_native, "_status", {})
    return tmp_path


def test_status():
    status = _native.status()
    assert status["cpu"] == {"path": str(_native.LIBRARY_DIR / "librbm_cpu.so"), "loaded": True, "reason": None}
    assert status["cuda"]["loaded"] or status["cuda"]["reason"]


def test_missing_cpu_library(another_library_dir):
    with pytest.raises(ImportError) as error:
        _native.load()
    path = another_library_dir / "librbm_cpu.so"
    assert str(error.value) == (
        f"{path} is missing: rebuild it with `pip install -e .` in a checkout, or reinstall rbm-kernels."
    )


def test_unloadable_cpu_library(another_library_dir):
    (another_library_dir / "librbm_cpu.so").write_text("not a library")
    with pytest.raises(ImportError, match=r"librbm_cpu\.so cannot be loaded \(.*\): rebuild it with `pip install -e"):
        _native.load()


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("content", [None, "not a library"])
def test_cuda_library_only_warns(another_library_dir, monkeypatch, content, has_triton):
    """There is not even a warning if it was not built and Triton replaces it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_native, "_load_library", only_cuda(_native._load_library))
    monkeypatch.setattr(_native, "find_spec", lambda name: object() if has_triton else None)
    if content is not None:
        (another_library_dir / "librbm_cuda.so").write_text(content)
    problem = "is missing" if content is None else "cannot be loaded"
    instead = "Triton serves" if has_triton else "the slower eager references serve"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if content is None and has_triton:
            _native.load()
        else:
            with pytest.warns(RuntimeWarning, match=rf"librbm_cuda\.so {problem}.*: {instead} its operators on CUDA"):
                _native.load()
    assert _native.status()["cuda"]["loaded"] is False
    assert problem in _native.status()["cuda"]["reason"]


def test_without_cuda_the_cuda_library_is_not_touched(another_library_dir, monkeypatch):
    (another_library_dir / "librbm_cuda.so").write_text("not a library")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_native, "_load_library", only_cuda(_native._load_library))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _native.load()
    assert _native.status()["cuda"]["reason"] == "CUDA is not available"


def only_cuda(load_library):
    """Load as usual, but report librbm_cpu, which this process has loaded already, as loaded."""

    def load(name: str) -> None:
        if name == "cpu":
            _native._record("cpu", loaded=True, reason=None)
        else:
            load_library(name)

    return load

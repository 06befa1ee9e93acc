"""The check of other versions of PyTorch and Python: its arguments, and that each of its parts can fail."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import version_probes

from rbm_kernels import _native
from tests import versions

ROOT = Path(__file__).resolve().parent.parent
CPU_LIBRARY = _native.LIBRARY_DIR / "librbm_cpu.so"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2.11"], "TORCH is '2.11', expected a release such as 2.11.0, or newest"),
        (["latest"], "TORCH is 'latest', expected a release such as 2.11.0, or newest"),
        (["2.10.0"], "TORCH is 2.10.0, but the package needs torch 2.11.0 or newer"),
        (
            ["2.11.0", "3.99"],
            "PYTHON '3.99' was not found: expected a version such as 3.12 that is installed, or a path",
        ),
        (["2.11.0", "/no/python"], "PYTHON '/no/python' was not found"),
        (["2.11.0", "--headers", "--lowest"], "--headers installs nothing: --lowest has no meaning with it"),
    ],
    ids=["short", "word", "old", "missing", "path", "both"],
)
def test_bad_arguments_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        versions.parse(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_arguments():
    options = versions.parse(["2.11.0"])
    assert (options.torch, options.python) == ("2.11.0", sys.executable)
    assert (options.headers, options.lowest, options.keep) == (False, False, False)
    assert versions.parse(["newest", sys.executable]).python == sys.executable


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_old_python_is_named(tmp_path):
    old = program(tmp_path / "python", "echo 3 9")
    with pytest.raises(versions.CheckError, match=r"is older than 3\.10, which the package needs"):
        versions.find_python(str(old))


def test_a_shim_that_fails_is_passed_over(tmp_path, monkeypatch):
    program(tmp_path / "bin" / "python3.13", "exit 127")
    theirs = program(tmp_path / "versions" / "3.13.0" / "bin" / "python", "echo 3 13")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert versions.find_python("3.13") == versions.find_python("3.13.0") == str(theirs)
    with pytest.raises(versions.CheckError, match=r"PYTHON '3\.1' was not found"):
        versions.find_python("3.1")  # 3.13 begins with it


def test_what_pip_is_told():
    """The PyTorch under test replaces the required one; torch-geometric is another package."""
    requirements = ["torch==2.13.0", "torch>=2.11", "torch-geometric>=2.6", "numpy>=1.26", "rbm-kernels[bench]"]
    requirements += ["numpy>=1.26", "triton>=3.6; sys_platform == 'linux'"]
    newest = ["torch-geometric>=2.6", "numpy>=1.26", "triton>=3.6; sys_platform == 'linux'"]
    assert versions.choose_versions(requirements, lowest=False) == newest
    lowest = ["torch-geometric==2.6", "numpy==1.26", "triton==3.6; sys_platform == 'linux'"]
    assert versions.choose_versions(requirements, lowest=True) == lowest


def test_every_dependency_has_a_lower_bound():
    """--lowest tests the bounds; a dependency without one would claim support for every version."""
    project = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)[1]
    dependencies = re.findall(r'^ +"(.+)",$', block, re.MULTILINE)
    assert len(dependencies) >= 12
    assert [text for text in dependencies if not re.match(r"[\w-]+>=\d", text)] == []


def test_every_lower_bound_is_installed(monkeypatch):
    """Those of the extras too: without starlette, uvicorn and optuna, tests of the server and of searches skip."""
    monkeypatch.chdir(ROOT)
    told = versions.choose_versions(json.loads(version_probes.requirements()), lowest=True)
    project = (ROOT / "pyproject.toml").read_text()
    bounds = re.findall(r'"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)', project)
    missing = {f"{name}=={bound}" for name, bound in bounds if name != "torch"} - {text.split(";")[0] for text in told}
    assert len(bounds) >= 20
    assert missing == set()


def test_the_oldest_cmake():
    assert re.fullmatch(r"3\.\d+", versions.oldest_cmake())


def needed_functions() -> list[str]:
    return [name for name in versions.dynamic_symbols(CPU_LIBRARY, "--undefined-only") if versions.is_of_torch(name)]


def test_symbols_of_an_older_pytorch():
    """A function that was added after 2.11 would be missing from the symbols of 2.11."""
    needed = needed_functions()
    assert len(needed) > 10
    folder = CPU_LIBRARY.parent
    cuda = versions.dynamic_symbols(folder / "librbm_cuda.so", "--undefined-only") if has_cuda(folder) else []
    offered = {"libtorch_cpu.so": sorted({*needed, *cuda}), "libtorch_cuda.so": []}
    assert f"librbm_cpu needs {len(needed)} functions of PyTorch, all there" in versions.check_symbols(folder, offered)
    offered["libtorch_cpu.so"].remove(needed[0])
    with pytest.raises(versions.CheckError, match=f"needs what this PyTorch does not offer: .*{needed[0]}"):
        versions.check_symbols(folder, offered)


def has_cuda(folder: Path) -> bool:
    return (folder / "librbm_cuda.so").exists()


def test_a_library_that_calls_nothing_is_no_build_of_ours(tmp_path):
    (tmp_path / "librbm_cpu.so").symlink_to(Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so")
    with pytest.raises(versions.CheckError, match=r"librbm_cpu\.so needs no function of PyTorch"):
        versions.check_symbols(tmp_path, {"libtorch_cpu.so": []})


def test_no_library_is_no_pass(tmp_path):
    with pytest.raises(versions.CheckError, match="no library"):
        versions.check_symbols(tmp_path, {"libtorch_cpu.so": []})


def test_a_stage_that_fails_fails_the_check(monkeypatch, capsys):
    """The table names the stage, later stages still run, the exit status is nonzero, and the working folder is gone."""
    folders = []

    def stages(check, options):
        folders.append(check.work)
        with check.stage("first") as say:
            check.run([sys.executable, "-c", "import sys; print('so far'); sys.exit('and no further')"])
        with check.stage("second") as say:
            say(check.run([sys.executable, "-c", "print('went on')"]).strip())

    monkeypatch.setattr(versions, "check_environment", stages)
    assert versions.main(["2.11.0"]) == 1
    said = capsys.readouterr().out
    assert "so far" in said
    assert "and no further" in said
    assert re.search(r"^first +FAILED +\d+ s  .*ended with status 1", said, re.MULTILINE)
    assert re.search(r"^second +passed +\d+ s  went on$", said, re.MULTILINE)
    assert not folders[0].exists()


def test_a_missing_program_is_named(tmp_path):
    with pytest.raises(versions.CheckError, match="no-such-cmake was not found: install it"):
        versions.Check(tmp_path).run(["no-such-cmake", "--version"])


def test_the_copy_is_what_git_tracks(tmp_path):
    versions.copy_tracked_files(tmp_path)
    assert (tmp_path / "csrc" / "register.cpp").read_text() == (ROOT / "csrc" / "register.cpp").read_text()
    assert not (tmp_path / ".git").exists()
    assert not list(tmp_path.rglob("*.so"))


def test_a_wheel_is_unpacked_once(tmp_path, monkeypatch):
    """A wheel that was unpacked before is reused, and nothing is downloaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    unpacked = tmp_path / "rbm-kernels" / "torch-2.11.0" / "torch"
    unpacked.mkdir(parents=True)
    check = versions.Check(tmp_path)
    monkeypatch.setattr(check, "run", lambda *_, **__: pytest.fail("pip was called"))
    assert versions.unpacked_wheel(check, versions.parse(["2.11.0", "--headers"])) == unpacked

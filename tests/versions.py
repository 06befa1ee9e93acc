#!/usr/bin/env python3
"""Check this checkout with one version of PyTorch on one version of Python: ``tests/versions.py TORCH [PYTHON]``.

The whole check makes an environment of its own and downloads what the package needs. Then, without a network and from a
copy of the tracked files without ``.git``, it builds as on a GPU machine, loads both libraries, trains on digits, runs
the tests of the operators and of the layer, rehearses ``benchmarks/gpu.sh``, and compiles every kernel of
``benchmarks.compiled.cases`` with the Triton of that PyTorch. It takes minutes, 7 GB of disk, and up to 3 GB of
downloads. ``--lowest`` installs the lower bounds of ``pyproject.toml`` in place of the newest versions.

``--headers`` compiles ``csrc/`` against the headers of that PyTorch and looks every symbol up in its libraries. It
needs the wheel of PyTorch alone, which it keeps unpacked (0.5 GB) in the user's cache folder.

Only the standard library is used: PYTHON is what is tested, and this program runs with any Python from 3.10 on.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = (2, 11)
OLDEST_PYTHON = (3, 10)
ARCHITECTURES = (80, 90)
# Patterns of files, so that tests that move are still found. Tests that take minutes in Triton's interpreter only run
# with the usual shapes here: CI runs all shapes with one version.
CHOSEN_TESTS = "not slow", "not (kernels.py or passes.py or properties.py or twin_run.py) or usual"
TESTS = ("tests/test_import.py", "tests/test_build.py", "tests/rbm_kernels/test_*.py", "tests/rbm/**/test_*layer*.py")
# Tests that read files, split, encode, train, plot, serve and search, and so use every dependency.
TESTS += tuple(
    f"tests/rbm/**/test_{name}.py"
    for name in (
        *("datasets", "foreign_matrices", "user_graph", "splits", "sparse_rows", "encodings", "statistics", "plots"),
        *("public_files", "run_folder", "server_process", "tune"),
    )
)
QUICK_DISTILLATION = tuple(
    argument
    for setting in ("teacher.max_epochs=5", "mlp.max_epochs=5", "rbm.max_epochs=5", "rbm.pretrain_epochs=1")
    for argument in ("--set", setting)
)

PROBES = "tests/helpers/version_probes.py"


class CheckError(Exception):
    """A stage failed, or an argument is wrong; the message is for the user."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        prog="tests/versions.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("torch", metavar="TORCH", help="such as 2.11.0, or newest")
    parser.add_argument(
        "python", metavar="PYTHON", nargs="?", help="3.12 or a path; by default the Python that runs this"
    )
    parser.add_argument("--headers", action="store_true", help="only compile against the headers of TORCH, and link")
    parser.add_argument("--lowest", action="store_true", help="install the lower bound of every other dependency")
    parser.add_argument("--keep", action="store_true", help="keep the working folder")
    options = parser.parse_args(arguments)
    match = re.fullmatch(r"newest|(\d+)\.(\d+)\.(\d+)", options.torch)
    if match is None:
        parser.error(f"TORCH is {options.torch!r}, expected a release such as 2.11.0, or newest")
    if match[1] and (int(match[1]), int(match[2])) < OLDEST_TORCH:
        parser.error(f"TORCH is {options.torch}, but the package needs torch 2.11.0 or newer")
    if options.headers and options.lowest:
        parser.error("--headers installs nothing: --lowest has no meaning with it")
    try:
        options.python = find_python(options.python)
    except CheckError as error:
        parser.error(str(error))
    return options


def find_python(name: str | None) -> str:
    """The interpreter with this version or path, checked to run and to be new enough.

    Raises:
        CheckError: there is no such interpreter, it does not run, or it is older than 3.10.
    """
    if name is None:
        candidates = [sys.executable]
    elif re.fullmatch(r"3\.\d+(\.\d+)?", name):
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        installed = sorted([*pyenv.glob(f"{name}/bin/python"), *pyenv.glob(f"{name}.*/bin/python")])
        candidates = [shutil.which(f"python{name}"), *map(str, installed)]
    else:
        candidates = [shutil.which(name)]
    program = "import sys; print(*sys.version_info[:2])"
    for candidate in filter(None, candidates):
        # pyenv puts shims on PATH for versions that are not active; these fail.
        done = subprocess.run([candidate, "-c", program], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            if tuple(map(int, done.stdout.split())) < OLDEST_PYTHON:
                raise CheckError(f"PYTHON {name or candidate} is older than 3.10, which the package needs")
            return candidate
    raise CheckError(f"PYTHON {name!r} was not found: expected a version such as 3.12 that is installed, or a path")


@dataclass
class Check:
    """Stages of a check, each with a log; results are kept in order."""

    work: Path
    offline: tuple[str, ...] = ()
    results: list[tuple[str, str, float, str]] = field(default_factory=list)

    def run(self, command: Sequence[str], *, network: bool = False, cwd: Path = ROOT, **environment: str) -> str:
        """Run a command without a network, or with one; return what it wrote to standard output.

        Raises:
            CheckError: the program does not exist or failed; the message contains the last lines of its output.
        """
        if not network:
            command, environment = [*self.offline, *command], {"PIP_NO_INDEX": "1", **environment}
        try:
            done = subprocess.run(
                command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
            )
        except FileNotFoundError as error:
            raise CheckError(f"{command[0]} was not found: install it") from error
        with (self.work / "log.txt").open("a") as log:
            log.write(f"+ {' '.join(command)}\n{done.stdout}{done.stderr}\n")
        if done.returncode != 0:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
            raise CheckError(f"{' '.join(command)[:200]} ended with status {done.returncode}:\n{tail}")
        return done.stdout

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Callable[[str], None]]:
        """Time a stage and keep its result; yields a function that takes one line about it."""
        said, start = [], time.monotonic()
        print(f"-- {name} ...", flush=True)
        try:
            yield said.append
        except CheckError as error:
            print(error, flush=True)
            self._finish(name, "FAILED", start, str(error).splitlines()[0])
        else:
            self._finish(name, "passed", start, "; ".join(said))

    def _finish(self, name: str, result: str, start: float, said: str) -> None:
        self.results.append((name, result, time.monotonic() - start, said))
        print(f"-- {name}: {result}, {time.monotonic() - start:.0f} s, {said}", flush=True)

    @property
    def has_failed(self) -> bool:
        return any(result == "FAILED" for _, result, _, _ in self.results)

    def table(self) -> str:
        """The results, one line per stage."""
        lines = [f"{name:<18} {result:<7} {seconds:>5.0f} s  {said}" for name, result, seconds, said in self.results]
        return "\n".join(lines)


# --- the whole check --------------------------------------------------------------------------------------------------


def check_environment(check: Check, options: argparse.Namespace) -> None:
    """Environment, build, libraries, tests and kernels; a stage that the next ones need ends the check."""
    tree, python = check.work / "tree", check.work / "env" / "bin" / "python"
    with check.stage("download") as say:
        copy_tracked_files(tree)
        check.run([options.python, "-m", "venv", str(check.work / "env")])
        requirements = json.loads(check.run([str(python), PROBES, "requirements"], cwd=tree))
        wanted = "torch" if options.torch == "newest" else f"torch=={options.torch}"
        requirements = [wanted, *choose_versions(requirements, lowest=options.lowest)]
        if options.lowest:
            requirements.append(f"cmake=={oldest_cmake()}.*")
        check.run([str(python), "-m", "pip", "install", "--no-compile", *requirements], network=True)
        versions = json.loads(check.run([str(python), PROBES, "versions"], cwd=tree))
        say(", ".join(f"{name} {version}" for name, version in versions.items()))
    if check.has_failed:
        return
    check.offline = without_network()
    # The environment's programs come first, as if it were activated; the user's caches are neither read nor written.
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    place = {"PATH": path, "TRITON_CACHE_DIR": str(check.work / "triton"), "PYTHONPATH": str(tree)}
    data = ROOT.parent / "shared" / "data"
    if data.is_dir():
        place.setdefault("RBM_DATA_ROOT", os.environ.get("RBM_DATA_ROOT", str(data)))

    def run(*command: str, **environment: str) -> str:
        return check.run(command, cwd=tree, **place, **environment)

    with check.stage("build") as say:
        # Two of four architectures: differences between PyTorch versions are the same for all.
        place["RBM_CUDA_ARCHITECTURES"] = ";".join(map(str, ARCHITECTURES))
        run(str(python), "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-e", ".")
        say("no network" if check.offline else "PIP_NO_INDEX, for unshare is not allowed here")
    if check.has_failed:
        return
    with check.stage("pip check") as say:
        say(last_line(run(str(python), "-m", "pip", "check")))
    with check.stage("libraries") as say:
        say(last_line(run(str(python), PROBES, "libraries")))
        say(check_symbols(tree / "rbm_kernels" / "lib", offered_by(environment_libraries(python))))
    with check.stage("rbm distill") as say:
        out = check.work / "run"
        run(str(python), "-m", "rbm", "distill", "--dataset", "digits", "--out", str(out), *QUICK_DISTILLATION)
        summary = json.loads((out / "summary.json").read_text())
        say(f"5 epochs on digits, test accuracy {summary['rbm']['test_accuracy']:.3f}")
    with check.stage("tests") as say:
        found = {pattern: sorted(tree.glob(pattern)) for pattern in TESTS}
        if not all(found.values()):
            raise CheckError(f"no file of tests matches {' or '.join(key for key in found if not found[key])}")
        files = dict.fromkeys(str(path.relative_to(tree)) for paths in found.values() for path in paths)
        marks, names = CHOSEN_TESTS
        workers = ("-n", str(os.cpu_count() or 1), "--dist", "loadfile")
        say(last_line(run(str(python), "-m", "pytest", "-q", "-m", marks, "-k", names, *workers, *files)))
    with check.stage("rehearsal") as say:
        out = check.work / "rehearsal"
        run("bash", "benchmarks/gpu.sh", str(out), "--rehearse")
        say("every stage of benchmarks/gpu.sh on CPU tensors")
    for architecture in ARCHITECTURES:
        with check.stage(f"kernels sm_{architecture}") as say:
            say(last_line(run(str(python), PROBES, "kernels", str(architecture))))


def copy_tracked_files(target: Path) -> None:
    """Copy what git tracks, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        raise CheckError(f"{ROOT} is no git checkout: the check copies the files that git tracks")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def choose_versions(requirements: Sequence[str], *, lowest: bool) -> list[str]:
    """The requirements for pip: no torch and none of our own extras; with ``lowest``, exactly the lower bounds."""
    chosen = []
    for requirement in dict.fromkeys(requirements):
        if re.match(r"torch\b(?!-)|rbm-kernels\b", requirement):
            continue
        chosen.append(requirement.replace(">=", "==") if lowest else requirement)
    return chosen


def oldest_cmake() -> str:
    """The version that ``CMakeLists.txt`` requires."""
    return re.search(r"cmake_minimum_required\(VERSION ([\d.]+)\)", (ROOT / "CMakeLists.txt").read_text())[1]


def without_network() -> tuple[str, ...]:
    """A prefix that runs a command with only a loopback network; empty if that is not allowed."""
    prefix = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$@"', "sh")
    if shutil.which("unshare") is None:
        return ()
    return prefix if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0 else ()


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip("= ")


# --- headers and symbols ----------------------------------------------------------------------------------------------


def check_headers(check: Check, options: argparse.Namespace) -> None:
    """Compile and link ``csrc/`` as the build does, but not optimised, with another PyTorch's headers and libraries."""
    with check.stage("wheel") as say:
        torch = unpacked_wheel(check, options)
        say(str(torch))
    if check.has_failed:
        return
    with check.stage("build") as say:
        build, out = check.work / "build", check.work / "rbm_kernels"
        # CMakeLists.txt asks this Python where torch is; it finds the unpacked wheel.
        place = {"PYTHONPATH": str(torch.parent), "RBM_CUDA_ARCHITECTURES": "90", "CMAKE_COLOR_DIAGNOSTICS": "OFF"}
        place["PATH"] = os.pathsep.join([str(Path(options.python).parent), os.environ.get("PATH", os.defpath)])
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", f"-DRBM_OUTPUT_DIR={out}"]
        # The functions called do not depend on optimisation, which takes most of the build time.
        configure += ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0", "-DCMAKE_CUDA_FLAGS=-Xcompiler=-O0"]
        said = check.run([*configure, f"-DPython_EXECUTABLE={shutil.which(options.python)}"], **place)
        check.run(["cmake", "--build", str(build)], **place)
        say(re.search(r"librbm_cuda is .*", said)[0])
    if check.has_failed:
        return
    with check.stage("symbols") as say:
        say(check_symbols(out / "lib", json.loads((torch / "symbols.json").read_text())))


def unpacked_wheel(check: Check, options: argparse.Namespace) -> Path:
    """The folder ``torch`` with the headers, the libraries to link with, and the names that all libraries offer.

    pip downloads the wheel or takes it from its cache; the unpacked files are kept for the next time.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rbm-kernels"
    torch = cache / f"torch-{options.torch}" / "torch"
    if options.torch != "newest" and torch.exists():
        return torch
    wanted = "torch" if options.torch == "newest" else f"torch=={options.torch}"
    # Of this Python's own platform; the tag of its Python does not matter for the headers, and 3.12 is always there.
    command = [options.python, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version=3.12"]
    check.run([*command, "--dest", str(check.work), wanted], network=True)
    (wheel,) = check.work.glob("torch-*.whl")
    torch = cache / f"torch-{wheel.name.split('-')[1]}" / "torch"
    if torch.exists():
        return torch
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as unpacked:
        folder = Path(unpacked) / "torch-version"
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(("torch/include/", "torch/lib/libtorch"))]
            archive.extractall(folder, [*names, "torch/version.py"])
        libraries = sorted((folder / "torch" / "lib").glob("libtorch*.so"))
        (folder / "torch" / "symbols.json").write_text(json.dumps(offered_by(libraries)))
        for library in libraries:
            if library.name not in ("libtorch.so", "libtorch_cpu.so"):
                library.unlink()
        (folder / "torch" / "__init__.py").write_text(
            "from torch.version import __version__  # only headers are here\n"
        )
        folder.rename(torch.parent)
    return torch


def environment_libraries(python: Path) -> list[Path]:
    """The libraries of the PyTorch that is installed in an environment."""
    return sorted(python.parent.parent.glob("lib/python3*/site-packages/torch/lib/libtorch*.so"))


def offered_by(libraries: Sequence[Path]) -> dict[str, list[str]]:
    """The C functions of PyTorch's stable interface that libraries define, by the library's file name."""
    listed = {path.name: dynamic_symbols(path, "--defined-only") for path in libraries}
    return {name: [symbol for symbol in symbols if is_of_torch(symbol)] for name, symbols in listed.items()}


def check_symbols(folder: Path, offered: dict[str, list[str]]) -> str:
    """Compare what our libraries need of PyTorch with what its libraries offer; return a line about it.

    Raises:
        CheckError: a function is missing. Without CUDA in PyTorch, librbm_cuda may lack CUDA functions.
    """
    names = {symbol for symbols in offered.values() for symbol in symbols}
    has_cuda = "libtorch_cuda.so" in offered
    said, libraries = [], sorted(folder.glob("librbm_*.so"))
    if not libraries:
        raise CheckError(f"the build left no library in {folder}")
    for library in libraries:
        needed = [symbol for symbol in dynamic_symbols(library, "--undefined-only") if is_of_torch(symbol)]
        if not needed:
            raise CheckError(f"{library.name} needs no function of PyTorch: it cannot be what the build makes")
        missing = [symbol for symbol in needed if symbol not in names]
        if not has_cuda and library.name == "librbm_cuda.so":
            missing = [symbol for symbol in missing if "cuda" not in symbol]
        if missing:
            raise CheckError(f"{library.name} needs what this PyTorch does not offer: {', '.join(missing)}")
        said.append(f"{library.stem} needs {len(needed)} functions of PyTorch, all there")
    return "; ".join(said)


def dynamic_symbols(library: Path, which: str) -> list[str]:
    if shutil.which("nm") is None:
        raise CheckError("nm was not found: install binutils")
    done = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True)
    return sorted({line.split()[-1] for line in done.stdout.splitlines()})


def is_of_torch(symbol: str) -> bool:
    return symbol.startswith(("aoti_torch_", "torch_"))


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    check = Check(Path(tempfile.mkdtemp(prefix="rbm-versions-")))
    try:
        (check_headers if options.headers else check_environment)(check, options)
    finally:
        print(f"\ntorch {options.torch}, {options.python}\n{check.table()}")
        if options.keep:
            print(f"kept: {check.work}")
        else:
            shutil.rmtree(check.work, ignore_errors=True)
    return int(check.has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The first stage of ``gpu.sh``: build and load the libraries, or continue without them."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

from benchmarks.gpu.plan import ROOT, Step
from benchmarks.gpu.run import TIMED_OUT, Ended, Run
from benchmarks.measure.device import HERE
from benchmarks.measure.harness import Results

LIBRARY = ROOT / "rbm_kernels" / "lib"
# Time on a GPU machine is expensive: without a library, Triton serves every operator there.
BUILD_SECONDS = 240
# Loads in a separate process, because this process must not load a library that it may have to build. Fails unless all
# named libraries are loaded.
_LOAD = """
import sys
import rbm_kernels
from rbm_kernels import _native
loaded = [name for name, found in _native.status().items() if found["loaded"]]
print(", ".join(f"librbm_{name}" for name in loaded) or "no library", "loaded")
sys.exit(not {*sys.argv[1:]} <= {*loaded})
"""


def build(run: Run, step: Step) -> bool:
    """Build for this GPU only, and load the libraries. Returns False if the package cannot be imported.

    A library that cannot be built within :data:`BUILD_SECONDS` only costs its own figures. Without librbm_cuda, Triton
    serves the memory update; without librbm_cpu, eager PyTorch computes the CPU results that tests compare with.
    """
    options, wanted = run.options, ["cpu"] if run.options.rehearse else ["cpu", "cuda"]
    origin = "built elsewhere" if options.prebuilt else "built before" if options.skip_build else ""
    ended = _load(run, wanted) if origin else None
    if ended is None or ended.status:
        if origin:
            run.note(f"libraries: {origin}, but not loaded; they are built here")
        origin = "built here"
        is_built = _build(run)
        ended = _load(run, wanted if is_built else [])
    if ended.status and not options.rehearse:
        run.say(ended.tail())
        _go_on_without()
        run.note("libraries: none; Triton serves the GPU, and eager PyTorch the CPU", failed=True)
        origin, ended = "none", _load(run, [])
    if ended.status:
        run.say(ended.tail())
        run.note(f"libraries: not loaded, {_why(ended)}", failed=True)
        return False
    run.note(f"libraries: {origin}; {ended.tail(1)}")
    Results(run.state.path).add("build", "libraries", origin, "loaded", 1, dtype="", routing="")
    return True


def _load(run: Run, wanted: list[str]) -> Ended:
    return run.call(run.python("-c", _LOAD, *wanted), run.left())


def _build(run: Run) -> bool:
    """Build with CMake like ``setup.py``, but without pip: nothing is installed, and rebuilds are incremental."""
    architecture = str(HERE.architecture())
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    cmake, end = shutil.which("cmake", path=path), time.monotonic() + min(BUILD_SECONDS, run.left())
    if cmake is None:
        run.note("libraries: not built, cmake is missing", failed=True)
        return False
    folder = str(ROOT / "build" / f"gpu-{architecture}")
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=path) else []  # otherwise CMake's default, such as make
    configure = [cmake, "-S", str(ROOT), "-B", folder, *generator, f"-DPython_EXECUTABLE={sys.executable}"]
    # Continue after failures: one library may build even if the other does not.
    compile_ = [cmake, "--build", folder, "--parallel", str(run.jobs), "--", "-k", *(["0"] if generator else [])]
    for cuda in ("auto",) if run.options.rehearse else ("1", "0"):  # without CUDA if it cannot even be configured
        about = {"PATH": path, "RBM_CUDA_ARCHITECTURES": architecture, "RBM_BUILD_CUDA": cuda}
        for command in (configure, compile_):
            ended = run.call(command, max(1.0, end - time.monotonic()), run.environment(**about))
            if ended.status:
                run.say(ended.tail())
                run.note(f"libraries: not built, {_why(ended)}", failed=True)
                break
        if not ended.status or command is compile_:
            return not ended.status and cuda != "0"
        shutil.rmtree(folder, ignore_errors=True)
    return False


def _go_on_without() -> None:
    """Leave the package as with ``RBM_BUILD=none``; move away libraries that cannot be loaded."""
    for library in LIBRARY.glob("*.so"):
        library.rename(library.with_suffix(".unusable"))
    LIBRARY.mkdir(exist_ok=True)
    (LIBRARY / "build_info.json").write_text(json.dumps({"build_type": "none"}), encoding="utf-8")


def _why(ended: Ended) -> str:
    return "out of time" if ended.status == TIMED_OUT else "see log.txt"

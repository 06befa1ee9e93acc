"""Compile what a launch function would launch, for a GPU that need not be present, and read the machine code.

Tests, the static report and the tuner use it. Launch functions run unchanged, on meta tensors. Triton is told that the
GPU has the given architecture, and that it should compile without launching. This patches Triton's driver permanently,
so it happens in a separate process (``python -m rbm_kernels._ahead_of_time``, which reads programs from standard
input).
"""

import contextlib
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, TextIO


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: its configuration, its resources on a multiprocessor, its instruction counts.

    ``blocks`` are the constants BLOCK_M, BLOCK_N, ...; ``tensor_columns`` is in columns of Blackwell's tensor memory.
    ``main_loop`` counts the ``instructions`` in the innermost loop that performs the most multiplications on matrix
    units. ``source_hash`` is Triton's own hash of everything that a kernel is compiled from: source, constants, types,
    architecture and Triton itself.
    """

    name: str
    blocks: dict[str, int]
    num_warps: int
    num_stages: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_columns: int
    instructions: dict[str, int]
    main_loop: dict[str, int]
    source_hash: str = ""


@dataclass(frozen=True)
class Known:
    """A kernel that was not compiled, because the caller already knows the result."""

    source_hash: str


def compile_launches(
    programs: Sequence[str], architecture: int, *, skip_failures: bool = False, read_together: int = 1
) -> Iterator[tuple[int, Compiled]]:
    """Run programs in a new process; yield the Triton kernels that they would launch, each with its program's index.

    Args:
        programs: Python sources that call launch functions on meta tensors. They can import what this process can.
        architecture: 80, 90, 100 or 120.
        skip_failures: yield nothing for a program that fails.
        read_together: how many kernels to compile before their machine code is read. Reading one takes as long as
            reading a hundred, half a second.

    Raises:
        RuntimeError: a program failed, and ``skip_failures`` is not set.
    """
    request = {"programs": list(programs), "architectures": [architecture], "together": read_together}
    for _, place, kernel in _answers(request, skip_failures):
        yield place, kernel


def compile_for_all(
    programs: Sequence[str], architectures: Sequence[int], *, before: str = "", known: Collection[str] = ()
) -> dict[int, list[tuple[int, Compiled | Known]]]:
    """Like :func:`compile_launches`, for several architectures, on all cores.

    Imports take longer than compiling many of the kernels, so ``before`` is run once and should do the imports of the
    programs. Kernels whose ``source_hash`` is in ``known`` are not compiled.
    """
    request = {"programs": list(programs), "architectures": list(architectures), "before": before, "known": list(known)}
    found: dict[int, list[tuple[int, Compiled | Known]]] = {architecture: [] for architecture in architectures}
    for architecture, place, kernel in _answers(request, skip_failures=False):
        found[architecture].append((place, kernel))
    return found


def _answers(request: dict[str, Any], skip_failures: bool) -> Iterator[tuple[int, int, Compiled | Known]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    command = [sys.executable, "-W", "ignore", "-m", "rbm_kernels._ahead_of_time"]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as question:
        json.dump(request, question)
        question.seek(0)
        with subprocess.Popen(
            command, env=environment, stdin=question, stdout=subprocess.PIPE, stderr=output, text=True
        ) as process:
            try:
                for line in process.stdout:
                    architecture, place, fields = json.loads(line)
                    if fields is not None:
                        yield architecture, place, (Compiled if "name" in fields else Known)(**fields)
                    elif not skip_failures:
                        break
                else:
                    if process.wait() == 0:
                        return
                    architecture = " or ".join(f"{number}" for number in request["architectures"])
            finally:
                process.kill()
        output.seek(0)
        raise RuntimeError(f"a program did not compile for sm_{architecture}:\n{output.read()}")


class AbsentGpu:
    """A GPU that is not present: the part of a Triton driver that compilation needs."""

    def __init__(self, architecture: int):
        self._architecture = architecture

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)


class _Reader:
    """Writes results in the order of the launches; reads machine code for many kernels at a time."""

    def __init__(self, architecture: int, together: int, answers: TextIO) -> None:
        self._architecture, self._together, self._answers = architecture, together, answers
        self._launches: list[tuple[int, Any]] = []  # not reported yet; None for a program that failed
        self._unread: dict[int, tuple[Any, dict[str, int]]] = {}
        self._read: dict[int, Compiled | Known] = {}

    def add(self, place: int, kernel: Any, constants: dict[str, Any]) -> None:
        """Add a launch of a program. Launches whose shapes need no different compilation share a kernel."""
        self._launches.append((place, kernel))
        if isinstance(kernel, Known):
            self._read[id(kernel)] = kernel
        elif id(kernel) not in self._read:
            blocks = {name: size for name, size in constants.items() if name.startswith("BLOCK")}
            self._unread.setdefault(id(kernel), (kernel, blocks))
        if not self._unread or len(self._unread) >= self._together:
            self.answer()

    def add_failure(self, place: int) -> None:
        """Add a program that failed. Report at once: the caller may be waiting for it."""
        self._launches.append((place, None))
        self.answer()

    def answer(self) -> None:
        """Read the machine code of unread kernels, and print a line per launch."""
        from rbm_kernels import _machine_code

        kernels, blocks = zip(*self._unread.values(), strict=True) if self._unread else ((), ())
        codes = _machine_code.read_together([kernel.asm["cubin"] for kernel in kernels], self._architecture)
        for kernel, sizes, code in zip(kernels, blocks, codes, strict=True):
            self._read[id(kernel)] = Compiled(
                name=kernel.metadata.name,
                blocks=sizes,
                num_warps=kernel.metadata.num_warps,
                num_stages=kernel.metadata.num_stages,
                registers=code.registers,
                spilled_bytes=code.spilled_bytes,
                shared_bytes=kernel.metadata.shared,
                tensor_columns=getattr(kernel.metadata, "tmem_size", None) or 0,
                instructions=code.instructions,
                main_loop=code.main_loop,
                source_hash=kernel.hash,
            )
        for place, kernel in self._launches:
            fields = None if kernel is None else asdict(self._read[id(kernel)])
            print(json.dumps([self._architecture, place, fields]), file=self._answers, flush=True)
        self._launches.clear()
        self._unread.clear()


def _main(
    programs: list[str],
    architectures: list[int],
    together: int | None = None,
    before: str = "",
    known: Collection[str] = (),
) -> None:
    together, known = together or len(programs), frozenset(known)
    if len(architectures) == 1:
        _compile(programs, architectures[0], together, sys.stdout, known)
        return
    from triton.runtime import cache

    with contextlib.redirect_stdout(sys.stderr):
        exec(before, {})
    if hasattr(cache, "triton_key"):
        cache.triton_key()  # hashes Triton's own files, hundreds of megabytes; cached for the whole process
    gc.freeze()
    # The driver is patched in a forked process per architecture, which has everything imported already.
    waiting, running = list(architectures), {}
    with contextlib.ExitStack() as files:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                answers = files.enter_context(tempfile.TemporaryFile("w+"))
                architecture = waiting.pop(0)
                child = os.fork()
                if child == 0:
                    _compile_and_end(programs, architecture, together, answers, known)
                running[child] = answers
            child, status = os.wait()
            if status:
                sys.exit(1)
            answers = running.pop(child)
            answers.seek(0)
            shutil.copyfileobj(answers, sys.stdout)
            sys.stdout.flush()


def _compile_and_end(
    programs: list[str], architecture: int, together: int, answers: TextIO, known: frozenset[str]
) -> NoReturn:
    status = 1
    try:
        _compile(programs, architecture, together, answers, known)
        answers.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _compile(programs: list[str], architecture: int, together: int, answers: TextIO, known: frozenset[str]) -> None:
    import torch
    import triton

    place, reader = 0, _Reader(architecture, together, answers)
    run = triton.runtime.JITFunction.run

    def compile_only(self, *args, **kwargs):
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        reader.add(place, kernel, kwargs)
        return kernel

    triton.runtime.driver.set_active(AbsentGpu(architecture))
    triton.runtime.JITFunction.run = compile_only
    if known:
        _compile_what_is_not(known)
    torch.cuda.get_device_capability = lambda device=None: divmod(architecture, 10)
    with contextlib.redirect_stdout(sys.stderr):
        for place, program in enumerate(programs):
            if not _succeeds(program):
                reader.add_failure(place)
        reader.answer()


def _compile_what_is_not(known: frozenset[str]) -> None:
    """Make Triton's compiler return a :class:`Known` for a kernel whose Triton hash is in ``known``."""
    import triton
    from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, make_backend

    compile_kernel = triton.compiler.compile

    def compile_or_know(src, target=None, options=None, **further):
        backend = make_backend(target)
        parsed = backend.parse_options({**(options or {}), **src.parse_options()})
        key = get_cache_key(src, backend, parsed, env_vars=get_cache_invalidating_env_vars())
        source_hash = hashlib.sha256(key.encode()).hexdigest()
        if source_hash in known:
            return Known(source_hash)
        return compile_kernel(src, target=target, options=options, **further)

    triton.compiler.compile = compile_or_know


def _succeeds(program: str) -> bool:
    try:
        exec(program, {})
    except Exception:
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    _main(**json.load(sys.stdin))

"""Compile what a launch function would launch, for a GPU that need not be there, and read the machine code.

Tests, the static report and the tuner use it. Launch functions run as they are, on meta tensors; Triton is told that
the GPU is of the wanted architecture, and that it should compile and not launch. That bends Triton's driver for good,
so it happens in a process of its own (``python -m rbm_kernels._ahead_of_time <architecture>``, programs on standard
input).
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: how it was cut, what a multiprocessor must hold of it, how often each instruction stands.

    ``blocks`` are its constants BLOCK_M, BLOCK_N, ...; ``tensor_columns`` of Blackwell's tensor memory.
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


def compile_launches(
    programs: Sequence[str], architecture: int, *, skip_failures: bool = False
) -> Iterator[tuple[int, Compiled]]:
    """Run programs in a new process; yield, as they come, the place of each and every Triton kernel it would launch.

    Args:
        programs: Python sources that call launch functions on meta tensors. They import what this process can import.
        architecture: 80, 90, 100 or 120.
        skip_failures: yield nothing for a program that fails.

    Raises:
        RuntimeError: a program failed, and ``skip_failures`` is not set.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    command = [sys.executable, "-W", "ignore", "-m", "rbm_kernels._ahead_of_time", str(architecture)]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as asked:
        json.dump(list(programs), asked)
        asked.seek(0)
        with subprocess.Popen(
            command, env=environment, stdin=asked, stdout=subprocess.PIPE, stderr=said, text=True
        ) as process:
            try:
                for line in process.stdout:
                    place, fields = json.loads(line)
                    if fields is not None:
                        yield place, Compiled(**fields)
                    elif not skip_failures:
                        break
                else:
                    if process.wait() == 0:
                        return
            finally:
                process.kill()
        said.seek(0)
        raise RuntimeError(f"a program did not compile for sm_{architecture}:\n{said.read()}")


class AbsentGpu:
    """A GPU of some architecture that is not there: as much of a Triton driver as compiling asks for."""

    def __init__(self, architecture: int):
        self._architecture = architecture

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)


def _read(kernel, blocks: dict[str, int]) -> Compiled:
    from rbm_kernels import _machine_code

    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        (code,) = _machine_code.read(Path(cubin.name)).values()
    return Compiled(
        name=kernel.metadata.name,
        blocks=blocks,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        registers=code.registers,
        spilled_bytes=code.spilled_bytes,
        shared_bytes=kernel.metadata.shared,
        tensor_columns=getattr(kernel.metadata, "tmem_size", None) or 0,
        instructions=code.instructions,
    )


def _main(architecture: int) -> None:
    import torch
    import triton

    place, answers, read = 0, sys.stdout, {}
    run = triton.runtime.JITFunction.run

    def compile_only(self, *args, **kwargs):
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        # Shapes that differ in nothing that a kernel is compiled for share one.
        if id(kernel) not in read:
            read[id(kernel)] = _read(kernel, {name: kwargs[name] for name in kwargs if name.startswith("BLOCK")})
        print(json.dumps([place, asdict(read[id(kernel)])]), file=answers, flush=True)
        return kernel

    triton.runtime.driver.set_active(AbsentGpu(architecture))
    triton.runtime.JITFunction.run = compile_only
    torch.cuda.get_device_capability = lambda device=None: divmod(architecture, 10)
    with contextlib.redirect_stdout(sys.stderr):
        for place, program in enumerate(json.load(sys.stdin)):
            if not _succeeds(program):
                print(json.dumps([place, None]), file=answers, flush=True)


def _succeeds(program: str) -> bool:
    try:
        exec(program, {})
    except Exception:
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    _main(int(sys.argv[1]))

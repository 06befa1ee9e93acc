"""Compile what a launch function would launch, for a GPU that need not be there, and read the machine code.

Tests and the static report use it. Launch functions run as they are, on meta tensors; Triton is told that the GPU is of
the wanted architecture, and that it should compile and not launch. Run it in a process of its own
(``python -m rbm_kernels._ahead_of_time <architecture> <program>``): it bends Triton's driver for good.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class Compiled:
    """One compiled kernel: what a multiprocessor must hold of it, and how often each instruction stands in it."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int
    instructions: dict[str, int]


def compile_launches(program: str, architecture: int) -> list[Compiled]:
    """Run ``program`` in a new process and return every Triton kernel that it would have launched.

    Args:
        program: Python source that calls launch functions on meta tensors; ``torch`` is imported already.
        architecture: 80, 90, 100 or 120.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "rbm_kernels._ahead_of_time", str(architecture), program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the program did not compile for sm_{architecture}:\n{done.stderr}")
    return [Compiled(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]


def _read(kernel) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = _disassemble("--dump-resource-usage", cubin.name)
        code = _disassemble("-sass", cubin.name)
    use = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    words = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", code)
    return Compiled(
        name=kernel.metadata.name,
        registers=use["REG"],
        spilled_bytes=use["STACK"] + use["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        instructions=dict(Counter(words)),
    )


def _disassemble(*arguments: str) -> str:
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    # cuobjdump runs nvdisasm, which stands beside it.
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = [str(folder / "cuobjdump"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def _main(architecture: int, program: str) -> None:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class AbsentGpu:
        """As much of a driver as compiling asks for."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", architecture, 32)

    compiled = []
    run = triton.runtime.JITFunction.run

    def compile_only(self, *args, **kwargs):
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        compiled.append(kernel)
        return kernel

    driver.set_active(AbsentGpu())
    triton.runtime.JITFunction.run = compile_only
    with contextlib.redirect_stdout(sys.stderr):
        exec(program, {"torch": torch})
    print(json.dumps([asdict(_read(kernel)) for kernel in compiled]))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])

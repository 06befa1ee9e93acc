"""What compilers made of a kernel, read from the machine code with cuobjdump: no GPU is needed."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass
class MachineCode:
    """Registers of a thread, bytes of stack that it spills to, static shared memory, and how often each instruction."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: dict[str, int]


def find_cuobjdump() -> str | None:
    """Triton's, which is as new as the code it makes, else CUDA's own; None where there is neither."""
    triton = importlib.util.find_spec("triton")
    folders = [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    if triton is not None and triton.origin is not None:
        folders.insert(0, str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


def cuobjdump(*arguments: str) -> str:
    """What cuobjdump prints."""
    tool = find_cuobjdump()
    if tool is None:
        raise FileNotFoundError("cuobjdump was not found: install triton or the CUDA toolkit")
    # It runs nvdisasm, which stands beside it.
    environment = {**os.environ, "PATH": f"{Path(tool).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    return subprocess.run([tool, *arguments], env=environment, capture_output=True, text=True, check=True).stdout


def read(file: Path) -> dict[tuple[int, str], MachineCode]:
    """Every kernel in a cubin or a library, by architecture (80, 90, ...) and mangled name."""
    usage: dict[str, list[dict[str, int]]] = defaultdict(list)
    instructions: dict[tuple[int, str], dict[str, int]] = {}
    architecture, kernel = 0, ""
    for line in cuobjdump("--dump-resource-usage", "--dump-sass", str(file)).splitlines():
        if match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", line):
            counts = instructions[architecture, kernel]
            counts[match[1]] = counts.get(match[1], 0) + 1
        elif match := re.match(r"\s*code for sm_(\d+)", line):
            architecture = int(match[1])
        elif match := re.match(r"\s*Function : (\S+)", line):
            kernel = match[1]
            instructions[architecture, kernel] = {}
        elif match := re.match(r"\s*Function (\S+):$", line):
            kernel = match[1]
        elif "REG:" in line:
            usage[kernel].append({name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", line)})
    # For each architecture the usage of its kernels comes before their code: both keep to one order of architectures.
    return {
        key: MachineCode(use["REG"], use["STACK"] + use["LOCAL"], use["SHARED"], counts)
        for key, counts in instructions.items()
        for use in [usage[key[1]].pop(0)]
    }

"""What compilers made of a kernel, read from the machine code with cuobjdump: no GPU is needed."""

import bisect
import importlib.util
import itertools
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class MachineCode:
    """Registers of a thread, bytes of stack that it spills to, static shared memory, and how often each instruction."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: dict[str, int]


# Address, and name with modifiers; a predicate may stand before the name.
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)")


def find_cuobjdump() -> str | None:
    """Triton's, which is as new as the code it makes, else CUDA's own; None where there is neither."""
    triton = importlib.util.find_spec("triton")
    folders = [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    if triton is not None and triton.origin is not None:
        folders.insert(0, str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


def cuobjdump(*arguments: str) -> str:
    """What cuobjdump prints."""
    return _printed("cuobjdump", *arguments)


def _printed(name: str, *arguments: str) -> str:
    tool = find_cuobjdump()
    if tool is None:
        raise FileNotFoundError("cuobjdump was not found: install triton or the CUDA toolkit")
    # It runs nvdisasm, which stands beside it.
    folder = Path(tool).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    command = [str(folder / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def read(file: Path) -> dict[tuple[int, str], MachineCode]:
    """Every kernel in a cubin or a library, by architecture (80, 90, ...) and mangled name."""
    usage: dict[str, list[dict[str, int]]] = defaultdict(list)
    instructions: dict[tuple[int, str], dict[str, int]] = {}
    architecture, kernel = 0, ""
    for line in cuobjdump("--dump-resource-usage", "--dump-sass", str(file)).splitlines():
        if match := _INSTRUCTION.match(line):
            counts = instructions[architecture, kernel]
            counts[match[2]] = counts.get(match[2], 0) + 1
        elif match := re.match(r"\s*code for sm_(\d+)", line):
            architecture = int(match[1])
        elif match := re.match(r"\s*Function : (\S+)", line):
            kernel = match[1]
            instructions[architecture, kernel] = {}
        elif match := re.match(r"\s*Function (\S+):$", line):
            kernel = match[1]
        elif "REG:" in line:
            usage[kernel].append(_usage(line))
    # For each architecture the usage of its kernels comes before their code: both keep to one order of architectures.
    return {key: _machine_code(use, counts) for key, counts in instructions.items() for use in [usage[key[1]].pop(0)]}


def read_together(cubins: Sequence[bytes], architecture: int) -> list[MachineCode]:
    """What :func:`read` finds in cubins of one kernel each, for one architecture, in a fraction of the time.

    nvdisasm takes half a second to begin, for each cubin. It also takes instructions without a file around them, so
    those of all kernels go to it in one piece, and addresses tell what belongs to whom.
    """
    if not cubins:
        return []
    codes = [_instructions(cubin) for cubin in cubins]
    with tempfile.TemporaryDirectory() as folder:
        together = Path(folder) / "together"
        together.write_bytes(b"".join(codes))
        suffix = "a" if architecture >= 90 else ""  # instructions that this architecture alone has
        listing = _printed("nvdisasm", "--binary", f"SM{architecture}{suffix}", str(together))
        usages = []
        for place, cubin in enumerate(cubins):
            file = Path(folder) / f"{place}.cubin"
            file.write_bytes(cubin)
            usages.append(_usage(cuobjdump("--dump-resource-usage", str(file))))
    found: list[dict[str, int]] = [{} for _ in cubins]
    ends = list(itertools.accumulate(map(len, codes)))
    for line in listing.splitlines():
        if match := _INSTRUCTION.match(line):
            counts = found[bisect.bisect_right(ends, int(match[1], 16))]
            counts[match[2]] = counts.get(match[2], 0) + 1
    return [_machine_code(usage, counts) for usage, counts in zip(usages, found, strict=True)]


def _usage(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}


def _machine_code(usage: dict[str, int], instructions: dict[str, int]) -> MachineCode:
    return MachineCode(usage["REG"], usage["STACK"] + usage["LOCAL"], usage["SHARED"], instructions)


def _instructions(cubin: bytes) -> bytes:
    """The one section of an ELF file whose name begins with ``.text.``."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<HHH", cubin, 0x3A)
    # Of each section: where its name, its content and its content's size stand.
    sections = [struct.unpack_from("<I20xQQ", cubin, table + size * place) for place in range(number)]
    (found,) = (
        cubin[offset : offset + length]
        for name, offset, length in sections
        if cubin.startswith(b".text.", sections[names][1] + name)
    )
    return found

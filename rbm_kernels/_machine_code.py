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
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class MachineCode:
    """What a kernel takes of a multiprocessor, and what stands in it.

    Attributes:
        registers: of a thread.
        spilled_bytes: of stack, for each thread.
        shared_bytes: static ones.
        instructions: how often each stands in the code.
        main_loop: the same of the innermost loop that multiplies most; empty where none has a matrix instruction.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: dict[str, int]
    main_loop: dict[str, int]


# Address, and name with modifiers; a predicate may stand before the name. A branch says where it goes.
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)")
_TARGET = re.compile(r"\bBRA\S* (?:!?U?P\w+, )?0x([0-9a-f]+)")
# Matrix instructions of all architectures: HMMA, HGMMA, UTCHMMA, ...
MATRIX_INSTRUCTION = re.compile(r"[A-Z]*MMA\b")


class _Listing:
    """The instructions of one kernel, line by line."""

    def __init__(self) -> None:
        self._code: list[tuple[int, str]] = []
        self._backward: list[tuple[int, int]] = []  # from where to where

    def add(self, line: str, match: re.Match[str]) -> None:
        address, name = int(match[1], 16), match[2]
        self._code.append((address, name))
        if (target := _TARGET.search(line)) and int(target[1], 16) <= address:
            self._backward.append((int(target[1], 16), address))

    def counts(self) -> dict[str, int]:
        return dict(Counter(name for _, name in self._code))

    def main_loop(self) -> dict[str, int]:
        loops = []
        for first, last in self._backward:
            names = Counter(name for address, name in self._code if first <= address <= last)
            if any(MATRIX_INSTRUCTION.match(name) for name in names):
                loops.append((first, last, names))
        innermost = [
            names
            for first, last, names in loops
            if not any((first, last) != other[:2] and first <= other[0] and other[1] <= last for other in loops)
        ]
        return dict(
            max(innermost, key=lambda names: sum(n * multiply_adds(name) for name, n in names.items()), default={})
        )


def multiply_adds(name: str) -> int:
    """Multiply-adds of one matrix instruction, by a warp or, of Hopper's, four; 1 where its name does not tell them."""
    if match := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):
        return int(match[1]) * int(match[2]) * int(match[3])
    if match := re.match(r"HMMA\.168(16|8|4)\b", name):
        return 16 * 8 * int(match[1])
    return int(bool(MATRIX_INSTRUCTION.match(name)))


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
    listings: dict[tuple[int, str], _Listing] = {}
    architecture, kernel = 0, ""
    for line in cuobjdump("--dump-resource-usage", "--dump-sass", str(file)).splitlines():
        if match := _INSTRUCTION.match(line):
            listings[architecture, kernel].add(line, match)
        elif match := re.match(r"\s*code for sm_(\d+)", line):
            architecture = int(match[1])
        elif match := re.match(r"\s*Function : (\S+)", line):
            kernel = match[1]
            listings[architecture, kernel] = _Listing()
        elif match := re.match(r"\s*Function (\S+):$", line):
            kernel = match[1]
        elif "REG:" in line:
            usage[kernel].append(_usage(line))
    # For each architecture the usage of its kernels comes before their code: both keep to one order of architectures.
    return {key: _machine_code(usage[key[1]].pop(0), listing) for key, listing in listings.items()}


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
    found = [_Listing() for _ in cubins]
    ends = list(itertools.accumulate(map(len, codes)))
    for line in listing.splitlines():
        if match := _INSTRUCTION.match(line):
            found[bisect.bisect_right(ends, int(match[1], 16))].add(line, match)
    return [_machine_code(usage, listing) for usage, listing in zip(usages, found, strict=True)]


def _usage(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}


def _machine_code(usage: dict[str, int], listing: _Listing) -> MachineCode:
    spilled = usage["STACK"] + usage["LOCAL"]
    return MachineCode(usage["REG"], spilled, usage["SHARED"], listing.counts(), listing.main_loop())


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

"""One table of the kernels' compiled code: registers, spills, shared memory, instructions. No GPU is needed.

``python -m benchmarks.compiled.static_report`` compiles every Triton kernel at the shapes of
:mod:`benchmarks.compiled.cases` for every architecture, reads the machine code, adds the CUDA kernels from
``librbm_cuda`` if that was built, and writes ``benchmarks/results/static_report.csv`` and ``.md``. Tests check the
limits.
"""

import ast
import csv
import datetime
import inspect
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.compiled import cases, occupancy
from benchmarks.compiled.cases import ARCHITECTURES, CASES, Case
from rbm_kernels import _machine_code, _native
from rbm_kernels._ahead_of_time import Compiled, compile_launches

ROOT = Path(__file__).resolve().parents[2]
COUNTED = ROOT / "benchmarks" / "results" / "counted.csv"
CUDA_LIBRARY = _native.LIBRARY_DIR / "librbm_cuda.so"
# Warps per block of csrc/cuda/memory_update.cu, and blocks per multiprocessor requested by its launch bounds.
CUDA_WARPS, CUDA_PROGRAMS = 8, 2
# Multiply-adds per cycle of a multiprocessor's tensor cores, 16-bit operands and float32 sums; half of it for TF32.
# From the rates in NVIDIA's whitepapers of A100, H100, B200 and RTX PRO 6000, divided by clock and multiprocessors.
TENSOR_CORES = {80: 1024, 90: 2048, 100: 4096, 120: 512}
_CUDA_DTYPES = {"d": "float64", "f": "float32", "13__nv_bfloat16": "bfloat16", "6__half": "float16"}


@dataclass(frozen=True)
class Row:
    """One kernel as compiled for one case and architecture; the fields are the columns of the table."""

    operator: str
    kernel: str
    computes: str
    shape: str
    precision: str
    architecture: int
    tile: str
    warps: int
    stages: int | None
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_columns: int
    matrix_instructions: str
    matrix_waits: int
    loop_instructions: int
    loop_issue_share: float | None
    loop_shared_accesses: str
    loop_barriers: int
    wide_loads: int
    loads: int
    atomics: int
    programs_by_registers: int
    programs_by_shared: int
    programs: int
    programs_claimed: int | None
    source_hash: str = ""
    model_bound: str = ""
    model_cycles: int | None = None


def compiled_rows(chosen: Sequence[Case], architecture: int) -> Iterator[tuple[Case, Row]]:
    """Compile every launch of the cases; yield the kernels as they arrive, several at a time."""
    launches, programs = programs_of(chosen)
    for place, compiled in compile_launches(programs, architecture, read_together=16):
        case, label = launches[place]
        yield case, row(case, label, architecture, compiled)


def programs_of(chosen: Sequence[Case]) -> tuple[list[tuple[Case, str]], list[str]]:
    """Each launch of the cases, and the program that launches it, for :mod:`rbm_kernels._ahead_of_time`."""
    launches = [(case, label) for case in chosen for label in cases.labels(case)]
    programs = [
        f"from benchmarks.compiled import cases; cases.launch_meta(cases.{case!r}, {label!r})"
        for case, label in launches
    ]
    return launches, programs


def row(case: Case, label: str, architecture: int, compiled: Compiled) -> Row:
    """Put a compiled kernel into the table."""
    held = (compiled.registers, compiled.num_warps, compiled.shared_bytes, compiled.tensor_columns)
    return Row(
        operator=case.operator,
        kernel=compiled.name,
        computes=label,
        shape=str(case),
        precision=case.precision,
        architecture=architecture,
        tile=" ".join(f"{name.removeprefix('BLOCK_')}={size}" for name, size in compiled.blocks.items()),
        warps=compiled.num_warps,
        stages=compiled.num_stages,
        registers=compiled.registers,
        spilled_bytes=compiled.spilled_bytes,
        shared_bytes=compiled.shared_bytes,
        tensor_columns=compiled.tensor_columns,
        **_counted(compiled.instructions),
        **_counted_in_loop(compiled, architecture, case.precision),
        programs_by_registers=occupancy.programs_by_registers(compiled.registers, compiled.num_warps),
        programs_by_shared=occupancy.programs_by_shared(compiled.shared_bytes, architecture),
        programs=occupancy.programs(*held, architecture),
        programs_claimed=cases.claimed_programs(case, compiled.name, architecture),
        source_hash=compiled.source_hash,
    )


def cuda_rows(kernels: dict[tuple[int, str], _machine_code.MachineCode]) -> Iterator[Row]:
    """The kernels of the memory update that work on rows, one for each dtype, aligned to 16 bytes or not."""
    for (architecture, mangled), code in sorted(kernels.items()):
        match = re.search(r"(memory_statistics_kernel|squared_norm_kernel)I(\w+?)Lb([01])E", mangled)
        if match is None:
            continue
        kernel, dtype, aligned = match.groups()
        # From sm_90 on nvcc counts the kilobyte that the system takes of a program.
        shared_bytes = max(0, code.shared_bytes - (1024 if architecture >= 90 else 0))
        yield Row(
            operator="memory_update",
            kernel=kernel,
            computes="weighted_sum, total" if kernel == "memory_statistics_kernel" else "squared norms",
            shape="16-byte rows" if aligned == "1" else "any rows",
            precision=_CUDA_DTYPES[dtype],
            architecture=architecture,
            tile="",
            warps=CUDA_WARPS,
            stages=None,
            registers=code.registers,
            spilled_bytes=code.spilled_bytes,
            shared_bytes=shared_bytes,
            tensor_columns=0,
            **_counted(code.instructions),
            loop_instructions=0,
            loop_issue_share=None,
            loop_shared_accesses="",
            loop_barriers=0,
            programs_by_registers=occupancy.programs_by_registers(code.registers, CUDA_WARPS),
            programs_by_shared=occupancy.programs_by_shared(shared_bytes, architecture),
            programs=occupancy.programs(code.registers, CUDA_WARPS, shared_bytes, 0, architecture),
            programs_claimed=CUDA_PROGRAMS if kernel == "memory_statistics_kernel" else None,
        )


def _counted(instructions: dict[str, int]) -> dict[str, str | int]:
    matrix: dict[str, int] = {}
    for name, count in instructions.items():
        if match := _machine_code.MATRIX_INSTRUCTION.match(name):
            matrix[match[0]] = matrix.get(match[0], 0) + count

    def total(pattern: str) -> int:
        return sum(count for name, count in instructions.items() if re.match(pattern, name))

    return {
        "matrix_instructions": " ".join(f"{name} {count}" for name, count in sorted(matrix.items())),
        # Of Hopper: as many as multiplications where ptxas lets each wait for the one before ("serialized", C7515).
        "matrix_waits": total(r"WARPGROUP\.DEPBAR"),
        # Loads from device memory into registers and into shared memory; UTMALDG brings a whole tile.
        "wide_loads": total(r"LDG\.E\.(\w+\.)*128|LDGSTS\.E\.(\w+\.)*128|UTMALDG"),
        "loads": total(r"LDG\b|LDGSTS\b|UTMALDG"),
        # ATOMS, on shared memory, is no matter: Blackwell's tensor memory is allotted with it.
        "atomics": total(r"ATOM\b|ATOMG|RED\b|REDG"),
    }


def _counted_in_loop(compiled: Compiled, architecture: int, precision: str) -> dict[str, str | int | float | None]:
    """What the main loop holds: the innermost one that multiplies most on matrix instructions."""
    loop, total = compiled.main_loop, sum(compiled.main_loop.values())
    shared: dict[str, int] = {}
    for name, count in loop.items():
        if match := re.match(r"(LDS|STS)(?:\.(U8|S8|U16|S16|64|128))?\b", name):
            width = {None: "32", "U8": "8", "S8": "8", "U16": "16", "S16": "16"}.get(match[2], match[2])
            shared[f"{match[1]}.{width}"] = shared.get(f"{match[1]}.{width}", 0) + count
    cycles = _multiplying_cycles(compiled, architecture, precision)
    return {
        "loop_instructions": total,
        # Four schedulers issue one instruction of a warp each in a cycle.
        "loop_issue_share": round(total * compiled.num_warps / 4 / cycles, 2) if cycles else None,
        "loop_shared_accesses": " ".join(f"{name} {count}" for name, count in sorted(shared.items())),
        "loop_barriers": sum(count for name, count in loop.items() if name.startswith("BAR.SYNC")),
    }


def _multiplying_cycles(compiled: Compiled, architecture: int, precision: str) -> float:
    """Cycles for which one turn of the main loop keeps a multiprocessor's tensor cores busy, at their nominal rate."""
    total = 0.0
    for name, count in compiled.main_loop.items():
        if name.startswith("HMMA"):
            total += count * compiled.num_warps * _machine_code.multiply_adds(name)
        elif name.startswith("HGMMA"):  # four warps together
            total += count * compiled.num_warps / 4 * _machine_code.multiply_adds(name)
        elif name.startswith("UTC") and "BLOCK_N" in compiled.blocks:
            # One thread starts it for the block: up to 128 rows, 256 columns and 32 bytes of the inner dimension.
            sides = min(128, compiled.blocks["BLOCK_M"]) * min(256, compiled.blocks["BLOCK_N"])
            total += count * sides * (8 if precision == "tf32" else 16)
    return total / (TENSOR_CORES[architecture] / (2 if precision == "tf32" else 1))


@cache
def reader_hash() -> str:
    """Hash of the code that makes a row from machine code: rows of a report are valid only if it did not change."""
    parts = (_machine_code, occupancy, row, _counted, _counted_in_loop, _multiplying_cycles)
    text = "".join(without_prose(inspect.getsource(part)) for part in parts)
    return sha256(f"{text}{TENSOR_CORES}".encode()).hexdigest()[:16]


def without_prose(source: str) -> str:
    """Source of a module, class or function without its docstrings, comments and empty lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            lines[number - 1] = lines[number - 1][:column]
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def modelled(row: Row, counted: Path = COUNTED) -> Row:
    """The row with the results of the model in ``benchmarks.compiled.counted``, if the kernel was counted."""
    found = _models(counted).get((row.kernel, row.computes, row.shape, row.precision, str(row.architecture)))
    return row if found is None else replace(row, model_bound=found[0], model_cycles=int(found[1]))


@cache
def _models(counted: Path) -> dict[tuple[str, ...], tuple[str, str]]:
    if not counted.exists():
        return {}
    with counted.open(newline="", encoding="utf-8") as file:
        return {
            tuple(line[name] for name in ("kernel", "computes", "shape", "precision", "architecture")): (
                line["model_bound"],
                line["model_cycles"],
            )
            for line in csv.DictReader(file)
        }


def made_by() -> dict[str, str]:
    """What else is needed to reproduce a row of results: versions, commit, date."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "triton": version("triton"),
        "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
    }


def markdown(rows: Sequence[Row], made: dict[str, str]) -> str:
    """One table per operator. Rows that differ only in the architecture are adjacent."""
    lines = [
        "# The kernels as compiled",
        "",
        f"Made by `python -m benchmarks.compiled.static_report` with Triton {made['triton']} at {made['commit']},"
        f" {made['date']}; every column is in [static_report.csv](static_report.csv). Nothing here was timed.",
        "",
        "*Programs*: how many a multiprocessor holds by registers / by shared memory. *Fit, claimed*: how many by all",
        "limits together, warps and tensor memory too, and how many the configuration counts on. *16-byte loads*:",
        "instructions, of all loads from device memory. *Waits*: for Hopper's multiplications; with one for each, no",
        "two overlap. *Loop*: instructions of the innermost loop that multiplies most; the cycles that it takes to",
        "issue them, over those that its products take the tensor cores at their nominal rate (above 1 they wait);",
        "its accesses of shared memory by bits; barriers. *Model*: no measurement; which resource a block would keep",
        "busy longest, and for how many cycles, from [counted.md](counted.md) where that has the kernel.",
    ]
    heads = ("Computes", "Kernel", "Shape", "Precision", "sm", "Tile, warps, stages", "Registers", "Spilled bytes")
    heads += ("Shared KB", "Matrix instructions, waits", "Loop", "16-byte loads", "Programs", "Fit, claimed", "Model")
    for operator in dict.fromkeys(row.operator for row in rows):
        lines += ["", f"## {operator}", "", table_line(heads), table_line(["---"] * len(heads))]
        together: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            if row.operator == operator:
                together.setdefault((row.shape, row.precision, row.computes, row.kernel), []).append(row)
        lines += [table_line(_cells(row)) for group in together.values() for row in group]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> Sequence[str]:
    stages = "" if row.stages is None else f", {row.stages}"
    return (
        row.computes,
        row.kernel.removeprefix(f"{row.operator}_").removesuffix("_kernel"),
        row.shape,
        row.precision,
        str(row.architecture),
        f"{row.tile}{', ' if row.tile else ''}{row.warps}{stages}",
        str(row.registers),
        str(row.spilled_bytes),
        f"{row.shared_bytes / 1024:.0f}",
        f"{row.matrix_instructions}{f', {row.matrix_waits}' if 'HGMMA' in row.matrix_instructions else ''}",
        _loop(row),
        f"{row.wide_loads} of {row.loads}",
        f"{row.programs_by_registers} / {row.programs_by_shared}",
        f"{row.programs}, {'-' if row.programs_claimed is None else row.programs_claimed}",
        "-" if row.model_cycles is None else f"{row.model_bound}, {row.model_cycles:,}",
    )


def _loop(row: Row) -> str:
    if not row.loop_instructions:
        return "-"
    share = None if row.loop_issue_share is None else f"{row.loop_issue_share}"
    barriers = f"{row.loop_barriers} barriers" if row.loop_barriers else None
    return ", ".join(filter(None, (f"{row.loop_instructions}", share, row.loop_shared_accesses, barriers)))


def table_line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def main(
    out: Annotated[Path, typer.Option(help="CSV to write; the table is written next to it as .md.")] = (
        ROOT / "benchmarks" / "results" / "static_report.csv"
    ),
    operator: Annotated[list[str] | None, typer.Option(help="Only this operator; repeatable.")] = None,
    architecture: Annotated[list[int] | None, typer.Option(help="Only 80, 90, 100 or 120; repeatable.")] = None,
) -> None:
    """Compile every kernel for every architecture and write the contents of the machine code."""
    made = {**made_by(), "reader": reader_hash()}
    chosen = [case for case in CASES if not operator or case.operator in operator]
    architectures = architecture or ARCHITECTURES
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as file, Progress(*columns, console=console) as progress:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)] + list(made), lineterminator="\n")
        writer.writeheader()

        def add(row: Row) -> None:
            row = modelled(row)
            rows.append(row)
            writer.writerow({**vars(row), **made})
            file.flush()
            progress.console.print("  ".join(_cells(row)), highlight=False, soft_wrap=True)

        for sm in architectures:
            task = progress.add_task(f"sm_{sm}", total=len(chosen))
            for case, row in compiled_rows(chosen, sm):
                add(row)
                progress.update(task, completed=chosen.index(case))
            progress.update(task, completed=len(chosen))
        if CUDA_LIBRARY.exists() and (not operator or "memory_update" in operator):
            for row in cuda_rows(_machine_code.read(CUDA_LIBRARY)):
                if row.architecture in architectures:
                    add(row)
    out.with_suffix(".md").write_text(markdown(rows, made), encoding="utf-8")
    console.print(f"{len(rows)} rows written to {out} and {out.with_suffix('.md')}", highlight=False)


if __name__ == "__main__":
    typer.run(main)

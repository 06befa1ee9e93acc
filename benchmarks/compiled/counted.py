"""Counts instructions and memory accesses of the kernels' compiled code with ptx_executor, for a few blocks per case.

``python -m benchmarks.compiled.counted`` writes ``benchmarks/results/counted.csv`` and ``.md``. Nothing is timed: the
last columns are a *model* (:mod:`ptx_executor.model`), the cycles for which a block would keep a resource of a
multiprocessor busy.
``expert_order`` is not included, because each of its kernels needs the whole result of the previous one.
"""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.compiled.cases import CASES, Case
from benchmarks.compiled.static_report import made_by, table_line

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = (80, 90)
# Blocks of a launch that run: the first, and others at equal distances. Tiles of rows differ in their experts.
SAMPLED = 4


@dataclass(frozen=True)
class Row:
    """One kernel in one case, with numbers per block. The fields are the columns of the table."""

    operator: str
    kernel: str
    computes: str
    shape: str
    precision: str
    architecture: int
    warps: int
    blocks: int
    sampled: int
    instructions: int
    integer: int
    floating: int
    moves: int
    barriers: int
    global_requests: int
    sectors_a_request: float
    shared_requests: int
    wavefronts_a_request: float
    multiply_adds: int
    loop_share: float
    loop_instructions: int
    model_bound: str
    model_cycles: int
    model_issue: int
    model_tensor_cores: int
    model_shared_memory: int
    model_l2: int


def sampled(kernel: str, grid: tuple[int, int, int]) -> list[int] | None:
    """The blocks of a grid to run. None means all, for kernels whose results others use as addresses."""
    if not kernel.endswith(("fwd_kernel", "bwd_kernel", "bwd_weight_kernel")) and not kernel.startswith("memory_"):
        return None
    blocks = grid[0] * grid[1] * grid[2]
    count = min(SAMPLED, blocks)
    return [blocks * i // count for i in range(count)]


def run_case(case: Case, architecture: int) -> Iterator[Row]:
    """Run the launches of a case in this process, which must not use Triton's interpreter."""
    from benchmarks.compiled import cases
    from benchmarks.measure.precision import multiplying_as
    from ptx_executor import counters, model
    from ptx_executor.gpu import Gpu

    tensors = cases.Tensors.of(case, "cpu")
    with Gpu(architecture, seeds=(0,), blocks=sampled) as gpu, multiplying_as(case.precision):
        for label, launch in cases.launches(case, tensors).items():
            gpu.launches.clear()
            launch()
            for done in gpu.launches:
                found = counters.count(done.result)
                loop, turns = counters.count_main_loop(done.result)
                busy = model.cycles(found, architecture, tf32=case.precision == "tf32")
                resource, cycles = model.bound(busy)

                def of_a_block(total: int, blocks: int = found.blocks) -> int:
                    return round(total / blocks)

                yield Row(
                    operator=case.operator,
                    kernel=done.kernel,
                    computes=label,
                    shape=str(case),
                    precision=case.precision,
                    architecture=architecture,
                    warps=done.num_warps,
                    blocks=done.grid[0] * done.grid[1] * done.grid[2],
                    sampled=found.blocks,
                    instructions=of_a_block(found.executed),
                    integer=of_a_block(found.instructions["integer"]),
                    floating=of_a_block(found.instructions["float"]),
                    moves=of_a_block(found.instructions["move"]),
                    barriers=of_a_block(found.instructions["barrier"]),
                    global_requests=of_a_block(found.global_requests),
                    sectors_a_request=round(found.sectors / max(1, found.global_requests), 2),
                    shared_requests=of_a_block(found.shared_requests),
                    wavefronts_a_request=round(found.wavefronts / max(1, found.shared_requests), 2),
                    multiply_adds=of_a_block(found.multiply_adds),
                    loop_share=round(loop.executed / found.executed, 3),
                    loop_instructions=round(loop.executed / max(1, turns)),
                    model_bound=resource,
                    model_cycles=round(cycles),
                    model_issue=round(busy["issue"]),
                    model_tensor_cores=round(busy["tensor cores"]),
                    model_shared_memory=round(busy["shared memory"]),
                    model_l2=round(busy["L2"]),
                )


def counted_rows(chosen: list[Case], architecture: int) -> Iterator[Row]:
    """Run cases in a separate process; yield the rows as they arrive."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    program = (
        "import sys, json; from dataclasses import asdict; from benchmarks.compiled import counted\n"
        "from benchmarks.compiled.cases import Case\n"
        "for fields in json.loads(sys.argv[2]):\n"
        "    for row in counted.run_case(Case(**fields), int(sys.argv[1])):\n"
        "        print(json.dumps(asdict(row)), flush=True)\n"
    )
    request = json.dumps([asdict(case) for case in chosen])
    command = [sys.executable, "-W", "ignore", "-c", program, str(architecture), request]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            yield Row(**json.loads(line))
    if process.returncode != 0:
        raise RuntimeError(f"counting for sm_{architecture} ended with status {process.returncode}; it is said above")


def markdown(rows: list[Row], made: dict[str, str]) -> str:
    """A single table; all numbers are per block."""
    lines = [
        "# What the kernels do",
        "",
        f"Made by `python -m benchmarks.compiled.counted` with Triton {made['triton']} at {made['commit']},"
        f" {made['date']}, on a",
        f"CPU that executed the compiled code of {SAMPLED} blocks of each launch; every column is in",
        "[counted.csv](counted.csv).",
        "",
        "Counts are of a block: instructions of warps, and which share of them the main loop took (the innermost that",
        "multiplied most), sectors of 32 bytes a request for global memory (4 where lanes read adjacent 4-byte words),",
        "passes over the banks a request for shared memory. **The last two columns are a",
        "model, no measurement**: which resource of a multiprocessor of an A100 (sm_80) or H100 (sm_90) would be busy",
        "longest, and for how many cycles, beside those of issuing; dependencies and latencies are left out.",
        "",
    ]
    heads = ("Computes", "Kernel", "Shape", "Precision", "sm", "Blocks", "Warps", "Instructions", "Sectors a request")
    heads += (
        "In its main loop",
        "Passes a request",
        "Multiply-adds",
        "Model: bound by",
        "Model: cycles, of them issue",
    )
    lines += [table_line(heads), table_line(["---"] * len(heads))]
    for row in rows:
        kernel = row.kernel.removeprefix(f"{row.operator}_").removesuffix("_kernel")
        cells = (
            row.computes,
            f"{row.operator} {kernel}",
            row.shape,
            row.precision,
            row.architecture,
            row.blocks,
            row.warps,
        )
        cells += (row.instructions, row.sectors_a_request, f"{row.loop_share:.0%}, {row.loop_instructions} a turn")
        cells += (row.wavefronts_a_request, row.multiply_adds)
        lines.append(
            table_line([f"{cell}" for cell in (*cells, row.model_bound, f"{row.model_cycles}, {row.model_issue}")])
        )
    return "\n".join(lines) + "\n"


def main(
    out: Annotated[Path, typer.Option(help="CSV to write; the table is written next to it as .md.")] = (
        ROOT / "benchmarks" / "results" / "counted.csv"
    ),
    operator: Annotated[list[str] | None, typer.Option(help="Only this operator; repeatable.")] = None,
) -> None:
    """Execute a few blocks of every kernel for sm_80 and sm_90 and write the counts."""
    chosen = [
        case
        for case in CASES
        if case.operator in (operator or ("cosine_topk", "expert_matmul", "routed_matmul", "memory_update"))
    ]
    made, rows, console = made_by(), [], Console(stderr=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)] + list(made), lineterminator="\n")
        writer.writeheader()
        for architecture in ARCHITECTURES:
            for row in counted_rows(chosen, architecture):
                rows.append(row)
                writer.writerow({**asdict(row), **made})
                file.flush()
                console.print(
                    f"sm_{architecture} {row.kernel} {row.shape} {row.precision}: {row.instructions}", highlight=False
                )
    out.with_suffix(".md").write_text(markdown(rows, made), encoding="utf-8")
    console.print(f"{len(rows)} rows written to {out} and {out.with_suffix('.md')}", highlight=False)


if __name__ == "__main__":
    typer.run(main)

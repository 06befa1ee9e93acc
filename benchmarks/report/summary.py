"""Ten lines about a run on a GPU: ``python -m benchmarks.report.summary results.csv --status status.txt``."""

import csv
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.measure.shapes import REFERENCE
from benchmarks.report.tables import Figures

DTYPE = "bfloat16"


def lines(results: Path, status: list[str]) -> list[str]:
    """Always ten, whatever was measured."""
    figures, known = Figures(results), {}
    if results.exists():
        with results.open(newline="") as file:
            known = next(csv.DictReader(file), {})
    versions = ", ".join(f"{name} {known[name]}" for name in ("driver", "torch", "triton", "commit") if known.get(name))
    ended = [line for line in status if not line.startswith(("libraries", "correctness"))]
    return [
        f"{known.get('device', 'no device')}; {versions or 'nothing measured'}",
        next((line for line in status if line.startswith("libraries")), "libraries: unknown"),
        next((line for line in reversed(status) if line.startswith("correctness")), "correctness: not tested"),
        f"reference shape {REFERENCE}, {DTYPE}:",
        *(
            f"  {operator} {metric}: {against(figures, operator, metric)}"
            for operator, metric in (
                ("expert_matmul", "forward"),
                ("expert_matmul", "forward + backward"),
                ("layer", "training step"),
            )
        ),
        f"  of the roofline: {shares(figures)}",
        f"not complete: {'; '.join(ended)}" if ended else "complete: every suite ran to its end",
        f"{len(figures.medians)} figures in {results}",
    ]


def against(figures: Figures, operator: str, metric: str) -> str:
    """Our time, and how many times as long others take, the fastest first."""
    names = {
        key.implementation
        for key in figures.medians
        if (key.operator, key.shape, key.dtype) == (operator, str(REFERENCE), DTYPE) and key.implementation != "rbm"
    }
    ours, *ratios = figures.cells(sorted(names), operator, REFERENCE, metric, dtype=DTYPE)
    found = [(float(ratio.split()[0]), name) for name, ratio in zip(sorted(names), ratios, strict=True) if ratio]
    return f"{ours}; " + ", ".join(f"{name} {ratio:g} x" for ratio, name in sorted(found)) if ours else "not measured"


def shares(figures: Figures) -> str:
    """Of the least time that bytes or operations take, at ceilings of the same run."""
    told = []
    for operator in ("expert_matmul", "cosine_topk", "memory_statistics"):
        share = figures.of(operator, REFERENCE, "rbm", "forward roofline share", DTYPE)
        told += [f"{operator} {100 * share:.0f} %"] if share is not None else []
    best = figures.of("ceiling", "best found", "torch.mm", "FLOP/s", DTYPE)
    return ", ".join(told + ([f"torch.mm {best / 1e12:.0f} TFLOP/s"] if best else [])) or "not measured"


def main(
    results: Annotated[Path, typer.Argument(help="Results, which need not exist.")],
    status: Annotated[Path, typer.Option(help="Notes of gpu.sh, a line each.")],
) -> None:
    """Print ten lines."""
    noted = status.read_text().splitlines() if status.exists() else []
    for line in lines(results, noted):
        typer.echo(line)


if __name__ == "__main__":
    typer.run(main)

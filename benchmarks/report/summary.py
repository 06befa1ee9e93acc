"""Ten lines about a run on a GPU, printed at the end of ``gpu.sh``."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measure.shapes import REFERENCE
from benchmarks.measure.verdicts import CORE, FAILED, NOT_TESTED, PASSED, tested_as
from benchmarks.report.medians import Figures

DTYPE = "bfloat16"


def lines(
    results: Path, notes: Sequence[str], verdicts: Mapping[str, str] | None = None, counts: tuple[int, int] = (0, 0)
) -> list[str]:
    """Always ten lines, whatever was measured.

    ``verdicts`` tells for each operator whether it passed its tests; ``counts`` is how many tests passed and failed.
    """
    figures, known = Figures(results), {}
    if results.exists():
        with results.open(newline="", encoding="utf-8") as file:
            known = next(csv.DictReader(file), {})
    versions = ", ".join(f"{name} {known[name]}" for name in ("driver", "torch", "triton", "commit") if known.get(name))
    ended = [line for line in notes if not line.startswith("libraries: built")]
    measured = sum(bool(tested_as(key.operator)) for key in figures.medians)
    return [
        f"{known.get('device', 'no device')}; {versions or 'nothing measured'}",
        next((line for line in notes if line.startswith("libraries")), "libraries: unknown"),
        correctness(verdicts or {}, counts),
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
        f"not complete: {'; '.join(ended)}" if ended else "complete: every step ran to its end",
        f"{measured} figures of operators that did not fail in {results}",
    ]


def correctness(verdicts: Mapping[str, str], counts: tuple[int, int]) -> str:
    """The operators that failed, then those that passed."""
    if not verdicts:
        return "correctness: not tested"
    words = {FAILED: "FAILED", PASSED: "passed", CORE: "passed in the core tests alone", NOT_TESTED: "not tested"}
    parts = []
    for verdict, word in words.items():
        if names := [name for name, found in verdicts.items() if found == verdict]:
            parts.append(f"{word}: {', '.join(names)}")
    return f"correctness: {'; '.join(parts)} ({counts[0]} tests passed, {counts[1]} failed)"


def against(figures: Figures, operator: str, metric: str) -> str:
    """Our time, and the ratios of the others to it, the fastest first."""
    names = {
        key.implementation
        for key in figures.medians
        if (key.operator, key.shape, key.dtype) == (operator, str(REFERENCE), DTYPE) and key.implementation != "rbm"
    }
    ours, *ratios = figures.cells(sorted(names), operator, REFERENCE, metric, dtype=DTYPE)
    found = [(float(ratio.split()[0]), name) for name, ratio in zip(sorted(names), ratios, strict=True) if ratio]
    return f"{ours}; " + ", ".join(f"{name} {ratio:g} x" for ratio, name in sorted(found)) if ours else "not measured"


def shares(figures: Figures) -> str:
    """Shares of the minimum time by bytes or operations, with the ceilings of the same run."""
    parts = []
    for operator in ("expert_matmul", "cosine_topk", "memory_statistics"):
        share = figures.of(operator, REFERENCE, "rbm", "forward roofline share", DTYPE)
        parts += [f"{operator} {100 * share:.0f} %"] if share is not None else []
    best = figures.of("ceiling", "best found", "torch.mm", "FLOP/s", DTYPE)
    return ", ".join(parts + ([f"torch.mm {best / 1e12:.0f} TFLOP/s"] if best else [])) or "not measured"

"""What a mixture gains where layers are narrow: ``results/searches/narrow.csv`` (docs/experts.md)."""

from collections.abc import Sequence
from statistics import fmean

from benchmarks.report.medians import RUNS, markdown

WIDTHS = (4, 8, 16, 32, 64)
# The MLP of as many active parameters as three experts: its widths are in experiments/searches/narrow_mlp.yaml.
FACTOR = 3
HEADER = ["width", "RbM", "MLP", "MLP, three times as wide", "RbM - MLP (*p*)", "RbM - wide MLP (*p*)"]


def narrow() -> str:
    """The table of ``results/searches/narrow.csv``."""
    from rbm.experiments.results import read_rows

    return markdown(HEADER, by_width(read_rows(RUNS / "searches" / "narrow.csv")))


def by_width(rows: list[dict[str, str]], widths: Sequence[int] = WIDTHS) -> list[list[str]]:
    """Accuracies by width, means over cells, of RbM, the MLP of its width and the MLP of three times its width."""
    from rbm.experiments.comparisons import Gain, gain, kind_of, kinds
    from rbm.experiments.statistics import p_text

    found = kinds(rows)

    def mean(kind: str) -> str:
        return f"{fmean(fmean(runs.values()) for runs in found[kind].values()):.1f}"

    def lead(result: Gain) -> str:
        return f"{result.difference:+.1f} ± {result.error:.1f} ({p_text(result.p)})"

    table = []
    for width in widths:
        students = ("rbm", width), ("mlp", width), ("mlp", FACTOR * width)
        ours, same, wide = (kind_of(method, f"width {channels}") for method, channels in students)
        leads = [lead(gain(found[ours], found[other])) for other in (same, wide)]
        table.append([str(width), *map(mean, (ours, same, wide)), *leads])
    return table

"""Draws the picture of README.md from committed results: ``python -m benchmarks.report.overview``.

Left: the time of one prediction, from ``benchmarks/results/cpu.csv``. Right: the accuracy on unseen nodes, from
``results/paper.csv``.
"""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import typer

from benchmarks.report.headline import one_node
from benchmarks.report.medians import RESULTS, RUNS, human

mpl.use("Agg")
import matplotlib.pyplot as plt

MODELS = {"rbm": "RbM student", "mlp": "MLP student", "teacher": "GraphSAGE teacher"}
COLOURS = {"rbm": "#d95f02", "mlp": "#7570b3", "teacher": "#666666"}


def accuracies(path: Path) -> dict[str, dict[str, tuple[float, float]]]:
    """Mean and standard deviation over seeds, in per cent, by graph and method: unseen nodes, the paper's protocol."""
    from rbm.experiments.results import read_rows  # only here, so that the module works without a graph library

    runs: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in read_rows(path):
        wanted = ("sage", "rbm", "", "inductive")
        if (row["teacher"], row["protocol"], row["variant"], row["setting"]) == wanted and row["method"] in MODELS:
            runs[row["dataset"]][row["method"]][row["seed"]] = 100 * float(row["test_at_best_val"])
    return {
        graph: {
            method: (statistics.mean(values := [of[seed] for seed in methods["rbm"]]), statistics.stdev(values))
            for method, of in methods.items()
        }
        for graph, methods in runs.items()
    }


def draw(seconds: dict[str, float], points: dict[str, dict[str, tuple[float, float]]], path: Path) -> None:
    """Write the picture as an SVG in which text remains text."""
    milliseconds = {name: 1e3 * value for name, value in seconds.items()}
    longest = max(milliseconds.values())
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rbm", "font.family": "sans-serif", "font.size": 9}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 2.9), width_ratios=(1, 1.5))
        left.barh(list(MODELS.values()), [milliseconds[name] for name in MODELS], color=list(COLOURS.values()))
        for row, name in enumerate(MODELS):
            left.text(milliseconds[name] + 0.02 * longest, row, human(seconds[name]), va="center")
        left.set_xlim(0, 1.2 * longest)
        left.set_xlabel("milliseconds")
        left.invert_yaxis()
        left.set_title("One node of Amazon-Computers, two CPU cores", fontsize=9)
        for place, (name, title) in enumerate(MODELS.items()):
            rows = [graph + 0.2 * (place - 1) for graph in range(len(points))]
            means, deviations = zip(*(methods[name] for methods in points.values()), strict=True)
            right.errorbar(rows, means, deviations, fmt="o", color=COLOURS[name], markersize=4, capsize=2, label=title)
        right.set_xticks(range(len(points)), [graph.replace("-", "\n") for graph in points])
        right.set_ylabel("test accuracy (%)")
        right.set_title("Unseen nodes (inductive), mean and deviation, 5 to 10 seeds", fontsize=9)
        right.legend(loc="lower right", frameon=False, fontsize=8)
        right.grid(axis="y", color="#dddddd", linewidth=0.6)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main(
    out: Annotated[Path, typer.Option(help="The file to write.")] = RESULTS / "overview.svg",
) -> None:
    """Draw the picture from the committed results."""
    draw(one_node(), accuracies(RUNS / "paper.csv"), out)
    # Remove trailing blanks that Matplotlib writes in an SVG.
    lines = out.read_text(encoding="utf-8").splitlines()
    out.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

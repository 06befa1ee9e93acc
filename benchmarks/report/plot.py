"""Bar charts of the peers' times divided by ours: ``python -m benchmarks.report.plot CSV... --out DIR``.

One picture per operator, metric, dtype and device; one group of bars per shape, one bar per implementation.
"""

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import typer

from benchmarks.report.reading import Key, read

mpl.use("Agg")
import matplotlib.pyplot as plt

# The order fixes each implementation's colour in all pictures.
ORDER = (
    "eager",
    "eager compiled",
    "split",
    "sorted",
    "grouped_mm",
    "grouped_mm compiled",
    "dense",
    "tuned compiled",
)
Groups = dict[str, dict[str, float]]


def pictures(medians: dict[Key, float]) -> dict[tuple[str, str, str, str], Groups]:
    """For each picture, its groups of bars by shape and routing, each with ratios by implementation."""
    found: dict[tuple[str, str, str, str], Groups] = defaultdict(dict)
    for key, seconds in medians.items():
        ours = medians.get(key._replace(implementation="rbm"))
        if key.implementation == "rbm" or not key.metric.endswith("seconds") or not ours:
            continue
        group = key.shape if key.routing == "uniform" else f"{key.shape}, {key.routing}"
        about = (key.operator, key.metric, key.dtype, key.device)
        found[about].setdefault(group, {})[key.implementation] = seconds / ours
    return found


def draw(about: tuple[str, str, str, str], groups: Groups, path: Path) -> None:
    """Draw one picture; the line at 1 is ours."""
    implementations = list(dict.fromkeys(name for ratios in groups.values() for name in ratios))
    implementations.sort(key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    height = 0.8 / len(implementations)
    figure, axes = plt.subplots(figsize=(8, 1.2 + len(groups) * (0.25 + 0.18 * len(implementations))))
    for place, name in enumerate(implementations):
        known = [(row, ratios[name]) for row, ratios in enumerate(groups.values()) if name in ratios]
        colour = f"C{ORDER.index(name) if name in ORDER else 8 + place % 2}"
        bars = axes.barh([row + place * height for row, _ in known], [x for _, x in known], height, color=colour)
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
        bars.set_label(name)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(groups))], groups, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("time over that of rbm (longer: rbm is faster)")
    axes.set_title("{}, {}, {}\n{}".format(*about), fontsize=9)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main(
    files: Annotated[list[Path], typer.Argument(help="Results.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")],
) -> None:
    """Draw the contents of the files."""
    found = pictures(read(files))
    out.mkdir(parents=True, exist_ok=True)
    for number, (about, groups) in enumerate(found.items()):
        words = "-".join(about[:3]).replace(" ", "_").replace("+", "and").replace(",", "")
        path = out / f"{number:02}-{words}.svg"
        draw(about, groups, path)
        typer.echo(path)


if __name__ == "__main__":
    typer.run(main)

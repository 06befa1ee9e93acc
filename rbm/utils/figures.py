"""Figures as files: Matplotlib's object interface on the Agg canvas, which needs no display and no global state.

Colours are distinguishable for colour-blind readers: Okabe and Ito's for a few lines, Petroff's ten for groups.
"""

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator

from rbm.utils.files import as_path, write_bytes

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
GROUP_COLORS = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6")
GROUP_COLORS += ("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")
# Okabe and Ito's without yellow: for experts that are shown with classes, which have the ten above.
EXPERT_COLORS = (BLUE, ORANGE, GREEN, "#CC79A7", "#56B4E9", RED, "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK = "#333333"


def new(width: float, height: float, panels: int, rows: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """A figure of this size in inches, and its axes, row by row: ``rows`` rows of ``panels`` panels."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, panels, squeeze=False).flatten()


def tidy(axes: Axes, title: str) -> None:
    """Set a heading, remove the upper and right borders, and colour the rest."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def gridlines(axes: Axes) -> None:
    """Add light grid lines behind the plot."""
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


def set_title(figure: Figure, title: str) -> None:
    """Set the heading of a whole figure, at its left."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)


def in_percent(axis: Axis, low: float, high: float, *, unit: float = 1.0, ticks: int = 6) -> None:
    """Set the limits of a percentage axis within 0 and 100 %, with ticks at whole steps of 1, 2 or 5.

    Args:
        axis: the x or y axis.
        low: lowest value to show; clipped to 0 %.
        high: highest value to show; clipped to 100 %.
        unit: 1 if values are in [0, 1], 100 if they are in per cent.
        ticks: maximum number of steps.
    """
    low, high = max(0.0, low), min(unit, high)
    (axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim)(low, max(high, low + 1e-6 * unit))
    axis.set_major_locator(MaxNLocator(nbins=ticks, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value / unit, 6):g}%"))


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format of the path's ending (PNG if it has none); its folder is created."""
    path = as_path("figure", path)
    path = path if path.suffix else Path(f"{path}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    _without_mathematics(figure)
    figure.savefig(picture, dpi=160, facecolor="white", format=path.suffix.removeprefix("."))
    write_bytes(path, picture.getbuffer())


def _without_mathematics(figure: Figure) -> None:
    """Draw dollar signs as they are: names of graphs and of variants may have some. Powers of ten keep theirs."""
    powers = [
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        if isinstance(axis.get_major_formatter(), LogFormatter)
        for label in axis.get_ticklabels(which="both")
    ]
    for text in figure.findobj(Text):
        text.set_parse_math(text in powers)

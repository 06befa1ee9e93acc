"""Matplotlib figures as SVG that a page can style: text stays text, and every colour is a CSS variable of the page.

A figure is drawn once in placeholder colours. The page's style sheet defines each colour for light and for dark mode.
Matplotlib's global state is not changed.
"""

import io
import re
from collections.abc import Sequence
from html import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK, MUTED, GRID, CARD = "#010101", "#020202", "#030303", "#040404"
GOOD, BAD = "#050505", "#060606"
# For models: the kept student, the teacher, and others.
SERIES = tuple(f"#0701{number:02x}" for number in range(1, 9))
# Experts and classes have different colours, so that they are not confused.
EXPERTS = tuple(f"#0801{number:02x}" for number in range(1, 11))
CLASSES = tuple(f"#0901{number:02x}" for number in range(1, 11))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    CARD: "card",
    GOOD: "good",
    BAD: "bad",
    **{color: f"s{number}" for number, color in enumerate(SERIES, 1)},
    **{color: f"e{number}" for number, color in enumerate(EXPERTS, 1)},
    **{color: f"k{number}" for number, color in enumerate(CLASSES, 1)},
}
WIDTH = 5.0  # inches; one inch is 72 units of the picture

_COLOR = re.compile("|".join(VARIABLES))
_FONT = re.compile(r"font: ((?:\d+ )?[\d.]+px)[^;\"]*")
_NUMBER = re.compile(r"-?\d+\.\d{3,}(?=[^<>]*>)")  # only inside tags; texts do not change
_HEAD = re.compile(r"<svg[^>]*?viewBox=\"([^\"]+)\"[^>]*>")
_ID = re.compile(r"(?<=[\s(\"])(id=\"|xlink:href=\"#|url\(#)")
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)


def new_figure(height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, in the page's colours."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02)
    return figure, tidy(figure.add_subplot())


def tidy(axes: Axes) -> Axes:
    """Style axes: no frame, muted lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=9.5, length=0, pad=5)
    axes.xaxis.label.set(color=MUTED, size=10)
    axes.yaxis.label.set(color=MUTED, size=10)
    axes.patch.set_visible(False)
    return axes


def gridlines(axes: Axes, axis: str = "both") -> None:
    """Add muted grid lines behind the plot."""
    axes.grid(axis=axis, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def legend(axes: Axes, **options: object) -> None:
    """Add a legend without a frame above the axes."""
    given = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": 2, "fontsize": 9.5, "borderaxespad": 0.2}
    axes.legend(**{**given, "frameon": False, "labelcolor": INK, "handlelength": 1.6, "columnspacing": 1.4, **options})


def percent_axis(axes: Axes, axis: str, low: float, high: float, *, ticks: int = 6) -> None:
    """Set an axis in per cent to limits within [0, 100], with tick steps of 1, 2 or 5 times a power of ten."""
    low, high = max(0.0, low), min(100.0, high)
    chosen = axes.xaxis if axis == "x" else axes.yaxis
    (axes.set_xlim if axis == "x" else axes.set_ylim)(low, max(high, low + 1e-6))
    chosen.set_major_locator(MaxNLocator(nbins=ticks, steps=[1, 2, 5, 10]))
    chosen.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def around(values: Sequence[float], *, share: float = 0.12) -> tuple[float, float]:
    """Axis limits around values with a margin: a ``share`` of their range, at least one."""
    low, high = min(values), max(values)
    margin = max(share * (high - low), 1.0)
    return low - margin, high + margin


def as_svg(figure: Figure, name: str, label: str) -> str:
    """A figure as the ``<svg>`` element of a page.

    Args:
        figure: figure in the colours of this module.
        name: name of the picture and prefix of its ids, which must be unique on a page.
        label: description for screen readers.
    """
    for artist in figure.findobj(Text):
        artist.set_parse_math(False)  # names of runs and of methods may have dollar signs
    for axes in figure.axes:
        for artist in (*axes.collections, *axes.lines, *axes.patches, *axes.texts):
            artist.set_in_layout(False)  # they are inside the axes, and measuring them takes half the time
    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10}
    content = io.StringIO()
    with matplotlib.rc_context(settings):
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(content, format="svg", transparent=True, metadata=no_metadata)
    text = content.getvalue()
    text = _METADATA.sub("", text[text.index("<svg") :])
    text = _FONT.sub(r"font: \1 var(--font)", text)
    text = _COLOR.sub(lambda found: f"var(--{VARIABLES[found[0]]})", text)
    text = _NUMBER.sub(lambda found: f"{float(found[0]):.2f}", text)
    text = _ID.sub(lambda found: f"{found[1]}{name}-", text)
    head = f'<svg class="chart" viewBox="\\1" role="img" aria-label="{escape(label)}" data-chart="{name}">'
    return _HEAD.sub(head, text, count=1)

"""The charts of a report: each takes a part of ``report.json`` and returns an ``<svg>`` element.

Accuracies are in per cent. The charts label their axes; the sentences next to them are in page.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from scipy.stats import binomtest

from rbm.distillation.registry import title_of
from rbm.distillation.report.svg import (
    BAD,
    CARD,
    CLASSES,
    EXPERTS,
    GOOD,
    GRID,
    INK,
    MARKERS,
    MUTED,
    SERIES,
    around,
    as_svg,
    gridlines,
    legend,
    new_figure,
    percent_axis,
)

FEWEST = 5
MOST_POINTS = 400  # of a curve
MOST_CELL_NUMBERS = 12  # largest number of classes or experts for which cells show their numbers
Styles = Mapping[str, tuple[str, str, str]]  # model -> title, colour, marker


def interval(right: int, nodes: int) -> tuple[float, float]:
    """Wilson's 95 % interval of an accuracy, in per cent."""
    found = binomtest(right, nodes).proportion_ci(0.95, method="wilson")
    return 100 * found.low, 100 * found.high


def styles_of(models: Sequence[str], kept: str) -> dict[str, tuple[str, str, str]]:
    """Title, colour and marker of each model, the same in all charts."""
    others = iter(SERIES[2:] * len(models))
    marks = iter(MARKERS[2:] * len(models))
    first = {kept: (SERIES[0], "o"), "teacher": (SERIES[1], "s")}
    return {name: (title_of(name), *(first.get(name) or (next(others), next(marks)))) for name in models}


def accuracy_chart(figures: Mapping[str, tuple[float, float, float]], styles: Styles, nodes: str, name: str) -> str:
    """Test accuracy of each model with its interval, the best at the top.

    Args:
        figures: model -> accuracy and the ends of its interval, in per cent.
        styles: title, colour and marker of each model.
        nodes: description of the test nodes.
        name: name of the picture.
    """
    order = sorted(figures, key=lambda model: figures[model][0])
    figure, axes = new_figure(1.0 + 0.36 * len(order))
    for place, model in enumerate(order):
        _, color, marker = styles[model]
        middle, low, high = figures[model]
        axes.plot([low, high], [place, place], color=color, linewidth=2.2, alpha=0.45, solid_capstyle="round")
        axes.plot(middle, place, marker, color=color, markersize=8, markeredgecolor=CARD, clip_on=False)
        axes.annotate(
            f"{middle:.1f}", (high, place), (5, 0), textcoords="offset points", va="center", color=INK, size=9.5
        )
    axes.set_yticks(range(len(order)), [styles[model][0] for model in order], color=INK)
    axes.set_ylim(-0.6, len(order) - 0.4)
    low, high = around([value for accuracy in figures.values() for value in accuracy])
    percent_axis(axes, "x", low, high + 0.08 * (high - low))
    axes.set_xlabel(f"accuracy on {nodes} (%)")
    axes.spines["left"].set_visible(False)
    gridlines(axes, "x")
    return as_svg(figure, name, "Test accuracy of each model in per cent, with its 95 % interval")


def grid_chart(shares: Sequence[Sequence[float]], rows: str, columns: str, name: str, label: str) -> str:
    """A table of shares in [0, 1] as cells; larger shares are darker. Small tables also show numbers in per cent."""
    values = np.asarray(shares, dtype=float)
    down, across = values.shape
    figure, axes = new_figure(grid_height(down))
    cells = [Rectangle((j - 0.5, i - 0.5), 1, 1) for i in range(down) for j in range(across)]
    axes.add_collection(PatchCollection(cells, facecolor=GRID, alpha=0.25, edgecolor=CARD, linewidth=1))
    for i, j in zip(*np.nonzero(values >= 0.005), strict=True):
        share = float(values[i, j])
        axes.add_patch(
            Rectangle((j - 0.5, i - 0.5), 1, 1, color=SERIES[0], alpha=round(0.08 + 0.87 * share, 2), linewidth=0)
        )
        if max(down, across) <= MOST_CELL_NUMBERS:
            ink = CARD if share > 0.6 else INK
            axes.text(j, i, f"{100 * share:.0f}", ha="center", va="center", color=ink, size=9)
    axes.set(xlim=(-0.5, across - 0.5), ylim=(down - 0.5, -0.5), xlabel=columns, ylabel=rows)
    for axis, count in ((axes.xaxis, across), (axes.yaxis, down)):
        axis.set_major_locator(MaxNLocator(nbins=min(count, 20), integer=True, min_n_ticks=1))
    axes.spines[:].set_visible(False)
    return as_svg(figure, name, label)


def classes_chart(recalls: Mapping[str, Sequence[float | None]], styles: Styles, name: str) -> str:
    """Recall of two models for each class, in per cent, as two joined dots."""
    models = list(recalls)
    count = len(recalls[models[0]])
    figure, axes = new_figure(min(6.5, 1.15 + 0.27 * count))
    for place in range(count):
        both = [recalls[model][place] for model in models]
        if None not in both:
            axes.plot(both, [place] * len(both), color=GRID, linewidth=2.5, zorder=1)
    for model in models:
        title, color, marker = styles[model]
        known = [(value, place) for place, value in enumerate(recalls[model]) if value is not None]
        axes.plot(
            *zip(*known, strict=True),
            marker,
            color=color,
            markeredgecolor=CARD,
            markersize=7,
            label=title,
            clip_on=False,
        )
    axes.yaxis.set_major_locator(MaxNLocator(nbins=min(count, 25), integer=True, min_n_ticks=1))
    axes.set_ylim(count - 0.5, -0.5)
    low = min(value for values in recalls.values() for value in values if value is not None)
    percent_axis(axes, "x", low - 5, 100)
    axes.set(xlabel="nodes of the class that are classified correctly (%)", ylabel="class")
    gridlines(axes, "x")
    legend(axes)
    return as_svg(figure, name, "Share of each class that is classified correctly, in per cent")


def reliability_chart(bins: Mapping[str, list[dict[str, Any]]], styles: Styles, name: str) -> str:
    """Accuracy over confidence, in per cent, with the line of perfect calibration. The size of a dot shows the number
    of nodes. Bins with fewer than :data:`FEWEST` nodes are not drawn, because they are too noisy.
    """
    bins = {model: [bin_ for bin_ in found if bin_["nodes"] >= FEWEST] for model, found in bins.items()}
    bins = {model: found for model, found in bins.items() if found}
    figure, axes = new_figure(3.6)
    axes.plot([0, 100], [0, 100], color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="perfect calibration")
    most = max((bin_["nodes"] for model in bins.values() for bin_ in model), default=1)
    for model, found in bins.items():
        title, color, marker = styles[model]
        x, y = ([100 * bin_[part] for bin_ in found] for part in ("confidence", "accuracy"))
        axes.plot(x, y, color=color, linewidth=1.6, label=title)
        sizes = [20 + 130 * bin_["nodes"] / most for bin_ in found]
        axes.scatter(x, y, sizes, color=color, marker=marker, edgecolors=CARD, linewidths=0.8, zorder=3, clip_on=False)
    least = min((bin_["confidence"] for model in bins.values() for bin_ in model), default=0.0)
    percent_axis(axes, "x", 100 * least - 5, 100)
    percent_axis(axes, "y", 0, 100)
    axes.set(xlabel="confidence: probability of the prediction (%)", ylabel="accuracy (%)")
    gridlines(axes)
    legend(axes, ncols=3)
    return as_svg(figure, name, "Reliability: accuracy over confidence, in per cent")


def groups_chart(groups: dict[str, Any], models: Sequence[str], styles: Styles, xlabel: str, name: str) -> str:
    """Accuracy of several models by group of nodes, with 95 % intervals, in per cent, and the size of each group."""
    figure, axes = new_figure(3.5)
    names, nodes = groups["names"], groups["nodes"]
    ends = []
    for i, model in enumerate(models):
        title, color, marker = styles[model]
        shift = 0.11 * (i - (len(models) - 1) / 2)
        x = np.arange(len(names)) + shift
        right = groups["right"][model]
        middle = [100 * hit / count for hit, count in zip(right, nodes, strict=True)]
        spans = [interval(hit, count) for hit, count in zip(right, nodes, strict=True)]
        ends += [end for span in spans for end in span]
        axes.vlines(x, *zip(*spans, strict=True), color=color, linewidth=1.8, alpha=0.4)
        axes.plot(
            x, middle, color=color, linewidth=1.3, marker=marker, markersize=6.5, markeredgecolor=CARD, label=title
        )
    if len(names) > 7:  # no room for "33 to 64" next to "65 to 128"
        names = [group.replace(" to ", "\u2013") for group in names]
        axes.tick_params(axis="x", labelsize=8)
    axes.set_xticks(range(len(names)), [f"{group}\n{count:,}" for group, count in zip(names, nodes, strict=True)])
    axes.set_xlim(-0.5, len(names) - 0.5)
    percent_axis(axes, "y", *around(ends, share=0.04))
    axes.set(xlabel=f"{xlabel}; second line: test nodes", ylabel="accuracy (%)")
    gridlines(axes, "y")
    legend(axes, ncols=3)
    return as_svg(figure, name, f"Accuracy in per cent by {xlabel}")


def agreement_chart(found: dict[str, Any], name: str) -> str:
    """One bar of all test nodes: both correct, only one of the two correct, both wrong."""
    parts = (
        ("both right", found["both_right"], GOOD, 0.75),
        ("student alone right", found["student_right"], SERIES[0], 0.9),
        ("teacher alone right", found["teacher_right"], SERIES[1], 0.9),
        ("both wrong", found["both_wrong"], BAD, 0.75),
    )
    total = sum(count for _, count, _, _ in parts)
    figure, axes = new_figure(1.75)
    left = 0.0
    for title, count, color, alpha in parts:
        share = 100 * count / total
        axes.barh(
            0, share, left=left, color=color, alpha=alpha, height=0.8, edgecolor=CARD, label=f"{title}: {count:,}"
        )
        left += share
    percent_axis(axes, "x", 0, 100)
    axes.set(yticks=[], ylim=(-0.5, 0.5), xlabel=f"share of {total:,} test nodes (%)")
    axes.spines["left"].set_visible(False)
    legend(axes)
    return as_svg(figure, name, "Test nodes by who is right, in per cent")


def grid_height(rows: int) -> float:
    """Height of a :func:`grid_chart` in inches."""
    return min(5.6, max(2.2, 1.0 + 0.32 * rows))


def load_chart(layer: dict[str, Any], number: int, name: str) -> str:
    """Each expert's share of the gate mass of a layer, in per cent, with a line for the even share. It is as high as
    the chart of the layer's classes next to it.
    """
    load = [100 * share for share in layer["load"]]
    figure, axes = new_figure(grid_height(len(layer["by_class"])))
    even = 100 / len(load)
    axes.bar(range(len(load)), load, color=SERIES[0], alpha=0.85, width=0.74)
    axes.axhline(
        even, color=SERIES[1], linewidth=1.4, linestyle=(0, (4, 3)), label=f"even share: {even:.3g} %", zorder=0
    )
    for expert in layer["dead"]:
        axes.plot(
            expert, 0, "X", color=BAD, markersize=9, clip_on=False, label="dead" if expert == layer["dead"][0] else None
        )
    if len(load) <= 16:
        axes.set_xticks(range(len(load)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    percent_axis(axes, "y", 0, 1.08 * max([*load, even]))
    axes.set(xlabel=f"expert of layer {number}", ylabel="share of gate mass (%)")
    gridlines(axes, "y")
    legend(axes)
    return as_svg(figure, name, f"Load of the experts of layer {number}, in per cent of the gate mass")


def space_chart(space: dict[str, Any], by: str, name: str) -> str:
    """The last router's inputs in a plane, by top expert (with the memory vectors as stars) or by class."""
    points = np.asarray([point[:2] for point in space["points"]], dtype=float)
    groups = np.asarray([point[2 if by == "expert" else 3] for point in space["points"]], dtype=int)
    palette = EXPERTS if by == "expert" else CLASSES
    figure, axes = new_figure(3.9)
    for place, group in enumerate(np.unique(groups)):
        own = points[groups == group]
        # Experts start with dots and classes with squares, so that shapes differ as well as colours.
        marker = MARKERS[(place // len(palette) + (0 if by == "expert" else 1)) % len(MARKERS)]
        color = palette[place % len(palette)]
        label = str(group) if group >= 0 else "no label"
        axes.scatter(*own.T, 22, color=color, marker=marker, edgecolors=CARD, linewidths=0.4, label=label)
    if by == "expert":
        for number, mark in enumerate(space["memories"]):
            axes.plot(*mark, "*", color=INK, markersize=11, markeredgecolor=CARD, markeredgewidth=0.6)
            ground = {"boxstyle": "round,pad=0.12", "facecolor": CARD, "edgecolor": "none", "alpha": 0.75}
            axes.annotate(f"{number}", mark, (6, 5), textcoords="offset points", size=8.5, color=INK, bbox=ground)
    for axis, share, part in ((axes.xaxis, space["explained"][0], 1), (axes.yaxis, space["explained"][1], 2)):
        axis.set_label_text(f"component {part} ({100 * share:.0f} % of the variance)")
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    gridlines(axes)
    count = len(np.unique(groups))
    if count <= 24:
        legend(axes, ncols=min(12, count), handlelength=0.8, columnspacing=0.8, handletextpad=0.1)
    return as_svg(figure, name, f"Inputs of the last router in a plane, by {by}")


def curves_chart(records: list[dict[str, Any]], key: str, styles: Styles, best: Mapping[str, int], name: str) -> str:
    """Loss, or validation accuracy in per cent, of every phase over its epochs; a marker shows the selected epoch."""
    figure, axes = new_figure(3.3)
    scale = 1.0 if key == "loss" else 100.0
    everything: list[float] = []
    for phase in dict.fromkeys(record["phase"] for record in records):
        if phase not in styles:
            continue
        title, color, marker = styles[phase]
        own = sorted((r for r in records if r["phase"] == phase and r.get(key) is not None), key=lambda r: r["epoch"])
        if not own:
            continue
        x, y = np.array([[r["epoch"] + 1, scale * r[key]] for r in _thinned(own, best.get(phase))]).T
        everything += y.tolist()
        axes.plot(x, y, color=color, linewidth=1.5, label=title)
        chosen = np.flatnonzero(x == best.get(phase, -1) + 1)
        if len(chosen):
            axes.plot(x[chosen], y[chosen], marker, color=color, markersize=7, markeredgecolor=CARD, clip_on=False)
    if key == "loss":
        axes.set_ylabel("training loss (nats)")
        positive = [value for value in everything if value > 0]
        if len(positive) == len(everything) and max(positive) > 30 * min(positive):
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        else:
            axes.set_ylim(bottom=min(0.0, min(everything)))
    else:
        axes.set_ylabel("validation accuracy (%)")
        percent_axis(axes, "y", float(np.quantile(everything, 0.1)) - 8, max(everything) + 1)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    axes.set_xlim(left=0)
    gridlines(axes)
    legend(axes, ncols=3)
    return as_svg(figure, name, f"{axes.get_ylabel()} over epochs")


def _thinned(lines: list[dict[str, Any]], best: int | None) -> list[dict[str, Any]]:
    """At most :data:`MOST_POINTS` points of a curve, plus the selected epoch and the last one."""
    step = -(-len(lines) // MOST_POINTS)
    return [line for i, line in enumerate(lines) if i % step == 0 or line["epoch"] == best or i == len(lines) - 1]


def latency_chart(points: Mapping[str, tuple[float, float, float, float]], styles: Styles, name: str) -> str:
    """Accuracy, with its interval, over the milliseconds that a model takes for one node.

    Args:
        points: model -> milliseconds, accuracy and the ends of its interval in per cent.
        styles: title, colour and marker of each model.
        name: name of the picture.
    """
    figure, axes = new_figure(3.4)
    for model, (ms, middle, low, high) in points.items():
        title, color, marker = styles[model]
        axes.plot([ms, ms], [low, high], color=color, linewidth=1.8, alpha=0.4)
        axes.plot(
            ms, middle, marker, color=color, markersize=9, markeredgecolor=CARD, label=title, clip_on=False, ls=""
        )
    axes.set_xscale("log")
    least, most = (end(ms for ms, *_ in points.values()) for end in (min, max))
    ticks = [step * 10.0**power for power in range(-5, 6) for step in (1, 2, 5)]
    least, most = least / 1.6, most * 1.6
    inside = [tick for tick in ticks if least <= tick <= most]
    axes.xaxis.set_major_locator(FixedLocator(inside if len(inside) <= 6 else inside[:: -(-len(inside) // 6)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(least, most)
    percent_axis(axes, "y", *around([end for _, *ends in points.values() for end in ends]))
    axes.set(xlabel="time to answer one node (ms, logarithmic)", ylabel="test accuracy (%)")
    gridlines(axes)
    legend(axes, ncols=3)
    return as_svg(figure, name, "Test accuracy in per cent over milliseconds for one node")

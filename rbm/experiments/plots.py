"""Plots of several runs: tables of the paper, variants of an experiment, latencies."""

from pathlib import Path

from rbm.experiments.statistics import Summary
from rbm.utils import figures as draw

_PANELS = 4  # side by side


def plot_variants(figures: dict[str, dict[str, Summary]], path: str | Path, *, ylabel: str = "test accuracy") -> None:
    """Draw one line for each graph over the variants of an experiment, mean and standard deviation over seeds.

    Args:
        figures: graph -> variant -> its accuracy in per cent; a missing variant leaves a gap.
        path: PNG file to write; its folder is created.
        ylabel: label of the figures.

    Raises:
        ValueError: no figures.
    """
    if not any(figures.values()):
        raise ValueError("figures: got none, expected graph -> variant -> summary with at least one of each")
    variants = list(dict.fromkeys(name for of_graph in figures.values() for name in of_graph))
    place = {name: i for i, name in enumerate(variants)}
    figure, (axes,) = draw.new(max(6.0, 1.1 * len(variants)), 3.8, 1)
    ends: list[float] = []
    for i, (graph, of_graph) in enumerate(figures.items()):
        color, marker = _look(i)
        # Slightly shifted, so that error bars do not hide one another.
        x = [place[name] + 0.06 * (i - (len(figures) - 1) / 2) for name in of_graph]
        means, stds = ([getattr(summary, part) for summary in of_graph.values()] for part in ("mean", "std"))
        axes.errorbar(x, means, yerr=stds, color=color, marker=marker, capsize=3, linewidth=1.2, label=graph)
        ends += [mean + sign * std for mean, std in zip(means, stds, strict=True) for sign in (-1, 1)]
    axes.set_xticks(range(len(variants)), variants)
    axes.set_ylabel(ylabel)
    margin = 0.06 * (max(ends) - min(ends)) + 0.3
    draw.in_percent(axes.yaxis, min(ends) - margin, max(ends) + margin, unit=100.0)
    draw.tidy(axes, "mean and standard deviation over seeds")
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    draw.save(figure, path)


def plot_table(
    lines: dict[str, tuple[dict[str, Summary], dict[str, Summary]]], path: str | Path, *, title: str = ""
) -> None:
    """Draw a table: one panel per line with its own axis, and in it one row per column.

    Our figures are filled markers with their spread over runs, the paper's are hollow.

    Args:
        lines: name -> (ours, the paper's), each column -> figure in per cent.
        path: PNG file to write; its folder is created.
        title: heading.

    Raises:
        ValueError: no lines.
    """
    if not lines:
        raise ValueError("lines: got none, expected name -> (ours, the paper's) with at least one of each")
    columns = list(dict.fromkeys(column for ours, _ in lines.values() for column in ours))
    across = min(_PANELS, len(lines))
    rows = -(-len(lines) // across)
    figure, panels = draw.new(2.9 * across + 1.2, rows * (0.95 + 0.23 * len(columns)) + 0.6, across, rows)
    for axes, (name, (ours, paper)) in zip(panels, lines.items(), strict=False):
        ends = []
        for place, column in enumerate(columns):
            color, marker = _look(place)
            if (found := ours.get(column)) is not None:
                axes.errorbar(found.mean, place, xerr=found.std, fmt=marker, color=color, capsize=2, markersize=5.5)
                ends += [found.mean - found.std, found.mean + found.std]
            if (printed := paper.get(column)) is not None:
                hollow = {"markerfacecolor": "white", "markeredgecolor": color, "zorder": 1.5}
                axes.plot(printed.mean, place, marker, markersize=7, **hollow)
                ends.append(printed.mean)
        axes.set_yticks(range(len(columns)), columns if axes.get_subplotspec().is_first_col() else [""] * len(columns))
        axes.set_ylim(len(columns) - 0.5, -0.5)
        margin = 0.06 * (max(ends) - min(ends)) + 0.3
        draw.in_percent(axes.xaxis, min(ends) - margin, max(ends) + margin, unit=100.0, ticks=5)
        draw.gridlines(axes)
        draw.tidy(axes, name)
    for axes in panels[len(lines) :]:
        axes.set_visible(False)
    legend_text = "test accuracy; filled: ours, with its standard deviation over seeds, hollow: the paper"
    figure.supxlabel(legend_text, fontsize=9)
    draw.set_title(figure, title)
    draw.save(figure, path)


def _look(place: int) -> tuple[str, str]:
    return draw.GROUP_COLORS[place % len(draw.GROUP_COLORS)], draw.MARKERS[place % len(draw.MARKERS)]


def plot_latency(rows: list[dict], path: str | Path, *, title: str = "") -> None:
    """Draw each model's median time over the batch size, with bars up to the time of the slowest calls.

    Args:
        rows: the rows of ``latency.json``: ``title``, ``batch_size``, ``p50_ms``, ``p99_ms``.
        path: PNG file to write; its folder is created.
        title: heading.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("rows: got none, expected those of latency.json")
    figure, (axes,) = draw.new(7.5, 4.2, 1)
    for i, name in enumerate(dict.fromkeys(row["title"] for row in rows)):
        own = sorted((row for row in rows if row["title"] == name), key=lambda row: row["batch_size"])
        sizes, medians, slowest = zip(*((row["batch_size"], row["p50_ms"], row["p99_ms"]) for row in own), strict=True)
        color, marker = (draw.BLUE, draw.GREEN, draw.ORANGE)[i % 3], draw.MARKERS[i % len(draw.MARKERS)]
        axes.plot(sizes, medians, color=color, marker=marker, markersize=6, linewidth=1.6, label=name)
        axes.fill_between(sizes, medians, slowest, color=color, alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="nodes at once", ylabel="time (ms)")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    draw.gridlines(axes)
    draw.tidy(axes, title or "Latency")
    legend = {"title": "line: median\nshade: up to the 99th of 100", "title_fontsize": 8.5, "alignment": "left"}
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), **legend)
    draw.save(figure, path)

"""Pictures of a run: training curves, the experts' load, and what the router sees.

Figures are drawn with Matplotlib's object interface on the Agg canvas: no display is needed and no global state is
touched. Colours stay apart for colour-blind readers: Okabe and Ito's for a few lines, Petroff's ten for groups.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from rbm.experiments.statistics import Summary
from rbm.utils.files import write_bytes

_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_GROUP_COLORS = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6")
_GROUP_COLORS += ("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_PHASE_COLORS = {"teacher": _ORANGE, "mlp": _GREEN, "rbm": _BLUE}
_INK = "#333333"


def _figure(width: float, height: float, panels: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _tidy(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=_INK, labelsize=9)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)


def _save(figure: Figure, path: str | Path) -> None:
    path = Path(path) if Path(path).suffix else Path(f"{path}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=160, facecolor="white", format=path.suffix.removeprefix("."))
    write_bytes(path, picture.getbuffer())


def plot_training_curves(
    records: list[dict],
    path: str | Path,
    *,
    best_epochs: dict[str, int] | None = None,
    titles: dict[str, str] | None = None,
) -> None:
    """Draw the loss, and validation and test accuracy, of every phase over its epochs; a dot marks the best validation.

    Args:
        records: lines of ``metrics.jsonl``: ``phase`` (``"teacher"``, ``"mlp"``, ``"rbm"``, ...), ``epoch``, ``loss``,
            ``val_accuracy``, ``test_accuracy`` (accuracies in [0, 1]); other keys are ignored.
        path: PNG file to write; its folder is made.
        best_epochs: the epoch that each phase selected. For phases that it lacks, the last one that reaches the highest
            validation accuracy, as in training (which does not select while pretraining).
        titles: names of the phases in the legend.

    Raises:
        ValueError: no records.
    """
    if not records:
        raise ValueError("records: got none, expected the lines of metrics.jsonl; train for at least one epoch first")
    figure, (loss_axes, accuracy_axes) = _figure(10.5, 4.0, 2)
    others = iter(_GROUP_COLORS * len(records))
    for phase in dict.fromkeys(record["phase"] for record in records):
        color = _PHASE_COLORS.get(phase) or next(others)
        name = (titles or {}).get(phase, phase)
        lines = sorted((record for record in records if record["phase"] == phase), key=lambda record: record["epoch"])
        epochs, loss, validation, test = (
            np.array([line[key] for line in lines], dtype=float)
            for key in ("epoch", "loss", "val_accuracy", "test_accuracy")
        )
        if phase not in (best_epochs or {}):
            best = len(lines) - 1 - int(np.argmax(validation[::-1]))
        else:
            best = int(np.flatnonzero(epochs == best_epochs[phase])[0])
        loss_axes.plot(epochs, loss, color=color, linewidth=1.6, label=name)
        loss_axes.plot(epochs[best], loss[best], "o", color=color, markersize=6, markeredgecolor="white")
        label = f"{name}: test {test[best]:.1%} at epoch {epochs[best]:.0f}"
        accuracy_axes.plot(epochs, validation, color=color, linewidth=1.6, label=label)
        accuracy_axes.plot(epochs, test, color=color, linewidth=1.1, linestyle=(0, (3, 2)), alpha=0.8)
        # The mark stands on the test curve too: that height is the accuracy reported.
        for curve in (validation, test):
            accuracy_axes.plot(epochs[best], curve[best], "o", color=color, markersize=6, markeredgecolor="white")

    positive = [record["loss"] for record in records if record["loss"] > 0]
    if len(positive) == len(records) and max(positive) > 30 * min(positive):
        loss_axes.set_yscale("log")
    _tidy(loss_axes, "Training loss")
    _tidy(accuracy_axes, "Accuracy")
    loss_axes.set_ylabel("loss")
    accuracy_axes.set_ylabel("accuracy")
    accuracy_axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    accuracies = [record[key] for record in records for key in ("val_accuracy", "test_accuracy")]
    # The first epochs climb steeply; leaving their foot out leaves room for the differences that matter.
    accuracy_axes.set_ylim(bottom=max(0.0, float(np.quantile(accuracies, 0.1)) - 0.1))
    for axes in (loss_axes, accuracy_axes):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
        axes.grid(color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)
    loss_axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK)
    accuracy_axes.legend(
        title="solid: validation, dashed: test, dot: best validation",
        loc="lower right",
        frameon=False,
        fontsize=8.5,
        title_fontsize=8.5,
        labelcolor=_INK,
        alignment="left",
    )
    _save(figure, path)


def plot_expert_load(loads: Tensor, path: str | Path, title: str | None = None) -> None:
    """Draw the share of the rows' gate mass that each expert of each layer carries, beside the even share.

    Args:
        loads: floating ``[L, E]``, rows sum to one.
        path: PNG file to write; its folder is made.
        title: heading; ``"Load of the experts"`` when omitted.

    Raises:
        ValueError: ``loads`` is not two-dimensional or is empty.
    """
    if loads.dim() != 2 or loads.numel() == 0:
        raise ValueError(f"loads: got shape {list(loads.shape)}, expected [layers, experts] with at least one of each")
    shares = loads.detach().float().cpu().numpy()
    num_layers, num_experts = shares.shape
    figure, panels = _figure(max(3.4, 0.9 + 0.34 * num_experts) * num_layers, 3.5, num_layers)
    top = 1.18 * max(float(shares.max()), 1.0 / num_experts)
    for layer, axes in enumerate(panels):
        bars = axes.bar(np.arange(num_experts), shares[layer], color=_BLUE, width=0.78, zorder=2)
        if num_experts <= 12:
            names = [f"{100 * share:.0f}" for share in shares[layer]]
            halo = [withStroke(linewidth=2.5, foreground="white")]
            axes.bar_label(bars, names, fontsize=8, color=_INK, padding=2, path_effects=halo, zorder=4)
        axes.axhline(1.0 / num_experts, color=_RED, zorder=3, linewidth=1.2, linestyle=(0, (4, 2)), label="even share")
        axes.set_ylim(0.0, top)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
        axes.set_xlabel("expert")
        _tidy(axes, f"Layer {layer + 1}")
    panels[0].set_ylabel("share of gate mass")
    panels[-1].legend(frameon=False, fontsize=8.5, labelcolor=_INK, loc="upper right", bbox_to_anchor=(1.0, 1.14))
    figure.suptitle(title or "Load of the experts", x=0.01, ha="left", fontsize=12, color=_INK)
    _save(figure, path)


def plot_variants(figures: dict[str, dict[str, Summary]], path: str | Path, *, ylabel: str = "test accuracy") -> None:
    """Draw one line for each graph over the variants of an experiment, mean and standard deviation over seeds.

    Args:
        figures: graph -> variant -> its accuracy in per cent; a variant that a graph lacks leaves a gap.
        path: PNG file to write; its folder is made.
        ylabel: what the figures are.

    Raises:
        ValueError: no figures.
    """
    if not any(figures.values()):
        raise ValueError("figures: got none, expected graph -> variant -> summary with at least one of each")
    variants = list(dict.fromkeys(name for of_graph in figures.values() for name in of_graph))
    place = {name: i for i, name in enumerate(variants)}
    figure, (axes,) = _figure(max(6.0, 1.1 * len(variants)), 3.8, 1)
    for i, (graph, of_graph) in enumerate(figures.items()):
        color, marker = _GROUP_COLORS[i % len(_GROUP_COLORS)], _MARKERS[i % len(_MARKERS)]
        # A little apart, so that bars of spread do not hide one another.
        x = [place[name] + 0.06 * (i - (len(figures) - 1) / 2) for name in of_graph]
        means, stds = ([getattr(summary, part) for summary in of_graph.values()] for part in ("mean", "std"))
        axes.errorbar(x, means, yerr=stds, color=color, marker=marker, capsize=3, linewidth=1.2, label=graph)
    axes.set_xticks(range(len(variants)), variants)
    axes.set_ylabel(f"{ylabel} (%)")
    _tidy(axes, "mean and standard deviation over seeds")
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def plot_table(
    lines: dict[str, tuple[dict[str, Summary], dict[str, Summary]]], path: str | Path, *, title: str = ""
) -> None:
    """Draw a table: for each line a group of points, ours filled with their spread over runs, the paper's hollow.

    Args:
        lines: name -> (ours, the paper's), each column -> figure in per cent.
        path: PNG file to write; its folder is made.
        title: heading.

    Raises:
        ValueError: no lines.
    """
    if not lines:
        raise ValueError("lines: got none, expected name -> (ours, the paper's) with at least one of each")
    columns = list(dict.fromkeys(column for ours, _ in lines.values() for column in ours))
    figure, (axes,) = _figure(max(6.0, 2.0 + 0.22 * len(lines) * (len(columns) + 2)), 4.2, 1)
    step = 0.8 / max(1, len(columns))
    for i, column in enumerate(columns):
        color, marker = _GROUP_COLORS[i % len(_GROUP_COLORS)], _MARKERS[i % len(_MARKERS)]
        places = {name: place + step * (i - (len(columns) - 1) / 2) for place, name in enumerate(lines)}
        ours = [(places[name], found[column]) for name, (found, _) in lines.items() if column in found]
        x, means, stds = zip(*((at, summary.mean, summary.std) for at, summary in ours), strict=True)
        axes.errorbar(x, means, yerr=stds, fmt=marker, color=color, capsize=2, markersize=5, linewidth=1, label=column)
        printed = [(places[name], found[column].mean) for name, (_, found) in lines.items() if column in found]
        for at, mean in printed:
            axes.plot(at, mean, marker, markersize=6, markerfacecolor="none", markeredgecolor=color, alpha=0.7)
    axes.set_xticks(range(len(lines)), [name.replace(", ", "\n") for name in lines], fontsize=8)
    axes.set_ylabel("test accuracy (%)")
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    _tidy(axes, title)
    legend = {"title": "filled: ours\nhollow: the paper", "title_fontsize": 8.5, "alignment": "left"}
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), **legend)
    _save(figure, path)


def plot_latency(rows: list[dict], path: str | Path, *, title: str = "") -> None:
    """Draw each model's median time over the batch size, and above it how far the slowest calls reach.

    Args:
        rows: those of ``latency.json``: ``title``, ``batch_size``, ``p50_ms``, ``p99_ms``.
        path: PNG file to write; its folder is made.
        title: heading.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("rows: got none, expected those of latency.json")
    figure, (axes,) = _figure(7.5, 4.2, 1)
    for i, name in enumerate(dict.fromkeys(row["title"] for row in rows)):
        own = sorted((row for row in rows if row["title"] == name), key=lambda row: row["batch_size"])
        sizes, medians, slowest = zip(*((row["batch_size"], row["p50_ms"], row["p99_ms"]) for row in own), strict=True)
        color, marker = (_BLUE, _GREEN, _ORANGE)[i % 3], _MARKERS[i % len(_MARKERS)]
        axes.plot(sizes, medians, color=color, marker=marker, markersize=6, linewidth=1.6, label=name)
        axes.fill_between(sizes, medians, slowest, color=color, alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="nodes at once", ylabel="milliseconds")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    _tidy(axes, title or "Latency")
    legend = {"title": "line: median\nshade: up to the 99th of 100", "title_fontsize": 8.5, "alignment": "left"}
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), **legend)
    _save(figure, path)


def plot_router_inputs(
    inputs: Tensor, top_expert: Tensor, labels: Tensor, path: str | Path, *, max_points: int = 2000, seed: int = 0
) -> None:
    """Draw one t-SNE map of the router's inputs twice: coloured by the expert with the largest gate, and by class.

    Where the two pictures agree, experts have specialised in classes; the paper shows this for its last layer.

    Args:
        inputs: floating ``[N, D]``, the rows that the router saw.
        top_expert: integer ``[N]``.
        labels: integer ``[N]``.
        path: PNG file to write; its folder is made.
        max_points: larger inputs are thinned to this many rows, drawn by ``seed``.
        seed: seed of the thinning and of t-SNE.

    Raises:
        ValueError: shapes that do not fit together, or no rows.
    """
    num_rows = inputs.size(0)
    if inputs.dim() != 2 or num_rows == 0:
        raise ValueError(f"inputs: got shape {list(inputs.shape)}, expected [rows, width] with at least one row")
    for name, values in (("top_expert", top_expert), ("labels", labels)):
        if values.shape != (num_rows,):
            raise ValueError(f"{name}: got shape {list(values.shape)}, expected [{num_rows}], one value a row")
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))[:max_points].sort().values
    points = _embed_in_plane(inputs.detach().float().cpu()[rows].numpy(), seed)
    figure, panels = _figure(10.5, 4.9, 2)
    for axes, values, name in zip(panels, (top_expert, labels), ("Expert", "Class"), strict=True):
        _scatter_groups(axes, points, values.cpu()[rows].numpy(), name.lower())
        _tidy(axes, f"{name} {'with the largest gate' if name == 'Expert' else 'of the node'}")
        axes.set(xticks=[], yticks=[], xlabel="t-SNE 1", ylabel="t-SNE 2")
    figure.suptitle("Inputs of the router", x=0.01, ha="left", fontsize=12, color=_INK)
    _save(figure, path)


def _embed_in_plane(rows: np.ndarray, seed: int) -> np.ndarray:
    if len(rows) == 1:  # no neighbour, no map
        return np.zeros((1, 2))
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if rows.shape[1] > 50:  # distances hardly change, and t-SNE's neighbour search becomes several times as fast
        rows = PCA(min(50, len(rows)), random_state=seed).fit_transform(rows)
    perplexity = min(30.0, (len(rows) - 1) / 3.0)
    # One thread: the same picture every time, and two cores gain little while busy ones cost minutes of waiting.
    with threadpool_limits(limits=1):
        # A random start: the PCA start divides by a standard deviation, which is zero when all rows are equal.
        return TSNE(perplexity=perplexity, init="random", random_state=seed).fit_transform(rows)


def _scatter_groups(axes: Axes, points: np.ndarray, values: np.ndarray, name: str) -> None:
    """One colour and marker a group: colours repeat after ten, then the marker tells groups apart."""
    size = float(np.clip(14000 / len(points), 9, 36))
    groups = np.unique(values)
    for position, group in enumerate(groups):
        chosen = points[values == group]
        axes.scatter(
            chosen[:, 0],
            chosen[:, 1],
            s=size,
            color=_GROUP_COLORS[position % len(_GROUP_COLORS)],
            marker=_MARKERS[position // len(_GROUP_COLORS) % len(_MARKERS)],
            linewidths=0.3,
            edgecolors="white",
            label=str(group),
        )
    axes.legend(
        title=name,
        frameon=False,
        fontsize=8.5,
        title_fontsize=8.5,
        labelcolor=_INK,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        ncols=1 + (len(groups) - 1) // 16,
        markerscale=float(6 / np.sqrt(size)),
        handletextpad=0.2,
        borderaxespad=0.2,
    )

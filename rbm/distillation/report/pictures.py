"""Plots of a run, written to its folder: training curves, the experts' load and, on request, the router's inputs."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from rbm.datasets.registry import graph_name
from rbm.distillation.registry import title_of
from rbm.distillation.report import CURVES, LOAD, REPRESENTATION
from rbm.distillation.report.experts import fit_components, last_router, mixture_of
from rbm.distillation.result import Distillation
from rbm.distillation.summary import chosen_epochs
from rbm.training.metrics import expert_loads
from rbm.training.run_files import list_file
from rbm.utils import figures
from rbm.utils.chunks import drawn_rows, rows_not_finite

_PHASE_COLORS = {"teacher": figures.ORANGE, "mlp": figures.GREEN, "rbm": figures.BLUE, "labels": figures.RED}
_LONGEST = 1e15


@torch.no_grad()
def write_plots(result: Distillation, records: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Plot the training curves and, for the mixture of :func:`~rbm.distillation.report.experts.mixture_of`, the
    experts' load.

    Returns:
        The files written: ``training.png`` and, if the run has a mixture, ``expert_load.png``.
    """
    files = [folder / CURVES]
    list_file(files[0])
    best_epochs = chosen_epochs(result.summary, records)
    titles = {phase: title_of(phase) for phase in best_epochs}
    plot_training_curves(records, files[0], best_epochs=best_epochs, titles=titles)
    if (method := mixture_of(result)) is None:
        return files
    files.append(folder / LOAD)
    list_file(files[1])
    student = result.students[method].eval()
    plot_expert_load(expert_loads(student, result.student_inputs(method)).cpu(), files[1])
    return files


def write_representation(result: Distillation, folder: Path) -> Path:
    """Write ``representation.png``: a t-SNE map of the inputs of the last router of a run's mixture.

    It takes seconds, and the report shows the same rows in the plane of their principal components, so only
    ``rbm report RUN --tsne`` writes it.

    Raises:
        ValueError: the run has no mixture.
    """
    if (method := mixture_of(result)) is None:
        trained = ", ".join(result.students)
        raise ValueError(f"tsne: no student of the run is a mixture (got {trained}), expected rbm or moe among them")
    path = folder / REPRESENTATION
    list_file(path)
    plot_representation(result, method, path)
    return path


def plot_representation(result: Distillation, method: str, path: str | Path) -> None:
    """Call :func:`plot_router_inputs` for the last router of a run's student ``method``."""
    rows, experts = last_router(result, method)
    name, layers = graph_name(result.summary["dataset"]), len(result.students[method].layers)
    title = f"{name}, {title_of(method)}: what the router of layer {layers} of {layers} sees"
    plot_router_inputs(rows, experts, result.split.graph.y.cpu(), path, seed=result.config.seed, title=title)


def plot_training_curves(
    records: list[dict],
    path: str | Path,
    *,
    best_epochs: dict[str, int] | None = None,
    titles: dict[str, str] | None = None,
) -> None:
    """Plot loss, validation accuracy and test accuracy of every phase over its epochs; dots mark the selected epochs.

    Args:
        records: lines of ``metrics.jsonl``: ``phase`` (``"teacher"``, ``"mlp"``, ``"rbm"``, ...), ``epoch``, ``loss``,
            ``val_accuracy``, ``test_accuracy`` (accuracies in [0, 1]); other keys are ignored.
        path: PNG file to write; its folder is created.
        best_epochs: the selected epoch of each phase. Other phases use the last epoch with the highest validation
            accuracy.
        titles: names of the phases in the legend.

    Raises:
        ValueError: no records.
    """
    if not records:
        raise ValueError("records: got none, expected the lines of metrics.jsonl; train for at least one epoch first")
    figure, (loss_axes, accuracy_axes) = figures.new(10.5, 4.0, 2)
    others, marked = iter(figures.GROUP_COLORS * len(records)), []
    for phase in dict.fromkeys(record["phase"] for record in records):
        color = _PHASE_COLORS.get(phase) or next(others)
        name = (titles or {}).get(phase, phase)
        lines = sorted((record for record in records if record["phase"] == phase), key=lambda record: record["epoch"])
        epochs, loss, validation, test = (
            np.array([line[key] for line in lines], dtype=float)
            for key in ("epoch", "loss", "val_accuracy", "test_accuracy")
        )
        best = len(lines) - 1 - int(np.argmax(validation[::-1]))
        if phase in (best_epochs or {}):
            best = int(np.flatnonzero(epochs == best_epochs[phase])[0])
        loss_axes.plot(epochs, loss, color=color, linewidth=1.6, label=name)
        loss_axes.plot(epochs[best], loss[best], "o", color=color, markersize=6, markeredgecolor="white", clip_on=False)
        label = f"{name}: test {test[best]:.1%} at epoch {epochs[best]:.0f}"
        accuracy_axes.plot(epochs, validation, color=color, linewidth=1.6, label=label)
        accuracy_axes.plot(epochs, test, color=color, linewidth=1.1, linestyle=(0, (3, 2)), alpha=0.8)
        # The test curve is marked too, since its value there is the reported accuracy.
        marked += [validation[best], test[best]]
        for curve in (validation, test):
            accuracy_axes.plot(
                epochs[best], curve[best], "o", color=color, markersize=6, markeredgecolor="white", clip_on=False
            )

    positive = [record["loss"] for record in records if record["loss"] > 0]
    if len(positive) == len(records) and max(positive) > 30 * min(positive):
        loss_axes.set_yscale("log")
    figures.tidy(loss_axes, "Training loss")
    figures.tidy(accuracy_axes, "Accuracy")
    loss_axes.set_ylabel("loss")
    accuracy_axes.set_ylabel("accuracy")
    accuracies = [record[key] for record in records for key in ("val_accuracy", "test_accuracy")]
    # Accuracy rises steeply in the first epochs; cutting off its start leaves room for the differences that matter. The
    # axis includes every mark: marks are not clipped, and the layout would shrink the axes for one far below them.
    lowest = min(float(np.quantile(accuracies, 0.1)) - 0.1, min(marked) - 0.01)
    figures.in_percent(accuracy_axes.yaxis, lowest, max(accuracies) + 0.01)
    for axes in (loss_axes, accuracy_axes):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
        figures.gridlines(axes)
    loss_axes.legend(frameon=False, fontsize=8.5, labelcolor=figures.INK)
    accuracy_axes.legend(
        title="solid: validation, dashed: test, dot: best validation",
        loc="lower right",
        facecolor="white",
        edgecolor="none",
        framealpha=0.9,
        fontsize=8.5,
        title_fontsize=8.5,
        labelcolor=figures.INK,
        alignment="left",
    )
    figures.save(figure, path)


def plot_expert_load(loads: Tensor, path: str | Path) -> None:
    """Plot each expert's share of the gate mass in each layer, with a line for the even share.

    Args:
        loads: floating ``[L, E]``, rows sum to one.
        path: PNG file to write; its folder is created.

    Raises:
        ValueError: ``loads`` is not two-dimensional or is empty.
    """
    if loads.dim() != 2 or loads.numel() == 0:
        raise ValueError(f"loads: got shape {list(loads.shape)}, expected [layers, experts] with at least one of each")
    shares = loads.detach().float().cpu().numpy()
    num_layers, num_experts = shares.shape
    figure, panels = figures.new(max(3.4, 0.9 + 0.34 * num_experts) * num_layers, 3.5, num_layers)
    top = 1.05 * max(float(shares.max()), 1.0 / num_experts)
    for layer, axes in enumerate(panels):
        axes.bar(np.arange(num_experts), shares[layer], color=figures.BLUE, width=0.78, zorder=2)
        even = {"color": figures.RED, "linewidth": 1.2, "linestyle": (0, (4, 2)), "label": "even share"}
        axes.axhline(1.0 / num_experts, zorder=3, **even)
        figures.in_percent(axes.yaxis, 0.0, top)
        if num_experts <= 12:  # shares are below the axis, where no line crosses them
            names = [f"{expert}\n{100 * share:.1f}" for expert, share in enumerate(shares[layer])]
            axes.set_xticks(range(num_experts), names)
            axes.tick_params(axis="x", labelsize=8)
            axes.set_xlabel("expert; below it: its share (%)")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
            axes.set_xlabel("expert")
        figures.tidy(axes, f"Layer {layer + 1}")
    panels[0].set_ylabel("share of gate mass")
    place = {"loc": "upper right", "bbox_to_anchor": (1.0, 1.14)}
    panels[-1].legend(frameon=False, fontsize=8.5, labelcolor=figures.INK, **place)
    figure.suptitle("Load of the experts", x=0.01, ha="left", fontsize=12, color=figures.INK)
    figures.save(figure, path)


def plot_router_inputs(
    inputs: Tensor,
    top_expert: Tensor,
    labels: Tensor,
    path: str | Path,
    *,
    max_points: int = 1000,
    seed: int = 0,
    title: str = "What the router sees",
) -> None:
    """Plot one t-SNE map of the router's inputs twice: coloured by the expert with the largest gate, and by class.

    Where the two pictures agree, experts have specialised in classes; the paper shows this for its last layer. Experts
    and classes have different colours and markers.

    Args:
        inputs: floating ``[N, D]``, inputs of the router.
        top_expert: integer ``[N]``.
        labels: integer ``[N]``.
        path: PNG file to write; its folder is created.
        max_points: maximum number of points; of more rows, a random sample is drawn.
        seed: seed of the sample and of t-SNE.
        title: heading.

    Raises:
        ValueError: the shapes do not match, there are no rows, or a row is not finite.
    """
    num_rows = inputs.size(0)
    if inputs.dim() != 2 or num_rows == 0:
        raise ValueError(f"inputs: got shape {list(inputs.shape)}, expected [rows, width] with at least one row")
    for name, values in (("top_expert", top_expert), ("labels", labels)):
        if values.shape != (num_rows,):
            raise ValueError(f"{name}: got shape {list(values.shape)}, expected [{num_rows}], one value a row")
    if len(odd := rows_not_finite(inputs.detach())):
        raise ValueError(
            f"inputs: {len(odd)} of {num_rows} rows hold NaN or infinity (the first is row {int(odd[0])}), expected"
            " finite numbers; features of a smaller scale help, such as (x - mean) / std"
        )
    rows = drawn_rows(num_rows, max_points, seed)
    points = _embed_in_plane(inputs.detach().float().cpu()[rows].numpy(), seed)
    figure, panels = figures.new(10.5, 5.2, 2)
    for axes, values, is_expert in zip(panels, (top_expert, labels), (True, False), strict=True):
        _scatter_groups(axes, points, values.cpu()[rows].numpy(), is_expert=is_expert)
        figures.tidy(axes, "By expert with the largest gate" if is_expert else "By class of the node")
        axes.set_aspect("equal", adjustable="datalim")
        axes.set(xlabel="first t-SNE coordinate (no unit)", ylabel="second t-SNE coordinate (no unit)")
        figures.gridlines(axes)
    shown = f"{len(rows):,} of {num_rows:,} nodes" if len(rows) < num_rows else f"all {num_rows:,} nodes"
    explanation = "Where both maps agree, experts have specialised in classes; distances between groups say little."
    figure.supxlabel(f"{shown}. {explanation}", fontsize=9, color=figures.INK)
    figures.set_title(figure, title)
    figures.save(figure, path)


def _embed_in_plane(rows: np.ndarray, seed: int) -> np.ndarray:
    if len(rows) == 1:  # t-SNE needs neighbours
        return np.zeros((1, 2))
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if (largest := np.abs(rows).max()) > _LONGEST:  # squares would overflow; the map does not depend on the scale
        rows = rows * (_LONGEST / largest)
    if rows.shape[1] > 50:  # distances hardly change, and t-SNE's neighbour search becomes several times faster
        _, rows = fit_components(rows, min(50, len(rows)), random_state=seed)
    perplexity = min(30.0, (len(rows) - 1) / 3.0)
    # One thread makes the picture reproducible. Two cores gain little, and busy cores can cost minutes.
    with threadpool_limits(limits=1):
        # A random start: the PCA start divides by a standard deviation, which is zero when all rows are equal.
        return TSNE(perplexity=perplexity, init="random", random_state=seed).fit_transform(rows)


def _scatter_groups(axes: Axes, points: np.ndarray, values: np.ndarray, *, is_expert: bool) -> None:
    """Draw each group with its own colour and marker. Both change with each expert; for classes, the marker changes
    after ten colours.
    """
    size = float(np.clip(14000 / len(points), 9, 36))
    groups, marks = np.unique(values), len(figures.MARKERS)
    colors = figures.EXPERT_COLORS if is_expert else figures.GROUP_COLORS
    for position, group in enumerate(groups):
        chosen = points[values == group]
        # Experts start with the square: seven colours and markers, shifted by one after seven. Classes start with the
        # circle.
        turn = 1 + position + position // marks if is_expert else position // len(colors)
        axes.scatter(
            chosen[:, 0],
            chosen[:, 1],
            s=size,
            color=colors[position % len(colors)],
            marker=figures.MARKERS[turn % marks],
            linewidths=0.3,
            edgecolors="white",
            label=str(group) if group >= 0 else "no label",
        )
    axes.legend(
        title="expert" if is_expert else "class",
        frameon=False,
        fontsize=8.5,
        title_fontsize=8.5,
        labelcolor=figures.INK,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        ncols=1 + (len(groups) - 1) // 16,
        markerscale=float(6 / np.sqrt(size)),
        handletextpad=0.2,
        borderaxespad=0.2,
    )

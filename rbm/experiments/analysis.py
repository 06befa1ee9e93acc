"""The paper's other measurements: sizes and latencies of students, and whether experts specialise."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from rbm.config import Config
from rbm.config.presets import preset_config
from rbm.datasets import check_files, dataset_name, load_dataset
from rbm.distillation.distill import distill
from rbm.distillation.registry import title_of
from rbm.distillation.result import Distillation
from rbm.experiments.tables import dataset_names
from rbm.training.metrics import purity
from rbm.utils.arguments import usable_device
from rbm.utils.environment import today
from rbm.utils.files import check_writable, write_csv, write_text

STUDIES = ("complexity", "representation")
COUNTED = ("mlp", "ensemble", "moe", "rbm")
MIXTURES = ("moe", "rbm")
_COLUMNS = ("dataset", "method", "parameters", "active_parameters", "one_node_ms", "all_nodes_ms")
_MADE = ("nodes", "date", "torch", "threads", "device")
_FORMULAS = """\
Of a layer from F to N numbers, with E experts of which k are active and an address of H numbers in the MoE's router:

| | total | active |
|---|---|---|
| MLP | N(F + 1) | N(F + 1) |
| ensemble of M | M N(F + 1) | M N(F + 1) |
| MoE | E N(F + 1) + H(F + 1) + E H + 2 | k N(F + 1) + H(F + 1) + E H + 2 |
| RbM | E N(F + 1) + 2 E F + 1 | k (N(F + 1) + F) + E F + 1 |

(RbM without input attention: E F and k F less.)
"""


def study(
    name: str,
    datasets: Sequence[str],
    folder: Path,
    *,
    command: str,
    root: str | None = None,
    seed: int = 0,
    setting: str = "transductive",
    cache: Path | str | None = None,
    device: str = "cpu",
    console: Console | Literal["auto"] | None = None,
) -> Path:
    """Write ``<name>.md`` and its data to a folder: a CSV file (``complexity``) or pictures (``representation``).

    Args:
        name: one of :data:`STUDIES`.
        datasets: names of graphs.
        folder: output folder; created if missing.
        command: the command that the page says it was made by.
        root: folder of the datasets.
        seed: seed of splits and training.
        setting: transductive or inductive.
        cache: folder of cached teachers and encodings.
        device: device on which models are trained and timed.
        console: where progress is shown; ``"auto"`` as in :func:`rbm.distill`.

    Returns:
        The path of the page.

    Raises:
        ValueError: an unknown name, of the study or of a graph, or a device that is not usable.
        FileNotFoundError: a graph's files are missing; both are raised before anything is trained.
    """
    if name not in STUDIES:
        raise ValueError(f"study is {name!r}, expected one of {', '.join(STUDIES)}")
    device = usable_device(device)
    for dataset in datasets:  # before the first one is trained
        check_files(dataset_name(dataset), root)
    check_writable(f"folder of the study {folder}", folder, "give another file by --out, or allow it")
    folder.mkdir(parents=True, exist_ok=True)
    complexity, parts, names = name == "complexity", [], dataset_names(datasets)
    for dataset in datasets:
        config = preset_config("clean", dataset, setting).updated({"seed": seed})
        result = distill(
            load_dataset(dataset, root, seed=seed).to(device),
            config=_short(config) if complexity else config,
            methods=COUNTED if complexity else MIXTURES,
            labels_alone=False,
            cache=cache,
            measure_latency=complexity,
            console=console,
        )
        parts.extend(complexity_rows(dataset, result) if complexity else _pictures(names[dataset], result, folder))
    if complexity:
        write_csv(folder / "complexity.csv", parts, (*_COLUMNS, *_MADE))
        title, text = "Sizes and speed of students", f"{complexity_table(parts)}\n{_FORMULAS}"
    else:
        title, text = "What the last router sees, by expert and by class", "\n".join(parts)
    page = folder / f"{name}.md"
    write_text(page, f"# {title}\n\n`{command}`\n\n{text}")
    return page


def _short(config: Config) -> Config:
    """Train for one epoch only: neither parameter counts nor times depend on how well a student is trained."""
    once = {"max_epochs": 1, "min_epochs": 0}
    mixture = {**once, "pretrain_epochs": 0}
    return config.updated({"teacher": once, "mlp": once, "moe": mixture, "rbm": mixture})


def complexity_rows(dataset: str, result: Distillation) -> list[dict[str, Any]]:
    """A row for the teacher and for each student: parameters, parameters used per node, and milliseconds."""
    made = {
        "nodes": result.summary["nodes"],
        "date": today(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": str(result.split.graph.x.device),
    }
    rows = []
    for method in ("teacher", *result.students):
        found = {**result.summary[method], **result.timings[method]}
        figures = {name: found[name] for name in _COLUMNS[2:]}
        rows.append({"dataset": dataset, "method": method, **figures, **made})
    return rows


def complexity_table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of :func:`complexity_rows`."""
    lines = ["| | | parameters | active | one node (ms) | all nodes (ms) |", "|---|---|---:|---:|---:|---:|"]
    for row in rows:
        cells = (row["dataset"], title_of(row["method"]), f"{row['parameters']:,}", f"{row['active_parameters']:,}")
        lines.append(f"| {' | '.join(cells)} | {row['one_node_ms']:.3f} | {row['all_nodes_ms']:.1f} |")
    return "\n".join(lines) + "\n"


def _pictures(name: str, result: Distillation, folder: Path) -> list[str]:
    """Draw the pictures of the graph with this ``name`` into a folder, and return the lines of the page."""
    from rbm.distillation.report.experts import last_router
    from rbm.distillation.report.pictures import plot_representation

    labels, parts = result.split.graph.y.cpu(), []
    stem = re.sub(r"[^\w.-]", "_", name)  # a name may be a path, and a link in Markdown ends at a space
    for method in result.students:
        _, experts = last_router(result, method)
        file = f"representation-{stem}-{method}.png"
        plot_representation(result, method, folder / file)
        share, chance = purity(experts, labels), purity(torch.zeros_like(experts), labels)
        parts += [
            f"## {title_of(method)}, {name}",
            "",
            f"The top expert alone tells the class of {share:.1%} of the nodes (the largest class has {chance:.1%}).",
            "",
            f"![{name}, {method}]({file})",
            "",
        ]
    return parts

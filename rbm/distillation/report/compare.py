"""Comparison of several runs: their figures in one table, their models in one chart, and the settings that differ."""

from collections.abc import Sequence
from typing import Any

import yaml

from rbm.distillation.registry import title_of
from rbm.distillation.report import charts
from rbm.distillation.report.parts import Chart, Grid, Section
from rbm.distillation.report.run_data import TEACHER, RunData
from rbm.distillation.report.svg import MARKERS, SERIES
from rbm.distillation.report.tables import count, percent, share
from rbm.distillation.sentences import listed

_EMPTY = ("", -1)


def names(runs: Sequence[RunData]) -> list[str]:
    """Names of the runs: their folders, with as much of the path as is needed to distinguish them."""
    paths = [run.folder.resolve() for run in runs]
    for parts in range(1, max(len(path.parts) for path in paths)):
        found = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(found)) == len(found):
            return found
    return [str(path) for path in paths]


def headline(runs: Sequence[RunData]) -> str:
    """One sentence about the runs: which kept student has the highest accuracy."""
    called = names(runs)
    place = max(range(len(runs)), key=lambda i: runs[i].accuracy[runs[i].kept][0])
    best = runs[place]
    text = f"{title_of(best.kept)} of {called[place]} has the highest accuracy of {len(runs)} kept students"
    if sum(run.accuracy[run.kept] == best.accuracy[best.kept] for run in runs) > 1:
        text = f"{len(runs)} kept students, several of which have the highest accuracy"
    text = f"{text}, {percent(best.accuracy[best.kept][0])}"
    graphs = {run.name for run in runs}
    if len(graphs) > 1:
        return f"{text}. The runs have different graphs or settings, so their accuracies are not comparable."
    return f"{text}."


def sections(runs: Sequence[RunData]) -> list[Section]:
    """The sections that compare all runs."""
    called = names(runs)
    everywhere = dict(zip(called, runs, strict=True))
    order = [name for name, _ in sorted(everywhere.items(), key=lambda pair: -pair[1].accuracy[pair[1].kept][0])]
    kept = {name: run.accuracy[run.kept] for name, run in everywhere.items()}
    styles = {
        name: (f"{name}: {title_of(run.kept)}", SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)])
        for i, (name, run) in enumerate(everywhere.items())
    }
    nodes = {run.nodes for run in runs}
    low = kept[order[0]][1]
    reach = [name for name in order[1:] if kept[name][2] >= low]
    caption = f"{order[0]} is ahead, and no other interval overlaps its own."
    if alike := [name for name in order[1:] if kept[name] == kept[order[0]]]:
        caption = f"{listed([order[0], *alike])} have the same accuracy."
    elif reach:
        caption = f"{order[0]} is ahead; the interval of {listed(reach)} overlaps its own."
    made = [
        Chart(
            "Kept students, with 95 % intervals",
            charts.accuracy_chart(kept, styles, "test nodes", "all-accuracy"),
            caption
            if len(nodes) == 1
            else f"{caption} The runs have {' and '.join(f'{n:,}' for n in sorted(nodes))} test nodes.",
        )
    ]
    points = {
        name: (run.milliseconds(run.kept), *run.accuracy[run.kept])
        for name, run in everywhere.items()
        if run.milliseconds(run.kept)
    }
    if points:
        chart = charts.latency_chart(points, styles, "all-latency")
        made.append(Chart("Accuracy over time for one node", chart, "Up and to the left is better."))
    return [
        Section("together", "Side by side", made, [_table(everywhere), *_models(everywhere)]),
        Section("settings", "Settings that differ", grids=[_differences(everywhere)]),
    ]


def _table(runs: dict[str, RunData]) -> Grid:
    """One row per run."""
    heads = (
        "Graph",
        "Kept",
        "Accuracy (%)",
        "95 % interval",
        "Teacher (%)",
        "ECE (%)",
        "Used",
        "One node (ms)",
        "Dead",
    )
    rows = []
    for name, run in runs.items():
        middle, low, high = run.accuracy[run.kept]
        ms, used = run.milliseconds(run.kept), run.summary[run.kept]["active_parameters"]
        experts = run.figures["experts"]
        dead = sum(len(layer["dead"]) for layer in experts["layers"]) if experts else -1
        teacher = run.accuracy.get(TEACHER)
        rows.append(
            [
                (name, name),
                (run.name, run.name),
                (title_of(run.kept), title_of(run.kept)),
                (f"{middle:.2f}", middle),
                (f"{low:.1f} to {high:.1f}", low),
                (f"{teacher[0]:.2f}", teacher[0]) if teacher else _EMPTY,
                share(run.figures["models"][run.kept]["ece"]),
                (count(used), used or -1),
                (f"{ms:.3g}", ms) if ms else _EMPTY,
                (f"{dead}", dead) if experts else _EMPTY,
            ]
        )
    note = "Used: parameters that one prediction uses. Dead: experts of the run's mixture that no node uses."
    numbers = [(head, head not in ("Graph", "Kept")) for head in heads]
    return Grid([("Run", False), *numbers], rows, note, True)


def _models(runs: dict[str, RunData]) -> list[Grid]:
    """Accuracy of every model of every run; empty if the runs trained only the kept students."""
    models = list(dict.fromkeys(model for run in runs.values() for model in run.models))
    rows = []
    for model in models:
        found = [run.accuracy.get(model) for run in runs.values()]
        cells = [(f"{accuracy[0]:.2f}", accuracy[0]) if accuracy else _EMPTY for accuracy in found]
        rows.append([(title_of(model), title_of(model)), *cells])
    heads = [("Test accuracy (%)", False), *((name, True) for name in runs)]
    return [Grid(heads, rows, "One column per run.", True)]


def _differences(runs: dict[str, RunData]) -> Grid:
    """One row per setting that differs between runs."""
    settings = {name: _flat(yaml.safe_load(run.config.to_yaml())) for name, run in runs.items()}
    keys = list(dict.fromkeys(key for flat in settings.values() for key in flat))
    rows = []
    for key in keys:
        values = [str(flat.get(key, "")) for flat in settings.values()]
        if len(set(values)) > 1 and key not in ("dataset", "root"):
            rows.append([(key, key), *((value, value) for value in values)])
    note = "All other settings are the same." if rows else "All settings are the same."
    return Grid([("Setting", False), *((name, True) for name in runs)], rows, note, True)


def _flat(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found

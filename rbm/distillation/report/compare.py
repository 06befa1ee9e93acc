"""Comparison of several runs: their figures in one table, their models in one chart, and the settings that differ."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rbm.config import flat
from rbm.distillation.registry import title_of
from rbm.distillation.report import charts
from rbm.distillation.report.parts import Cell, Chart, Grid, Section, percent
from rbm.distillation.report.run_data import TEACHER, RunData
from rbm.distillation.report.svg import MARKERS, SERIES
from rbm.distillation.sentences import listed


def names(runs: Sequence[RunData]) -> list[str]:
    """Names of the runs: their folders, with as much of the path as is needed to distinguish them."""
    paths = [run.folder.resolve() for run in runs]
    for parts in range(1, max(len(path.parts) for path in paths)):
        found = [str(Path(*path.parts[-parts:])) for path in paths]
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
        # The name is not first: Matplotlib leaves labels that begin with an underscore out of legends.
        name: (f"{title_of(run.kept)} of {name}", SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)])
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
        Section("together", "Side by side", made, [_table(everywhere), _models(everywhere)]),
        Section("settings", "Settings that differ", grids=[_differences(everywhere)]),
    ]


def _table(runs: dict[str, RunData]) -> Grid:
    """One row per run."""
    heads = ("Accuracy (%)", "95 % interval", "Teacher (%)", "ECE (%)", "Used", "One node (ms)", "Dead")
    rows = []
    for name, run in runs.items():
        middle, low, high = run.accuracy[run.kept]
        experts, teacher = run.figures["experts"], run.accuracy.get(TEACHER)
        dead = sum(len(layer["dead"]) for layer in experts["layers"]) if experts else None
        rows.append(
            [
                *map(Cell.text, (name, run.name, title_of(run.kept))),
                Cell.number(middle, ".2f"),
                Cell.interval(low, high),
                Cell.number(teacher[0] if teacher else None, ".2f"),
                Cell.share(run.figures["models"][run.kept]["ece"]),
                Cell.parameters(run.summary[run.kept]["active_parameters"]),
                Cell.number(run.milliseconds(run.kept), ".3g"),
                Cell.number(dead, "d"),
            ]
        )
    note = "Used: parameters that one prediction uses. Dead: experts of the run's mixture that no node uses."
    columns = [*((head, False) for head in ("Run", "Graph", "Kept")), *((head, True) for head in heads)]
    return Grid(columns, rows, note, True)


def _models(runs: dict[str, RunData]) -> Grid:
    """Accuracy of every model of every run."""
    models = list(dict.fromkeys(model for run in runs.values() for model in run.models))
    rows = []
    for model in models:
        accuracies = [run.accuracy.get(model, (None,))[0] for run in runs.values()]
        rows.append([Cell.text(title_of(model)), *(Cell.number(accuracy, ".2f") for accuracy in accuracies)])
    heads = [("Test accuracy (%)", False), *((name, True) for name in runs)]
    return Grid(heads, rows, "One column per run.", True)


def _differences(runs: dict[str, RunData]) -> Grid:
    """One row per setting that differs between runs."""
    settings, rows = [flat(asdict(run.config)) for run in runs.values()], []
    for key in settings[0]:
        values = [str(own[key]) for own in settings]
        if len(set(values)) > 1 and key not in ("dataset", "root"):
            rows.append([Cell.text(key), *map(Cell.text, values)])
    note = "All other settings are the same." if rows else "All settings are the same."
    return Grid([("Setting", False), *((name, True) for name in runs)], rows, note, True)

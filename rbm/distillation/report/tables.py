"""The tables of a report."""

from typing import Any

from rbm.distillation.registry import title_of
from rbm.distillation.report.parts import Cell, Grid, Section, percent
from rbm.distillation.report.run_data import SIZES, TEACHER, RunData

_LEAST = 10  # nodes that a group must have to be named in a sentence


def models(run: RunData) -> Grid:
    """One row per model."""
    order = sorted(run.models, key=lambda model: -run.accuracy[model][0])
    columns = ("Accuracy (%)", "95 % interval", "Validation (%)", "Macro F1 (%)", "Parameters used", "One node (ms)")
    rows = []
    for model in order:
        middle, low, high = run.accuracy[model]
        seen, own, ms = run.figures["models"].get(model), run.summary[model], run.milliseconds(model)
        rows.append(
            [
                Cell.text(title_of(model)),
                Cell.number(middle, ".2f"),
                Cell.interval(low, high),
                Cell.share(own["val_accuracy"]),
                Cell.share(seen["macro_f1"] if seen else None),
                Cell.parameters(own["active_parameters"]),
                Cell.number(ms, ".3g"),
            ]
        )
    note = (
        f"Accuracy on {run.nodes:,} {run.where} at the epoch with the best validation accuracy, with Wilson intervals."
        " Macro F1 weights all classes equally. The kept student, chosen on validation nodes, is bold."
    )
    return Grid([("Model", False), *((name, True) for name in columns)], rows, note, True, order.index(run.kept))


def classes(run: RunData, recalls: dict[str, list[float | None]]) -> Grid:
    """One row per class."""
    matrix = run.figures["models"][run.kept]["confusion"]
    given = [sum(row[j] for row in matrix) for j in range(len(matrix))]
    heads = [("Class", True), ("Test nodes", True), *((f"{title_of(model)}, recall (%)", True) for model in recalls)]
    heads.append((f"{title_of(run.kept)}, precision (%)", True))
    rows = []
    for i, nodes in enumerate(run.figures["support"]):
        precision = 100 * matrix[i][i] / given[i] if given[i] else None
        shares = [*(values[i] for values in recalls.values()), precision]
        rows.append([Cell.number(i, "d"), Cell.number(nodes), *(Cell.number(value, ".1f") for value in shares)])
    note = (
        "Recall: share of the class that is predicted correctly. Precision: share of correct predictions of the class."
    )
    return Grid(heads, rows, note, True)


def disagreements(found: dict[str, Any]) -> Grid:
    """The nodes on which student and teacher disagree."""
    heads = ("Node", "Class", "Teacher", "Confidence (%)", "Student", "Confidence (%)", "Degree", "Homophily (%)")
    rows = []
    for node, label, theirs, their_sure, ours, our_sure, degree, homophily in found["rows"]:
        rows.append(
            [
                Cell.number(node, "d"),
                Cell.number(label, "d"),
                Cell(f"{'✓ ' if theirs == label else ''}{theirs}", theirs),
                Cell.share(their_sure, 1),
                Cell(f"{'✓ ' if ours == label else ''}{ours}", ours),
                Cell.share(our_sure, 1),
                Cell.number(degree, "d"),
                Cell.share(homophily, 0),
            ]
        )
    shown = "All nodes on which they disagree"
    if len(rows) < found["count"]:
        shown = f"The {len(rows):,} of {found['count']:,} such nodes on which the student is most confident"
    note = (
        f"{shown}; ✓ marks a correct prediction. Click a heading to sort. Homophily: share of neighbours of the node's"
        " own class."
    )
    return Grid([(head, True) for head in heads], rows, note, True)


def layers(found: dict[str, Any]) -> Grid:
    """One row per layer of a mixture."""
    heads = ("Layer", "Inputs", "Outputs", "Experts", "Dead", "Entropy (nats)", "Maximum", "Effective", "Purity (%)")
    rows = []
    for number, layer in enumerate(found["layers"], 1):
        cells = (number, layer["in"], layer["out"], len(layer["load"]), len(layer["dead"]))
        rows.append(
            [
                *map(Cell.number, cells),
                Cell.number(layer["entropy"], ".3f"),
                Cell.number(layer["most_entropy"], ".3f"),
                Cell.number(layer["effective"], ".2f"),
                Cell.share(layer["purity"], 1),
            ]
        )
    note = (
        "Dead: experts that no node uses. Entropy: of the load. Effective: its exponential, the number of equally"
        " loaded experts with the same entropy. Purity: share of nodes whose class is the most frequent one of their"
        " top expert."
    )
    return Grid([(head, True) for head in heads], rows, note)


def latencies(found: dict[str, Any]) -> Grid:
    """The measurements of ``rbm latency``."""
    heads = [("Model", False), *((head, True) for head in ("Nodes at once", "p50 (ms)", "p95 (ms)", "p99 (ms)"))]
    rows = []
    for row in found["rows"]:
        times = [Cell.number(row[name], ".3g") for name in ("p50_ms", "p95_ms", "p99_ms")]
        rows.append([Cell.text(row["title"]), Cell.number(row["batch_size"]), *times])
    note = f"rbm latency, {found['device']}, {threads(found)}, {found['date']}; p95: 95 of 100 calls are faster."
    return Grid(heads, rows, note, True)


def threads(found: dict[str, Any]) -> str:
    """Text of the number of threads of a measurement."""
    return "1 thread" if found["threads"] == 1 else f"{found['threads']} threads"


def groups_sentence(run: RunData, groups: dict[str, Any], part: str) -> str:
    """Sentence on the groups where the kept student is best, worst, and farthest from its teacher."""
    right = groups["right"]
    rates = {
        name: 100 * right[run.kept][i] / nodes
        for i, (name, nodes) in enumerate(zip(groups["names"], groups["nodes"], strict=True))
        if nodes >= _LEAST
    }
    if len(rates) < 2:
        return f"Nearly all nodes are in one group of {part}, so there is nothing to compare."
    unit = (lambda name: f"{name} neighbours") if part == "degree" else (lambda name: f"{name} % homophily")
    worst, best = min(rates, key=rates.get), max(rates, key=rates.get)
    among = f"among groups with {_LEAST} nodes or more"
    sentence = f"{title_of(run.kept)} is equally good everywhere ({percent(rates[best])} correct), {among}."
    if best != worst:
        sentence = (
            f"{title_of(run.kept)} is best at {unit(best)} ({percent(rates[best])} correct) and worst at {unit(worst)}"
            f" ({percent(rates[worst])}), {among}."
        )
    if TEACHER in right:
        places = [i for i, name in enumerate(groups["names"]) if name in rates]
        gaps = {i: 100 * (right[run.kept][i] - right[TEACHER][i]) / groups["nodes"][i] for i in places}
        widest = max(gaps, key=lambda i: abs(gaps[i]))
        side = "ahead of" if gaps[widest] > 0 else "behind"
        sentence += (
            f" It is farthest {side} its teacher at {unit(groups['names'][widest])}, by {abs(gaps[widest]):.1f} points."
            if gaps[widest]
            else " Its teacher is as good as it in each of them."
        )
    if groups["left_out"]:
        sentence += f" {groups['left_out']:,} nodes without a labelled neighbour are not shown."
    return sentence


def configuration(run: RunData) -> Section:
    """Settings, versions and phases."""
    made = run.figures["made"]
    rows = [(name, str(made[name])) for name in ("date", "python", "machine", "device", "threads")]
    rows += made["versions"].items()
    sizes = [(name, f"{run.summary[name]:,}") for name in SIZES]
    timed = [(title_of(name), f"{phase['seconds']:.1f} s") for name, phase in run.timings.items() if "seconds" in phase]
    phases = sorted(timed, key=lambda phase: phase[0] == "total")  # the total last, after the report
    grids = [
        Grid([(head, False), ("", True)], [[Cell.text(name), Cell.text(value)] for name, value in pairs])
        for head, pairs in (("Made with", rows), ("Graph", sizes), ("Time of a phase", phases))
    ]
    return Section("configuration", "Settings and versions", grids=grids, code=run.config.to_yaml())

"""The sections of a report: charts and tables, each chart with a sentence that explains it."""

from rbm.distillation.registry import title_of
from rbm.distillation.report import charts, tables
from rbm.distillation.report.parts import Cell, Chart, Grid, Section, percent
from rbm.distillation.report.run_data import TEACHER, RunData
from rbm.distillation.sentences import listed, verdict_sentences
from rbm.distillation.summary import chosen_epochs, short_count
from rbm.distillation.verdict import Comparison


def headline(run: RunData) -> str:
    """One sentence about the run."""
    middle, low, high = run.accuracy[run.kept]
    text = (
        f"{title_of(run.kept)} is kept: it classifies {percent(middle)} of {run.nodes:,} {run.where} correctly"
        f" (95 % interval {low:.1f} to {high:.1f})"
    )
    if TEACHER in run.accuracy:
        points = round(middle - run.accuracy[TEACHER][0], 1)
        text += f", {abs(points)} points {'more' if points > 0 else 'less'} than" if points else ", as many as"
        text += " its teacher"
    ours, theirs = run.milliseconds(run.kept), run.milliseconds(TEACHER)
    if ours and theirs:
        ratio = theirs / ours
        share_of_time = f"1/{ratio:,.0f} of" if ratio >= 1.5 else f"{1 / ratio:.1f} times"
        text += f", and needs {share_of_time} the teacher's time for one node"
    return f"{text}."


def tiles(run: RunData) -> list[tuple[str, str, str]]:
    """The figures at the top of the page: name, figure and note."""
    middle, low, high = run.accuracy[run.kept]
    found = [("Test accuracy", percent(middle), f"{low:.1f} to {high:.1f}, {title_of(run.kept)}")]
    if TEACHER in run.accuracy:
        found.append(("Teacher", percent(run.accuracy[TEACHER][0]), run.summary["teacher"]["name"]))
    ours, theirs = run.milliseconds(run.kept), run.milliseconds(TEACHER)
    if ours:
        found.append(("One node", f"{ours:.3g} ms", f"the teacher: {theirs:.3g} ms" if theirs else "on this machine"))
    used, total = (short_count(run.summary[run.kept][f"{part}parameters"], "unknown") for part in ("active_", ""))
    found.append(("Parameters used", used, f"of {total} per node"))
    found.append(("Calibration error", percent(100 * run.figures["models"][run.kept]["ece"]), "ECE; 0 is perfect"))
    return found


def verdict(run: RunData) -> list[tuple[str, str]]:
    """The sentences of the verdict as (topic, text)."""
    parts = (sentence.partition(": ") for sentence in verdict_sentences(run.summary["verdict"]))
    return [(topic, text) for topic, _, text in parts]


def sections(run: RunData) -> list[Section]:
    """All sections of a run, in the order of the page, without those for which the run has no data."""
    made = [
        _accuracy(run),
        _classes(run),
        _calibration(run),
        _disagreement(run),
        _neighborhood(run),
        _experts(run),
        _space(run),
        _training(run),
        _latency(run),
        tables.configuration(run),
    ]
    return [section for section in made if section is not None]


def _accuracy(run: RunData) -> Section:
    best = max(run.models, key=lambda model: run.accuracy[model][0])
    caption = f"{title_of(best)} has the highest accuracy, {percent(run.accuracy[best][0])}."
    compared = {name: Comparison(**comparison) for name, comparison in run.figures["behind_kept"].items()}
    for relation, holds in (("ahead of", lambda c: c.low > 0), ("behind", lambda c: c.high < 0)):
        if names := [title_of(name) for name, comparison in compared.items() if holds(comparison)]:
            caption += f" On the same nodes, {title_of(run.kept)} is {relation} {listed(names)} by more than chance."
    if names := [title_of(name) for name, comparison in compared.items() if comparison.is_chance]:
        caption += f" The difference of {title_of(run.kept)} from {listed(names)} may be chance."
    chart = charts.accuracy_chart(run.accuracy, run.styles, f"{run.nodes:,} test nodes", f"{run.key}-accuracy")
    return Section(
        "accuracy", "Accuracy", [Chart("Accuracy by model, with 95 % intervals", chart, caption)], [tables.models(run)]
    )


def _classes(run: RunData) -> Section:
    matrix = run.figures["models"][run.kept]["confusion"]
    support = run.figures["support"]
    shares = [[cell / max(1, sum(row)) for cell in row] for row in matrix]
    wrong = [(cell, i, j) for i, row in enumerate(matrix) for j, cell in enumerate(row) if i != j and cell]
    caption = "No node is misclassified."
    if wrong:
        most, i, j = max(wrong)
        caption = (
            "Each row is a class, each column a prediction; the diagonal is correct. The most frequent mistake:"
            f" class {i} is predicted as class {j}, {most:,} of {sum(matrix[i]):,} times."
        )
    matrix_chart = charts.grid_chart(
        shares,
        "class of the node",
        f"prediction of {title_of(run.kept)} (% of the class)",
        f"{run.key}-confusion",
        "Confusion matrix: share of each class by prediction, in per cent",
    )
    recalls = {
        model: [
            100 * row[i] / sum(row) if sum(row) else None
            for i, row in enumerate(run.figures["models"][model]["confusion"])
        ]
        for model in run.pair
    }
    own = {i: value for i, value in enumerate(recalls[run.kept]) if value is not None}
    worst = min(own, key=own.get)
    class_caption = f"The hardest class is {worst}: {percent(own[worst])} of its {support[worst]:,} nodes are correct."
    class_chart = charts.classes_chart(recalls, run.styles, f"{run.key}-classes")
    return Section(
        "classes",
        "Classes",
        [
            Chart(f"Confusion of {title_of(run.kept)}", matrix_chart, caption),
            Chart("Accuracy of each class", class_chart, class_caption),
        ],
        [tables.classes(run, recalls)],
    )


def _calibration(run: RunData) -> Section:
    seen = run.figures["models"]
    ece, middle = seen[run.kept]["ece"], run.accuracy[run.kept][0]
    confidence = sum(bin_["confidence"] * bin_["nodes"] for bin_ in seen[run.kept]["bins"]) / run.figures["nodes"]
    kind = "overconfident" if 100 * confidence > middle else "underconfident"
    caption = (
        "Above the dashed line, accuracy is higher than confidence; below it, lower."
        f" {title_of(run.kept)} has a mean confidence of {percent(100 * confidence)} and an accuracy of"
        f" {percent(middle)}: it is {kind}. Its calibration error (ECE) is {percent(100 * ece)}. Bins of fewer than"
        f" {charts.FEWEST} nodes are not drawn."
    )
    bins = {model: seen[model]["bins"] for model in run.pair}
    chart = charts.reliability_chart(bins, run.styles, f"{run.key}-reliability")
    order = sorted(seen, key=lambda model: seen[model]["ece"])
    rows = [
        [Cell.text(title_of(model)), Cell.share(seen[model]["ece"]), Cell.number(seen[model]["log_loss"], ".3f")]
        for model in order
    ]
    grid = Grid(
        [("Model", False), ("ECE (%)", True), ("Log loss (nats)", True)],
        rows,
        "ECE: mean gap between accuracy and confidence over ten bins of equal width, weighted by nodes; 0 is perfect.",
        sortable=True,
        strong=order.index(run.kept),
    )
    return Section("calibration", "Calibration", [Chart("Reliability", chart, caption)], [grid])


def _disagreement(run: RunData) -> Section | None:
    found = run.figures["disagreements"]
    if found is None:
        return None
    caption = (
        f"Student and teacher disagree on {found['count']:,} of {run.figures['nodes']:,} nodes. Only the student is"
        f" right on {found['student_right']:,}, only the teacher on {found['teacher_right']:,}."
    )
    chart = charts.agreement_chart(found, f"{run.key}-agreement")
    return Section(
        "disagreement", "Student and teacher", [Chart("Who is right", chart, caption)], [tables.disagreements(found)]
    )


def _neighborhood(run: RunData) -> Section:
    made = []
    about = {
        "degree": ("Accuracy by degree", "neighbours of a node (edges that end at it)"),
        "homophily": ("Accuracy by homophily", "neighbours of a node's own class (%)"),
    }
    for part, (title, xlabel) in about.items():
        groups = run.figures[part]
        if not groups["names"]:
            continue
        chart = charts.groups_chart(groups, run.shown, run.styles, xlabel, f"{run.key}-{part}")
        made.append(Chart(title, chart, tables.groups_sentence(run, groups, part)))
    return Section("neighbourhood", "Degree and homophily", made) if made else None


def _experts(run: RunData) -> Section | None:
    found = run.figures["experts"]
    if found is None:
        return None
    made = []
    for number, layer in enumerate(found["layers"], 1):
        load, even = layer["load"], 1 / len(layer["load"])
        dead = f"dead: {', '.join(map(str, layer['dead']))}" if layer["dead"] else "no expert is dead"
        caption = (
            f"Expert {load.index(max(load))} carries the most, {percent(100 * max(load))}, which is"
            f" {max(load) / even:.1f} times the even share; {dead}. The load is as even as that of"
            f" {layer['effective']:.1f} experts with equal load."
        )
        chart = charts.load_chart(layer, number, f"{run.key}-load-{number}")
        made.append(Chart(f"Load of layer {number}", chart, caption))
        by_class = charts.grid_chart(
            layer["by_class"],
            "class of the node",
            f"expert of layer {number} (% of the class's gate mass)",
            f"{run.key}-experts-{number}",
            f"Share of each class's gate mass by expert of layer {number}, in per cent",
        )
        class_caption = (
            f"Each row is a class, and its shares add up to 100 %. The top expert alone predicts the class of"
            f" {percent(100 * layer['purity'])} of the nodes; the largest class has {percent(100 * layer['chance'])}."
        )
        made.append(Chart(f"Experts of layer {number} by class", by_class, class_caption))
    node_count = (
        f"{found['nodes']:,} of {found['of']:,} nodes" if found["nodes"] < found["of"] else f"all {found['of']:,} nodes"
    )
    text = f"{found['title']}, {found['top_k']} experts per node, on {node_count} of the graph."
    return Section("experts", "Experts", made, [tables.layers(found)], text)


def _space(run: RunData) -> Section | None:
    found = run.figures["experts"]
    if found is None:
        return None
    space, layers = found["space"], len(found["layers"])
    stars = " Stars are the experts' memory vectors, which the router compares nodes with." if space["memories"] else ""
    plane = (
        f"{space['shown']:,} nodes as the router of layer {layers} of {layers} sees them: {space['width']} numbers each"
    )
    made = [
        Chart(
            "By expert with the largest gate",
            charts.space_chart(space, "expert", f"{run.key}-space-expert"),
            f"Each colour is an expert.{stars} If the colours are separate, the experts divide the space between them.",
        ),
        Chart(
            "By class of the node",
            charts.space_chart(space, "class", f"{run.key}-space-class"),
            "The same points, coloured by class. If both pictures agree, the experts have specialised in classes.",
        ),
    ]
    return Section(
        "space",
        "Routing space",
        made,
        text=f"{plane}, scaled to unit length and projected onto their first two principal components.",
    )


def _training(run: RunData) -> Section | None:
    records = [record for record in run.records if record["phase"] in run.styles]
    if not records:
        return None
    epochs = chosen_epochs(run.summary, records)
    chosen = (
        f"{title_of(run.kept)} is taken at epoch {epochs[run.kept] + 1}"
        if run.kept in epochs
        else "The best epoch is taken"
    )
    made = [
        Chart(
            "Training loss",
            charts.curves_chart(records, "loss", run.styles, epochs, f"{run.key}-loss"),
            "Phases have different losses: look at the shape of each curve, and do not compare the curves.",
        ),
        Chart(
            "Validation accuracy",
            charts.curves_chart(records, "val_accuracy", run.styles, epochs, f"{run.key}-validation"),
            f"{chosen}, the mark on its curve: the epoch with the best validation accuracy.",
        ),
    ]
    return Section("training", "Training", made)


def _latency(run: RunData) -> Section | None:
    points = {model: (run.milliseconds(model), *run.accuracy[model]) for model in run.models if run.milliseconds(model)}
    if not points:
        return None
    fastest = min(points, key=lambda model: points[model][0])
    caption = (
        f"Up and to the left is better. {title_of(fastest)} is the fastest for one node, {points[fastest][0]:.3g} ms."
    )
    if TEACHER in points:
        caption += f" The teacher needs {points[TEACHER][0]:.3g} ms, which includes gathering the node's neighbourhood."
    chart = charts.latency_chart(points, run.styles, f"{run.key}-latency")
    grids = [tables.latencies(run.latency)] if run.latency else []
    made = run.figures["made"]
    text = f"Medians on {made['device']}, {tables.threads(made)}, one call after another."
    return Section("latency", "Speed", [Chart("Accuracy over time for one node", chart, caption)], grids, text)

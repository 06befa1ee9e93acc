"""Tables of accuracies, from the rows of ``results/``, which :mod:`benchmarks.report.tables` writes into pages.

The package's own tables are imported where needed, because a summary of timings must work without a graph library.
"""

import json
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from benchmarks.report.medians import RUNS, human, markdown

# Searches on seeds that were not used to choose these variants (docs/experts.md).
JOINT, SHORTLIST = ("experts_shortlist", "experts_seen"), ("today", "pull 1", "shared, routed lr 0.1")

SIGN = ("soft labels", "labels")  # what it learns from, in searches of its settings

# Variants of results/made_graphs.csv: the present one, and earlier ones in the order of the columns of kept students.
MADE_NOW, MADE_BEFORE = "start as mlp", ("after", "before")
# Variants that are compared with the MLP, by the name of their line.
MADE = {"RbM": "labels teach", "RbM, pull 0.1": "pull 0.1", "RbM, experts alike": "experts alike"}
# Kinds of students of the table newer: the seeds of all are compared with those of the first one, if at least so many.
NEWER_PAIRS = (
    *("glnn", "nosmog", "mlp", "rbm", "hgmd", "tined", "tined_plus", "simmlp", "vqgraph"),
    *("sign", "sign, soft labels", "trees"),
)
FEWEST_PAIRS = 5
MODELS = ("teacher", "labels", "mlp", "rbm")


def experiment(name: str) -> str:
    """The table of ``results/NAME.csv``, with the paper's figures."""
    from rbm.experiments.results import read_rows
    from rbm.experiments.tables import main_table

    rows = [row for row in read_rows(RUNS / f"{name}.csv") if (row["teacher"], row["variant"]) == ("sage", "")]
    return main_table(rows) if rows else ""


def accuracy() -> str:
    """The rows of ``paper`` under the paper's protocol, without the columns of the paper's figures."""
    rows = [line.strip("| ").split(" | ") for line in experiment("paper").replace("*", "").splitlines()]
    kept = [cells[:3] + cells[5:] for cells in rows[2:] if not cells[0].endswith(")")]
    return markdown(["dataset", "setting", "seeds", "RbM", "MLP", "teacher", "RbM - MLP", "p"], kept, 2)


def ahead() -> str:
    """A sentence: in how many settings RbM is significantly ahead of the plain MLP, or behind it."""
    rows = [line.strip("| ").split(" | ") for line in accuracy().splitlines()[2:]]
    above, below, rest = [], [], 0
    for row in rows:
        difference, p = float(row[-2]), float(row[-1].removeprefix("< "))
        if p < 0.05:
            (above if difference > 0 else below).append(_setting(row))
        else:
            rest += 1
    mean = sum(float(row[-2]) for row in rows) / len(rows)
    text = (
        f"**Of {len(rows)} settings RbM is ahead of the plain MLP in {_counted(above)}"
        f" and behind in {_counted(below)}.** The other {rest} cannot be told apart (*p* of 0.05 or more). The mean"
        f" difference over all is {mean:+.2f} points."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def auto() -> str:
    """``results/auto``: runs with a search next to runs without one, and the mean gain on made graphs."""
    from rbm.experiments.statistics import paired_test
    from rbm.utils.files import read_csv

    rows = read_csv(RUNS / "auto" / "runs.csv")
    graphs = list(dict.fromkeys(row["graph"] for row in rows))
    rows.sort(key=lambda row: graphs.index(row["graph"]))
    without = {(row["graph"], row["seed"]): row for row in rows if row["run"] == "preset"}
    table, before, after = [], {}, {}
    for row in rows:
        if row["run"] == "preset":
            continue
        start = without[row["graph"], row["seed"]]
        lead = f"{float(row['gain']):+.2f} ± {row['error']}" if row["gain"] else ""
        expected = f"{float(row['corrected']):+.2f}" if row["corrected"] else ""
        name, budget = row["graph"], row["run"].removeprefix("auto ")
        accuracies = [run[column] for column in ("kept_val", "kept_test") for run in (start, row)]
        table.append([name, row["seed"], budget, row["trials"], row["halves"], lead, expected, *accuracies])
        if name.startswith("made-") and float(name.removeprefix("made-")) < 0.5 and budget == "5m":
            before[name, row["seed"]], after[name, row["seed"]] = float(start["kept_test"]), float(row["kept_test"])
    gain = paired_test(after, before)
    header = ["graph", "seed", "budget", "trials", "halves", "lead", "expected", "validation: without", "with"]
    verdict = "more than chance" if gain.p < 0.05 else "which may be chance"
    text = (
        f"**On the heterophilous made graphs, five minutes of search change the test accuracy by {gain.difference:+.2f}"
        f" points, {verdict}** (mean of {gain.count} searches, paired *t*-test *p* = {gain.p:.3f})."
    )
    return f"{markdown([*header, 'test: without', 'with'], table)}\n{textwrap.fill(text, 120)}\n"


def auto_budget() -> str:
    """``results/auto_budget.csv``: what whole commands with a budget took."""
    from rbm.utils.files import read_csv

    table = []
    for row in read_csv(RUNS / "auto_budget.csv"):
        graph, _, option = row["command"].partition(":")
        option = option.partition(":")[2]
        outcome = f"too small: at least {row['needed']} s are needed" if row["needed"] else f"{row['trials']} trials"
        command = f"{graph}, `--{option}`" if option else graph
        table.append([command, f"{row['budget']} s", f"{float(row['seconds']):.0f} s", outcome])
    return markdown(["graph", "budget", "command", "search"], table)


def _setting(row: Sequence[str]) -> str:
    names = {"cora": "Cora", "citeseer": "CiteSeer", "academic-cs": "CS"}
    name = names.get(row[0], row[0].split("-")[-1].capitalize())
    return f"{'unseen' if row[1] == 'inductive' else 'seen'} nodes of {name}"


def _counted(settings: Sequence[str]) -> str:
    return f"{len(settings)} ({', '.join(settings)})" if settings else "none"


def gains(against: str, *names: str, variants: Sequence[str] = ()) -> str:
    """Gains of each kind of student in ``results/searches/NAME.csv`` over one of them; by default for all variants."""
    from rbm.experiments.comparisons import gains_table
    from rbm.experiments.results import read_rows

    rows = [row for name in names for row in read_rows(RUNS / "searches" / f"{name}.csv")]
    return gains_table([row for row in rows if not variants or row["variant"] in ("", *variants)], against)


def held_out(name: str, method: str, *variants: str) -> str:
    """Mean accuracies of a method's variants in ``results/searches/NAME.csv``, a search on validation nodes.

    A graph's means are over the seeds that all variants have.
    """
    from rbm.experiments.comparisons import kind_of, kinds
    from rbm.experiments.results import read_rows

    found = kinds(read_rows(RUNS / "searches" / f"{name}.csv"))
    columns = [found[kind_of(method, variant)] for variant in variants]
    table = []
    for cell in sorted(columns[0], key=lambda cell: (cell[0], cell[1] == "inductive")):
        seeds = set.intersection(*(set(column.get(cell, ())) for column in columns))
        if seeds:
            means = [fmean(column[cell][seed] for seed in seeds) for column in columns]
            table.append([_setting(cell), str(len(seeds)), *(f"{mean:.1f}" for mean in means)])
    return markdown(["", "seeds", *variants], table)


def bar() -> str:
    """How close each student of the searches is to the bar of docs/experts.md."""
    from benchmarks.report.bars import HEADER, against_the_mlp
    from rbm.experiments.results import read_rows

    return markdown(HEADER, against_the_mlp(lambda name: read_rows(RUNS / "searches" / f"{name}.csv")), 2)


def experts_used() -> str:
    """``results/experts_used.csv``: the value of routing, and how closely teachers are fitted; means over its seeds."""
    from rbm.utils.files import read_csv

    found = defaultdict(list)
    for row in read_csv(RUNS / "experts_used.csv"):
        found[row["dataset"], row["setting"], row["method"]].append(row)
    columns = {
        "teacher": "teacher",
        "held_out": "student",
        "mean_expert": "mean expert",
        "other_expert": "wrong experts",
        "agreement_observed": "agrees with the teacher",
        "agreement_held_out": "agrees, held out",
        "where_teacher_is_right": "right where the teacher is",
        "where_teacher_is_wrong": "right where it is not",
    }
    table = []
    for (dataset, setting, method), rows in found.items():
        cells = [
            f"{sum(float(row[name]) for row in rows) / len(rows):.1f}" if rows[0][name] else "" for name in columns
        ]
        table.append([f"{dataset} {setting}", method, str(len(rows)), *cells])
    return markdown(["", "", "seeds", *columns.values()], table, 2)


def routing_start() -> str:
    """``results/experts_start.csv``: validation accuracies around the start of routing, means over graphs and seeds."""
    from rbm.utils.files import read_csv

    found = defaultdict(list)
    for row in read_csv(RUNS / "experts_start.csv"):
        found[row["variant"]].append(row)
    columns = ("val_last_pretraining", "val_first_routed", "val_tenth_routed", "val_best")
    table = []
    for variant, rows in found.items():
        means = [100 * sum(float(row[name]) for row in rows) / len(rows) for name in columns]
        epochs = sorted(int(row["best_epoch"]) for row in rows)
        cells = [f"{mean:.2f}" for mean in means]
        table.append([variant, str(len(rows)), *cells, f"{epochs[0]} to {epochs[-1]}"])
    header = ["", "runs", "last of pretraining", "first routed", "tenth routed", "best", "best epoch"]
    return markdown(header, table)


def students() -> str:
    """The paper's main table on the graphs for which every student has rows, over the seeds that all of them have."""
    from rbm.experiments.paper_tables import read_table, render
    from rbm.experiments.results import read_rows

    table, runs = read_table("main"), defaultdict(dict)
    for row in read_rows(RUNS / "paper.csv"):
        if (row["teacher"], row["protocol"], row["variant"]) == ("sage", "rbm", ""):
            runs[row["dataset"], row["setting"], row["seed"]][row["method"]] = row
    methods = {column.method for column in table.columns.values()}
    return render(table, [row for run in runs.values() if methods <= run.keys() for row in run.values()])


def newer() -> str:
    """Students and alternatives published since 2024 compared with ours, on the graphs and seeds that have rows."""
    from rbm.experiments.paper_tables import read_table, render
    from rbm.experiments.results import read_rows

    return render(read_table("newer"), read_rows(RUNS / "newer.csv"))


def newer_pairs() -> str:
    """Points ahead of GLNN in ``results/newer.csv`` with the p of a paired t-test over the seeds that both have, at
    least :data:`FEWEST_PAIRS`; their number is shown where GLNN has more.

    Bold: p below 0.05 after Holm's correction for all tests of the table.
    """
    from rbm.experiments.comparisons import holm, kind_of, kinds
    from rbm.experiments.paper_tables import read_table
    from rbm.experiments.results import read_rows
    from rbm.experiments.statistics import p_text, paired_test

    found, (base, *others) = kinds(read_rows(RUNS / "newer.csv")), NEWER_PAIRS
    titles = {kind_of(column.method, column.variant): title for title, column in read_table("newer").columns.items()}
    enough = [cell for cell, runs in found[base].items() if len(runs) >= FEWEST_PAIRS]
    cells = sorted(enough, key=lambda cell: cell[1])
    pairs = {
        (cell, kind): paired_test(found[kind][cell], found[base][cell])
        for cell in cells
        for kind in others
        if len(found[kind].get(cell, {}).keys() & found[base][cell].keys()) >= FEWEST_PAIRS
    }
    corrected = dict(zip(pairs, holm([pair.p for pair in pairs.values()]), strict=True))

    def shown(cell: tuple[str, ...], kind: str) -> str:
        if (cell, kind) not in pairs:
            return ""
        pair, mark = pairs[cell, kind], "**" if corrected[cell, kind] < 0.05 else ""
        seeds = "" if pair.count == len(found[base][cell]) else f"; {pair.count} seeds"
        return f"{mark}{pair.difference:+.2f}{mark} ({p_text(pair.p)}{seeds})"

    table = [[", ".join(cell), str(len(found[base][cell])), *(shown(cell, kind) for kind in others)] for cell in cells]
    return markdown(["", "seeds", *(titles[kind] for kind in others)], table)


def newer_serving() -> str:
    """What each needs to answer for an unseen node of Cora, its number of parameters, and the time of one answer."""
    from rbm.experiments.paper_tables import read_table

    found = json.loads((RUNS / "newer_latency.json").read_text(encoding="utf-8"))
    latencies = {row["model"]: human(row["p50_ms"] / 1e3) for row in found["rows"]}
    table = []
    for title, column in read_table("newer").columns.items():
        if not column.variant and column.method in latencies:
            size = f"{found['parameters'][column.method]:,}"
            table.append([title, column.sees, size, latencies[column.method]])
            if column.method == "sign":
                needs = "features, and what its neighbours have stored"
                table.append([f"{title}, new node", needs, size, latencies["new_nodes"]])
    return markdown(["", "sees when it answers", "parameters", "one node"], table, 2)


def made_graphs() -> str:
    """Test accuracies on made graphs, those of kept students with earlier choices of the soft labels, and the change of
    RbM by its start.
    """
    rows = _made_rows()
    table = []
    for graph in sorted({graph for graph, _ in rows[MADE_NOW]}):
        now, *before = ([row for (g, _), row in rows[v].items() if g == graph] for v in (MADE_NOW, *MADE_BEFORE))
        features, share, degree = graph
        cells = [*(_mean(now, model) for model in (*MODELS, "kept")), *(_mean(chosen, "kept") for chosen in before)]
        table.append([features, f"{100 * share:.0f}%", str(degree), str(len(now)), *cells])
    header = ["features", "within a class", "degree", "seeds", "teacher", "MLP on labels", "MLP", "RbM"]
    own, now = rows["labels teach"], rows[MADE_NOW]
    changes = [float(now[run]["rbm_test"]) - float(own[run]["rbm_test"]) for run in now.keys() & own.keys()]
    text = (
        f"With weights of its own at the start of pretraining (variant `labels teach`), RbM differs by"
        f" {-sum(changes) / len(changes):+.2f} points on average over the same {len(changes)} runs"
        f" ({-max(changes):+.1f} to {-min(changes):+.1f})."
    )
    return f"{markdown([*header, 'kept', 'teachers alone', 'at first'], table, 1)}\n{textwrap.fill(text, 120)}\n"


def public_graphs() -> str:
    """``results/public_graphs.csv``: means over seeds on graphs of other people, and RbM's mean lead over the MLP."""
    from rbm.experiments.statistics import paired_test
    from rbm.utils.files import read_csv

    found = defaultdict(list)
    for row in read_csv(RUNS / "public_graphs.csv"):
        found[row["graph"], row["setting"]].append(row)
    table, runs = [], defaultdict(list)
    for (graph, setting), rows in sorted(found.items()):
        runs[graph] += rows
        share, chance = (f"{100 * float(rows[0][name]):.0f}%" for name in ("homophily", "by_chance"))
        nodes, degree = int(rows[0]["nodes"]), float(rows[0]["edges"]) / float(rows[0]["nodes"])
        cells = [_mean(rows, model) for model in (*MODELS, "kept")]
        table.append([graph, setting, f"{nodes:,}", f"{degree:.0f}", share, chance, *cells])
    header = ["graph", "setting", "nodes", "degree", "within a class", "by chance"]
    means = [{graph: fmean(_tests(rows, model)) for graph, rows in runs.items()} for model in ("rbm", "mlp")]
    test = paired_test(*means)
    text = (
        f"RbM's mean lead over the MLP is {test.difference:+.2f} points (*p* = {test.p:.2f}, paired *t*-test over the"
        f" {test.count} graphs, each with the mean of its runs)."
    )
    columns = [*header, "teacher", "MLP on labels", "MLP", "RbM", "kept"]
    return f"{markdown(columns, table, 2)}\n{textwrap.fill(text, 120)}\n"


def made_gains() -> str:
    """Points of test accuracy over the plain MLP on made graphs whose classes do not follow edges.

    Each seed counts once, with its mean over the graphs that all variants have, because graphs of one seed share their
    features.
    """
    from rbm.experiments.statistics import Summary, p_text, paired_test

    rows = _made_rows()
    shared = set.intersection(*(set(rows[variant]) for variant in MADE.values()))
    graphs = {graph for graph, _ in shared if graph[1] <= 0.3}
    seeds = sorted(seed for seed in {seed for _, seed in shared} if all((graph, seed) in shared for graph in graphs))

    def means(variant: str, student: str, kinds: Sequence[str] = ("dense", "sparse")) -> dict[int, float]:
        chosen = [graph for graph in graphs if graph[0] in kinds]
        tests = {seed: [float(rows[variant][graph, seed][f"{student}_test"]) for graph in chosen] for seed in seeds}
        return {seed: sum(values) / len(values) for seed, values in tests.items()}

    lines = []
    for name, variant in MADE.items():
        rbm, mlp = means(variant, "rbm"), means(variant, "mlp")
        lead, test = Summary.of([rbm[seed] - mlp[seed] for seed in seeds]), paired_test(rbm, mlp)
        by_kind = [
            paired_test(means(variant, "rbm", [kind]), means(variant, "mlp", [kind])) for kind in ("dense", "sparse")
        ]
        cells = [f"{value:+.2f}" for value in (*(kind.difference for kind in by_kind), test.difference)]
        lines.append(
            [name, str(len(graphs)), str(len(seeds)), *cells, f"{lead.std / lead.count**0.5:.2f}", p_text(test.p)]
        )
    return markdown(["", "graphs", "seeds", "dense", "sparse", "mean", "standard error", "p"], lines, 1)


def _tests(rows: Sequence[dict[str, str]], model: str) -> list[float]:
    """Test accuracies of a model in rows of made or public graphs; ``kept`` is the student that each run kept."""
    return [float(row[f"{row['kept'] if model == 'kept' else model}_test"]) for row in rows]


def _mean(rows: Sequence[dict[str, str]], model: str) -> str:
    return f"{fmean(_tests(rows, model)):.1f}" if rows else ""


def _made_rows() -> dict[str, dict[tuple[tuple[str, float, int], int], dict[str, str]]]:
    """Rows of results/made_graphs.csv by variant, and by graph (features, homophily, degree) and seed."""
    from rbm.utils.files import read_csv

    rows = defaultdict(dict)
    for row in read_csv(RUNS / "made_graphs.csv"):
        graph = row["features"], float(row["homophily"]), int(row["degree"])
        rows[row["variant"]][graph, int(row["seed"])] = row
    return rows

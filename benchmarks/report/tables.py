"""Tables of README.md, NOTES.md and two pages of docs: ``python -m benchmarks.report.tables`` writes them.

They are made from committed results. A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. A test
compares each page with what the results give.
"""

import csv
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.measure.shapes import REFERENCE, Shape
from benchmarks.report.medians import CPU, GPU, RESULTS, ROOT, RUNS, Figures, human, markdown, significant

PAGES = (
    *(ROOT / "README.md", ROOT / "benchmarks" / "NOTES.md"),
    *(ROOT / "docs" / name for name in ("results.md", "experts.md")),
)
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = (
    "Nothing has been measured on a GPU yet: `bash benchmarks/gpu.sh OUT_DIR` measures it, and `OUT_DIR/results.csv`,\n"
    "copied to `benchmarks/results/gpu.csv`, fills the cells by `python -m benchmarks.report.tables`.\n"
)
# Seeds that took no part in choosing these variants (docs/experts.md).
JOINT, SHORTLIST = ("experts_shortlist", "experts_seen"), ("today", "pull 1", "shared, routed lr 0.1")
PEERS = ("eager", "eager compiled", "split", "sorted")
EPOCHS = {"digits": "digits", "cora": "Cora", "amazon-photo": "Amazon-Photo"}
# By name, not by benchmarks.peers.libraries: a summary is read also where the operators' libraries did not build.
LIBRARIES = ("scattermoe", "triton_kernels", "megablocks", "tutel", "liger_kernel", "sonicmoe")
LIBRARY_PEERS = ("eager", "grouped_mm", *LIBRARIES)
MATMUL_PEERS = (*PEERS, "grouped_mm", "grouped_mm compiled", "dense")


def headed(name: str) -> str:
    return {"eager compiled": "compiled"}.get(name, name)


def headline() -> str:
    from benchmarks.report.headline import table  # not needed where no graph library is

    return table()


def cpu_layer() -> str:
    cpu, table = Figures(CPU), []
    for metric in ("forward", "forward + backward", "training step"):
        for rows in (1, 8, 64, 4096, 65536):
            cells = cpu.cells(PEERS, "layer", Shape(rows), metric, dtype="float32")
            if cells[0]:
                table.append([metric, f"{rows:,}", *cells])
    return markdown(["", "rows", "`rbm`", *map(headed, PEERS)], table)


def cpu_ceiling() -> str:
    cpu, shape = Figures(CPU), Shape(65536)
    forward = cpu.of("layer", shape, "rbm", "forward seconds", "float32")
    best = cpu.of("ceiling", "best found", "torch.mm", "FLOP/s", "float32")
    extra = cpu.of("layer", shape, "rbm", "forward extra memory / (x + y)", "float32")
    if None in (forward, best, extra):
        return ""
    rate = 2 * shape.multiplications / forward
    return (
        f"At 65,536 rows that is {rate / 1e9:.0f} GFLOP/s; the best square `torch.mm` of the same run reached"
        f" {best / 1e9:.0f}.\nMemory beyond the result is {100 * extra:.0f} % of `x` and `y`.\n"
    )


def one_node() -> str:
    cpu = Figures(CPU)
    rows = []
    for operator, about in (
        ("one node of amazon-computers, inductive", "Amazon-Computers, unseen nodes, 831-256-10, three experts"),
        ("one node of amazon-computers, transductive", "Amazon-Computers, seen nodes, 831-256-10, five experts"),
        ("student, 128 hidden", "Cora's width, 1433-128-7"),
    ):
        for key in cpu.medians:
            if key.operator == operator and key.implementation == "rbm" and key.shape.startswith("B=1 "):
                values = [cpu.of(*key[:2], name, "forward seconds", "float32") for name in ("rbm", "mlp", "teacher")]
                if key.metric == "forward seconds":
                    rows.append([about, *("" if value is None else human(value) for value in values)])
    return markdown(["one node", "RbM student", "MLP of one expert's width", "GraphSAGE, with neighbourhood"], rows)


def epoch() -> str:
    """An epoch of distillation, one forward a node against one a pair."""
    cpu, table = Figures(CPU), []
    for name, about in EPOCHS.items():
        node, pair = (cpu.of("distillation epoch", name, key, "seconds", "float32") for key in ("rbm", "pairs"))
        if node and pair:
            table.append([about, human(node), human(pair), f"{significant(pair / node)} x"])
    return markdown(["an epoch, evaluation included", "one forward a node", "one a pair", ""], table)


def epoch_shares() -> str:
    cpu = Figures(CPU)
    found = {key.metric: {} for key in cpu.medians if key.metric.startswith("share of ")}
    for metric, shares in found.items():
        shares.update({name: cpu.of("distillation epoch", name, "rbm", metric, "float32") for name in EPOCHS})
    table = [
        [metric.removeprefix("share of "), *("" if share is None else f"{100 * share:.0f} %" for share in of.values())]
        for metric, of in found.items()
    ]
    return markdown(["share of an epoch", *EPOCHS.values()], table)


def experiment(name: str) -> str:
    """What ``results/NAME.csv`` comes to, beside the paper's figures."""
    from rbm.experiments.results import read_rows  # not needed where no graph library is
    from rbm.experiments.tables import main_table

    rows = [row for row in read_rows(RUNS / f"{name}.csv") if (row["teacher"], row["variant"]) == ("sage", "")]
    return main_table(rows) if rows else ""


def accuracy() -> str:
    """The rows of ``paper`` under the paper's protocol, without the columns of the paper's figures."""
    rows = [line.strip("| ").split(" | ") for line in experiment("paper").replace("*", "").splitlines()]
    kept = [cells[:3] + cells[5:] for cells in rows[2:] if not cells[0].endswith(")")]
    return markdown(["dataset", "setting", "seeds", "RbM", "MLP", "teacher", "RbM - MLP", "p"], kept, 2)


def gains(against: str, *names: str, variants: Sequence[str] = ()) -> str:
    """What each kind of student of ``results/searches/NAME.csv`` gains over one of them; of all variants by default."""
    from rbm.experiments.comparisons import gains_table
    from rbm.experiments.results import read_rows

    rows = [row for name in names for row in read_rows(RUNS / "searches" / f"{name}.csv")]
    return gains_table([row for row in rows if not variants or row["variant"] in ("", *variants)], against)


def bar() -> str:
    """How near each student of the searches comes to the bar of docs/experts.md."""
    from benchmarks.report.bars import HEADER, against_the_mlp
    from rbm.experiments.results import read_rows

    return markdown(HEADER, against_the_mlp(lambda name: read_rows(RUNS / "searches" / f"{name}.csv")), 2)


def experts_used() -> str:
    """``results/experts_used.csv``: what routing is worth, and what teachers leave to learn; means over its seeds."""
    found = defaultdict(list)
    with (RUNS / "experts_used.csv").open(newline="") as file:
        for row in csv.DictReader(file):
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
    """``results/experts_start.csv``: validation accuracies where routing begins, means over its graphs and seeds."""
    from rbm.utils.files import read_text

    found = defaultdict(list)
    for row in csv.DictReader(read_text(RUNS / "experts_start.csv").splitlines()):
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
    """The paper's main table on the graphs where every student has run, over the seeds that all of them have."""
    from rbm.experiments.paper_tables import read_table, render
    from rbm.experiments.results import read_rows

    table, runs = read_table("main"), defaultdict(dict)
    for row in read_rows(RUNS / "paper.csv"):
        if (row["teacher"], row["protocol"], row["variant"]) == ("sage", "rbm", ""):
            runs[row["dataset"], row["setting"], row["seed"]][row["method"]] = row
    methods = {column.method for column in table.columns.values()}
    return render(table, [row for run in runs.values() if methods <= run.keys() for row in run.values()])


def newer() -> str:
    """Students and alternatives since 2024 beside ours, on the graphs and seeds that have run."""
    from rbm.experiments.paper_tables import read_table, render
    from rbm.experiments.results import read_rows

    return render(read_table("newer"), read_rows(RUNS / "newer.csv"))


def newer_serving() -> str:
    """What each needs to answer for an unseen node of Cora, how many numbers it holds, and the time of one answer."""
    from rbm.experiments.paper_tables import read_table

    found = json.loads((RUNS / "newer_latency.json").read_text())
    taken = {row["model"]: human(row["p50_ms"] / 1e3) for row in found["rows"]}
    table = []
    for title, column in read_table("newer").columns.items():
        if not column.variant and column.method in taken:
            size = f"{found['parameters'][column.method]:,}"
            table.append([title, column.sees, size, taken[column.method]])
            if column.method == "sign":
                table.append(
                    [f"{title}, new node", "features, and what its neighbours have stored", size, taken["new_nodes"]]
                )
    return markdown(["", "sees when it answers", "parameters", "one node"], table, 2)


def cpu_experts() -> str:
    cpu, table = Figures(CPU), []
    workloads = dict.fromkeys(
        (key.shape, key.dtype, key.routing) for key in cpu.medians if key.operator == "expert_matmul"
    )
    for metric in ("forward", "forward + backward"):
        for shape, dtype, routing in workloads:
            cells = cpu.cells(MATMUL_PEERS, "expert_matmul", shape, metric, dtype=dtype, routing=routing)
            if cells[0]:
                share = cpu.of("expert_matmul", shape, "rbm", f"{metric} roofline share", dtype, routing)
                table.append([metric, shape, f"{dtype}, {routing}", *cells, f"{100 * share:.0f} %"])
    return markdown(["", "shape", "", "`rbm`", *map(headed, MATMUL_PEERS), "of the roofline"], table, 3)


def launches() -> str:
    """Triton launches by rows, of the first version that was counted and of the last."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with (RESULTS / "launches.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found[row["shape"], row["metric"]].append(float(row["median"]))
    table = []
    for rows in (1, 64, 2708, 20_000):
        counts = [
            found[f"{Shape(rows, 256, 256)}", f"launches of {what}"]
            for what in ("an inference call", "a training step")
        ]
        table.append([f"{rows:,}", *(f"{count:.0f}" for each in counts for count in (each[0], each[-1]))])
    return markdown(["rows", "inference: first version", "now", "forward + backward: first version", "now"], table)


def gpu(path: Path | None = None) -> str:
    """The experts and the layer at the reference shape, from the committed results or those at ``path``."""
    figures, table = Figures(path or GPU), []
    names = {"expert_matmul": "experts", "layer": "layer"}
    for operator, metrics in {
        "expert_matmul": ("forward", "route + forward", "forward + backward"),
        "layer": ("forward", "forward + backward", "training step"),
    }.items():
        for metric in metrics:
            cells = figures.cells(MATMUL_PEERS, operator, REFERENCE, metric, dtype="bfloat16")
            table.append([f"{names[operator]}: {metric}", *cells])
    header = [f"{REFERENCE}, bfloat16", "`rbm`", *map(headed, MATMUL_PEERS)]
    return markdown(header, table) + ("" if figures.medians else "\n" + NOT_MEASURED)


def gpu_libraries(path: Path | None = None) -> str:
    """Other projects' kernels; the two products with SwiGLU are a suite of their own."""
    figures, table = Figures(path or GPU), []
    names = {"expert_matmul": "experts", "ffn": "two products, SwiGLU"}
    for operator, about in names.items():
        for metric in ("forward", "forward + backward"):
            cells = figures.cells(LIBRARY_PEERS, operator, REFERENCE, metric, dtype="bfloat16")
            table.append([f"{about}: {metric}", *cells])
    return markdown([f"{REFERENCE}, bfloat16", "`rbm`", *LIBRARY_PEERS], table)


def gpu_kernels(path: Path | None = None) -> str:
    """Each operator at the reference shape, from the committed results or those at ``path``."""
    figures, table = Figures(path or GPU), []
    for operator, metric in (
        ("cosine_topk", "forward"),
        ("cosine_topk", "forward + backward"),
        ("expert_order", "forward"),
        ("expert_matmul", "forward"),
        ("expert_matmul", "forward + backward"),
        ("memory_statistics", "forward"),
    ):
        dtype = "int32" if operator == "expert_order" else "bfloat16"
        counted = [
            figures.of(operator, REFERENCE, "rbm", f"{metric} {counts}", dtype)
            for counts in ("roofline share", "launches", "host synchronisations")
        ]
        share, *whole = counted
        cells = ["" if share is None else f"{100 * share:.0f} %", *("" if n is None else f"{n:.0f}" for n in whole)]
        table.append([f"`{operator}`", metric, *figures.cells((), operator, REFERENCE, metric, dtype=dtype), *cells])
    header = [f"{REFERENCE}, bfloat16", "", "median", "of the roofline", "launches", "host synchronisations"]
    return markdown(header, table, 2)


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "cpu-layer": cpu_layer,
    "cpu-ceiling": cpu_ceiling,
    "one-node": one_node,
    "epoch": epoch,
    "epoch-shares": epoch_shares,
    "cpu-experts": cpu_experts,
    "gpu": gpu,
    "gpu-libraries": gpu_libraries,
    "gpu-kernels": gpu_kernels,
    "launches": launches,
    "accuracy": accuracy,
    "digits": partial(experiment, "digits"),
    "paper": partial(experiment, "paper"),
    "students": students,
    "newer": newer,
    "newer-serving": newer_serving,
    "experts-unseen": partial(gains, "mlp", "experts_unseen"),
    "experts-shortlist": partial(gains, "mlp", "experts_shortlist"),
    "experts-joint-mlp": partial(gains, "mlp", *JOINT, variants=SHORTLIST),
    "experts-joint-today": partial(gains, "rbm, today", *JOINT, variants=SHORTLIST),
    "experts-joint-alike": partial(gains, "rbm, pull 1", *JOINT, variants=SHORTLIST),
    "experts-start": routing_start,
    "experts-full-mlp": partial(gains, "mlp", "experts_full"),
    "experts-full-today": partial(gains, "rbm, today", "experts_full"),
    "experts-untried-mlp": partial(gains, "mlp", "experts_untried"),
    "experts-untried-start": partial(gains, "start_1", "experts_untried"),
    "experts-bar": bar,
    "experts-used": experts_used,
}


def fill(page: str) -> str:
    """A page with every table as the results give it."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", page)


def main() -> None:
    """Write the tables into the pages."""
    for path in PAGES:
        path.write_text(fill(path.read_text()))


if __name__ == "__main__":
    main()

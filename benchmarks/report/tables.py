"""Writes the tables of README.md, notes/ and some pages of docs: ``python -m benchmarks.report.tables``.

They are made from committed results. A table is between ``<!-- table: NAME -->`` and ``<!-- end -->``. A test compares
each page with the results.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.measure.shapes import COAUTHOR_CS, CORA, LARGE, MANY_EXPERTS, REFERENCE, ROUTERS, Shape
from benchmarks.report import accuracies, headline, publications, widths
from benchmarks.report.accuracies import JOINT, SHORTLIST, SIGN, experiment, gains, held_out
from benchmarks.report.headline import OF_EXPERTS, ONE_NODE, PEERS
from benchmarks.report.medians import (
    AMX,
    CPU,
    GPU,
    LAYER_AVX2,
    RESULTS,
    ROOT,
    Figures,
    human,
    layer_figures,
    markdown,
    significant,
)

_DOCS = ("auto", "choose", "results", "newer", "newer-evidence", "experts", "experts-evidence", "verdict")
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "benchmarks" / "notes").glob("*.md")),
    *(ROOT / "docs" / f"{name}.md" for name in _DOCS),
)
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
BOTH = ("forward", "forward + backward")
NOT_MEASURED = (
    "Nothing has been measured on a GPU yet: `bash benchmarks/gpu.sh OUT_DIR` measures it, and `OUT_DIR/results.csv`,\n"
    "copied to `benchmarks/results/gpu.csv`, fills the cells by `python -m benchmarks.report.tables`.\n"
)
EPOCHS = {"digits": "digits", "cora": "Cora", "amazon-photo": "Amazon-Photo"}
# By name, because importing benchmarks.peers.libraries fails if the operators' libraries did not build.
LIBRARIES = ("scattermoe", "triton_kernels", "megablocks", "tutel", "liger_kernel", "sonicmoe")
SERVERS = {"vllm": "vLLM", "sglang": "SGLang", "ggml": "llama.cpp"}
LIBRARY_PEERS = ("eager", "grouped_mm", *LIBRARIES)
GPU_PEERS = ("eager", "split", "sorted", "grouped_mm", "dense", "scattermoe", "triton_kernels")
MATMUL_PEERS = (*OF_EXPERTS, "grouped_mm", "grouped_mm compiled", "dense")


def headed(name: str) -> str:
    return {"eager compiled": "compiled", "tuned compiled": "tuned"}.get(name, name)


def cpu_layer(
    *,
    memory_kept: bool,
    path: Path | None = None,
    peers: Sequence[str] = PEERS,
    dtype: str = "float32",
    shapes: Sequence[Shape] = tuple(map(Shape, (1, 8, 64, 4096, 65536))),
) -> str:
    cpu, table = layer_figures(memory_kept=memory_kept, path=path), []
    for metric in ("forward", "forward + backward", "training step"):
        for shape in shapes:
            cells = cpu.cells(peers, "layer", shape, metric, dtype=dtype)
            if cells[0]:
                table.append([metric, f"{shape.rows:,}", *cells])
    return markdown(["", "rows", "`rbm`", *map(headed, peers)], table)


def cpu_ceiling() -> str:
    cpu, shape = layer_figures(memory_kept=True), Shape(65536)
    forward = cpu.of("layer", shape, "rbm", "forward seconds", "float32")
    best = cpu.of("ceiling", "best found", "torch.mm", "FLOP/s", "float32")
    extra = Figures(CPU).of("layer", shape, "rbm", "forward extra memory / (x + y)", "float32")
    if None in (forward, best, extra):
        return ""
    rate = 2 * shape.multiplications / forward
    return (
        f"At 65,536 rows that is {rate / 1e9:.0f} GFLOP/s; the best square `torch.mm` of the same run reached"
        f" {best / 1e9:.0f}.\nMemory beyond the result is {100 * extra:.0f} % of `x` and `y`.\n"
    )


def whole_run() -> str:
    """Processor time and accuracies of whole runs: today's code, the code before, and with other settings."""
    from benchmarks import whole_run
    from rbm.utils.files import read_csv

    return whole_run.markdown(read_csv(RESULTS / "whole_run.csv"))


def whole_run_precision() -> str:
    """Accuracies of whole runs in bfloat16 compared with those in float32."""
    from benchmarks import whole_run
    from rbm.utils.files import read_csv

    records = read_csv(RESULTS / "whole_run.csv")
    return whole_run.against(records, whole_run.rows_of(records, "float32"), "bfloat16", "float32")


def one_node() -> str:
    cpu = Figures(CPU)
    rows = []
    for operator, about in (
        (ONE_NODE, "Amazon-Computers, unseen nodes, 831-256-10, three experts"),
        ("one node of amazon-computers, transductive", "Amazon-Computers, seen nodes, 831-256-10, five experts"),
        ("student, 128 hidden", "Cora's width, 1433-128-7"),
    ):
        for key in cpu.medians:
            if key.operator == operator and key.implementation == "rbm" and key.shape.startswith("B=1 "):
                values = [cpu.of(*key[:2], name, "forward seconds", "float32") for name in ("rbm", "mlp", "teacher")]
                if key.metric == "forward seconds":
                    rows.append([about, *("" if value is None else human(value) for value in values)])
    return markdown(["one node", "RbM student", "MLP of one expert's width", "GraphSAGE, with neighbourhood"], rows)


def threads_of_one_row() -> str:
    """``serving_threads.csv``: one row at a time, from several threads."""
    from benchmarks.serving_threads import markdown  # only here, so that the module works without a graph library
    from rbm.utils.files import read_csv

    return markdown(read_csv(RESULTS / "serving_threads.csv")) + "\n"


def cpu_ffn() -> str:
    """The feed-forward block and its peers, and what each saves for its backward pass."""
    cpu, shape = Figures(CPU), Shape(CORA)
    peers = {
        "rbm, rows copied": "rows copied for each expert",
        "torch.nn.Linear, k I": "one dense pair of `k` widths",
        "sorted": "`sorted`",
        "grouped_mm": "`grouped_mm`",
        "eager": "eager",
    }
    times = [[metric, *cpu.cells([*peers], "ffn", shape, metric, dtype="float32")] for metric in BOTH]
    saved = [cpu.of("ffn", shape, name, "saved bytes", "float32") for name in ("rbm", *peers)]
    table = [*times, ["saved for backward", *("" if size is None else f"{size / 1e6:.0f} MB" for size in saved)]]
    return markdown(["", "`RbMFeedForward`", *peers.values()], table)


def cpu_feed_forward(path: Path, shapes: Sequence[Shape] = tuple(map(Shape, (1, 8, 64, CORA)))) -> str:
    """The feed-forward layer at inference, and its peers."""
    cpu, peers, table = Figures(path), ("eager", "sorted", "grouped_mm", *SERVERS), []
    for dtype in ("float32", "bfloat16"):
        for shape in shapes:
            cells = cpu.cells(peers, "feed_forward", shape, "forward", dtype=dtype)
            if cells[0]:
                table.append([dtype, f"{shape.rows:,}", *cells])
    return markdown(["", "rows", "`RbMFeedForward`", *(SERVERS.get(name, name) for name in peers)], table, 2)


def cpu_routing() -> str:
    """Routing, and how many times as long PyTorch takes."""
    cpu, table = Figures(AMX), []
    for shape in (Shape(COAUTHOR_CS), Shape(CORA, experts=64, top_k=8), *ROUTERS):
        sizes = (f"{size:,}" for size in (shape.rows, shape.features, shape.experts, shape.top_k))
        cells = [cpu.cells(("topk",), "cosine_topk", shape, passes, dtype="float32") for passes in BOTH]
        table.append([*sizes, *(cell for pair in cells for cell in pair)])
    header = ["rows", "features", "experts", "k", "forward", "PyTorch", "forward + backward", "PyTorch"]
    return markdown(header, table, 0)


def epoch() -> str:
    """An epoch of distillation, with one forward per node and with one per pair."""
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


def experts_of(path: Path, peers: Sequence[str]) -> str:
    """The experts at every measured workload of a file, compared with ``peers``, and their share of the roofline."""
    figures, table = Figures(path), []
    workloads = dict.fromkeys(
        (key.shape, key.dtype, key.routing) for key in figures.medians if key.operator == "expert_matmul"
    )
    for metric in BOTH:
        for shape, dtype, routing in workloads:
            cells = figures.cells(peers, "expert_matmul", shape, metric, dtype=dtype, routing=routing)
            if cells[0]:
                share = figures.of("expert_matmul", shape, "rbm", f"{metric} roofline share", dtype, routing)
                shown = "" if share is None else f"{100 * share:.0f} %"
                table.append([metric, shape, f"{dtype}, {routing}", *cells, shown])
    return markdown(["", "shape", "", "`rbm`", *map(headed, peers), "of the roofline"], table, 3)


def cpu_bfloat16() -> str:
    """The experts in bfloat16 and float32 on a processor with AVX512-BF16."""
    cpu, shape, table = Figures(RESULTS / "cpu_bfloat16.csv"), Shape(COAUTHOR_CS), []
    for metric in ("forward", "route + forward", "forward + backward"):
        for dtype in ("bfloat16", "float32"):
            cells = cpu.cells(MATMUL_PEERS, "expert_matmul", shape, metric, dtype=dtype)
            if cells[0]:
                table.append([metric, dtype, *cells])
    return markdown(["", "", "`rbm`", *map(headed, MATMUL_PEERS)], table, 2)


def launches() -> str:
    """Triton launches by rows, for the first counted version and the latest."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with (RESULTS / "launches.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["shape"], row["metric"]].append(float(row["median"]))
    table = []
    for rows in (1, 64, 2708, 20_000):
        counts = [
            found[f"{Shape(rows, 256, 256)}", f"launches of {what}"]
            for what in ("an inference call", "a training step")
        ]
        table.append([f"{rows:,}", *(f"{count:.0f}" for row in counts for count in (row[0], row[-1]))])
    return markdown(["rows", "inference: first version", "now", "forward + backward: first version", "now"], table)


def gpu(path: Path | None = None) -> str:
    """The experts and the layer at the reference shape, from the committed results or those in ``path``."""
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
    """Kernels of other projects; two products with SwiGLU are a separate suite."""
    figures, table = Figures(path or GPU), []
    names = {"expert_matmul": "experts", "ffn": "two products, SwiGLU"}
    for operator, about in names.items():
        for metric in BOTH:
            cells = figures.cells(LIBRARY_PEERS, operator, REFERENCE, metric, dtype="bfloat16")
            table.append([f"{about}: {metric}", *cells])
    return markdown([f"{REFERENCE}, bfloat16", "`rbm`", *LIBRARY_PEERS], table)


def gpu_kernels(path: Path | None = None) -> str:
    """Each operator at the reference shape, from the committed results or those in ``path``."""
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
    "headline": headline.table,
    "cpu-layer": partial(cpu_layer, memory_kept=True),
    "cpu-layer-bfloat16": partial(cpu_layer, memory_kept=True, dtype="bfloat16"),
    "cpu-layer-amx": partial(cpu_layer, memory_kept=True, path=AMX, dtype="bfloat16"),
    "cpu-layer-amx-float32": partial(cpu_layer, memory_kept=True, path=AMX),
    "cpu-layer-many-experts": partial(cpu_layer, memory_kept=True, path=AMX, peers=OF_EXPERTS, shapes=MANY_EXPERTS),
    "cpu-layer-many-experts-bfloat16": partial(
        cpu_layer, memory_kept=True, path=AMX, peers=OF_EXPERTS, shapes=MANY_EXPERTS, dtype="bfloat16"
    ),
    "cpu-layer-avx2": partial(cpu_layer, memory_kept=True, path=LAYER_AVX2, peers=OF_EXPERTS[:2]),
    "cpu-layer-faults": partial(cpu_layer, memory_kept=False),
    "cpu-ceiling": cpu_ceiling,
    "one-node": one_node,
    "whole-run": whole_run,
    "whole-run-precision": whole_run_precision,
    "serving-threads": threads_of_one_row,
    "cpu-ffn": cpu_ffn,
    "cpu-feed-forward": partial(cpu_feed_forward, RESULTS / "cpu_feed_forward.csv"),
    "cpu-feed-forward-amx": partial(cpu_feed_forward, AMX),
    "cpu-feed-forward-large": partial(cpu_feed_forward, AMX, LARGE),
    "cpu-routing": cpu_routing,
    "epoch": epoch,
    "epoch-shares": epoch_shares,
    "cpu-experts": partial(experts_of, AMX, MATMUL_PEERS),
    "cpu-bfloat16": cpu_bfloat16,
    "gpu": gpu,
    "gpu-libraries": gpu_libraries,
    "gpu-experts": partial(experts_of, GPU, GPU_PEERS),
    "gpu-kernels": gpu_kernels,
    "launches": launches,
    "accuracy": lambda: f"{accuracies.accuracy()}\n{accuracies.ahead()}",
    "ahead": accuracies.ahead,
    "auto": accuracies.auto,
    "auto-budget": accuracies.auto_budget,
    "digits": partial(experiment, "digits"),
    "paper": partial(experiment, "paper"),
    "students": accuracies.students,
    "newer": accuracies.newer,
    "publications": publications.table,
    "newer-pairs": accuracies.newer_pairs,
    "newer-serving": accuracies.newer_serving,
    "sign-norm": partial(
        held_out, "sign_norm", "sign", *(f"{loss}{norm}" for loss in SIGN for norm in ("", ", batch norm"))
    ),
    "sign-rate": partial(
        held_out, "sign_rate", "sign", *(f"{loss}{rate}" for loss in SIGN for rate in ("", ", rate 0.001"))
    ),
    "experts-unseen": partial(gains, "mlp", "experts_unseen"),
    "experts-shortlist": partial(gains, "mlp", "experts_shortlist"),
    "experts-joint-mlp": partial(gains, "mlp", *JOINT, variants=SHORTLIST),
    "experts-joint-today": partial(gains, "rbm, today", *JOINT, variants=SHORTLIST),
    "experts-joint-alike": partial(gains, "rbm, pull 1", *JOINT, variants=SHORTLIST),
    "experts-start": accuracies.routing_start,
    "experts-full-mlp": partial(gains, "mlp", "experts_full"),
    "experts-full-today": partial(gains, "rbm, today", "experts_full"),
    "experts-recipe": partial(gains, "mlp", "experts_recipe"),
    "experts-made": accuracies.made_gains,
    "made-graphs": accuracies.made_graphs,
    "public-graphs": accuracies.public_graphs,
    "experts-untried-mlp": partial(gains, "mlp", "experts_untried"),
    "experts-untried-start": partial(gains, "start_1", "experts_untried"),
    "experts-start-as-mlp": partial(gains, "mlp", "experts_start_as_mlp"),
    "experts-steady": partial(gains, "start_1", "experts_steady"),
    "experts-bar": accuracies.bar,
    "experts-narrow": widths.narrow,
    "experts-used": accuracies.experts_used,
}


def fill(page: str) -> str:
    """A page with every table filled in from the results."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", page)


def main() -> None:
    """Write the tables into the pages."""
    for path in PAGES:
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

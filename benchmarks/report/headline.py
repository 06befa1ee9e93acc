"""The three numbers at the top of README.md, each with the plain MLP's."""

import statistics
from collections import defaultdict

from benchmarks.measure.shapes import Shape
from benchmarks.report.medians import CPU, RUNS, Figures, human, layer_figures, markdown, significant

# The model of a row in README's accuracy table.
ONE_NODE = "one node of amazon-computers, inductive"
# Those that are measured for the experts alone, too.
OF_EXPERTS = ("eager", "eager compiled", "split", "sorted")
PEERS = (*OF_EXPERTS, "tuned compiled")
SHAPES = (("forward", (1, 8, 64, 4096, 65536)), ("forward + backward", (4096, 65536)), ("training step", (4096,)))


def ahead_of_teacher() -> tuple[dict[str, int], int]:
    """In how many settings of ``results/paper.csv`` each student's mean test accuracy is above its GraphSAGE teacher's,
    and how many settings there are: the paper's protocol, the seeds that all three have.
    """
    from rbm.experiments.results import read_rows

    runs: dict[tuple, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in read_rows(RUNS / "paper.csv"):
        if (row["teacher"], row["protocol"], row["variant"]) == ("sage", "rbm", ""):
            runs[row["dataset"], row["setting"]][row["method"]][row["seed"]] = float(row["test_at_best_val"])
    ahead, counted = {"rbm": 0, "mlp": 0}, 0
    for methods in runs.values():
        seeds = methods["rbm"].keys() & methods["mlp"].keys() & methods["teacher"].keys()
        if not seeds:
            continue
        counted += 1
        means = {name: statistics.mean(methods[name][seed] for seed in seeds) for name in ("teacher", *ahead)}
        for name in ahead:
            ahead[name] += means[name] > means["teacher"]
    return ahead, counted


def one_node() -> dict[str, float]:
    """Seconds of one prediction, by model."""
    cpu = Figures(CPU)
    return {
        key.implementation: seconds
        for key, seconds in cpu.medians.items()
        if (key.operator, key.metric) == (ONE_NODE, "forward seconds")
    }


def layer_gains() -> list[float]:
    """For each shape of README's table, the time of the best of :data:`PEERS` divided by the layer's."""
    cpu, gains = layer_figures(memory_kept=True), []
    for metric, sizes in SHAPES:
        for rows in sizes:
            ours, *others = (
                cpu.of("layer", Shape(rows), name, f"{metric} seconds", "float32") for name in ("rbm", *PEERS)
            )
            gains.append(min(other for other in others if other) / ours)
    return gains


def table() -> str:
    """The table at the top of README."""
    ahead, counted = ahead_of_teacher()
    seconds, gains = one_node(), layer_gains()
    faster = {name: seconds["teacher"] / seconds[name] for name in ("rbm", "mlp")}
    teacher = human(seconds["teacher"])
    rows = [
        [
            "Mean test accuracy above the GraphSAGE teacher's",
            *(f"{count} of {counted} settings" for count in ahead.values()),
            "[results](#results), [rows](results/paper.csv)",
        ],
        [
            f"A prediction for one node of Amazon-Computers, for which the teacher takes {teacher}",
            *(f"{faster[name]:.0f} x as fast, {human(seconds[name])}" for name in ("rbm", "mlp")),
            "[table](benchmarks/notes/layer.md#one-prediction), [rows](benchmarks/results/cpu.csv)",
        ],
        [
            "One layer on a CPU, against the best of five PyTorch implementations",
            f"{significant(min(gains))} to {significant(max(gains))} x as fast",
            "no such layer",
            "[table](#speed), [rows](benchmarks/results/cpu_layer.csv)",
        ],
    ]
    rows = [[what, f"**{ours}**", mlp, where] for what, ours, mlp, where in rows]
    return markdown(["", "RbM student", "plain MLP student", "from"], rows, 4)

"""The verdict of a run: the comparisons, the student that is kept, and that test labels have no influence."""

import re
from io import StringIO

import pytest
import torch
from block_graphs import block_graph
from rich.console import Console
from scipy.stats import binomtest
from torch_geometric.data import Data

import rbm
from rbm.config import Config
from rbm.datasets.homophily import edge_homophily
from rbm.datasets.splits import split_graph
from rbm.distillation import verdict as judging
from rbm.distillation.task import TrainedStudent
from rbm.distillation.verdict import Comparison, compare
from rbm.utils import progress

QUICK = {
    "teacher": {"hidden_channels": 16, "max_epochs": 60, "lr": 0.02},
    "mlp": {"max_epochs": 60},
    "rbm": {"hidden_channels": 16, "num_experts": 4, "top_k": 2, "max_epochs": 60},
    "encoding": {"deepwalk": False},
}


@pytest.fixture
def quick() -> Config:
    return Config().updated(QUICK)


def test_homophily_counts_the_edges_whose_labels_may_be_read():
    edges = torch.tensor([[0, 1, 2, 3, 3, 4], [1, 2, 3, 3, 4, 0]])
    labels = torch.tensor([0, 0, 1, 1, -1])
    found = edge_homophily(edges, labels, torch.tensor([True, True, True, True, False]))
    # The edges are 0-1, 1-2, 2-3; 0-1 and 2-3 are within a class, and three of the six ends are of each class.
    assert found == pytest.approx((2 / 3, 0.5, 3))
    assert edge_homophily(edges, labels, torch.tensor([True, False, True, False, False])) is None


def test_a_comparison_of_two_models():
    first = torch.tensor([1] * 40 + [1] * 12 + [0] * 3 + [0] * 45).bool()
    second = torch.tensor([1] * 40 + [0] * 12 + [1] * 3 + [0] * 45).bool()
    found = compare(first, second)
    assert (found.difference, found.nodes) == (pytest.approx(0.09), 100)
    assert found.p == pytest.approx(binomtest(3, 15).pvalue)
    # (13 - 4) / 102, and 1.96 * sqrt((17 / 102 - (9 / 102)^2) / 102)
    assert (found.low, found.high) == pytest.approx((0.08824 - 0.07735, 0.08824 + 0.07735), abs=1e-4)
    assert not found.is_chance
    turned = compare(second, first)
    assert (turned.low, turned.high) == (pytest.approx(-found.high), pytest.approx(-found.low))
    alike = compare(first, first)
    assert (alike.difference, alike.p, alike.is_chance) == (0.0, 1.0, True)
    wrong, right = torch.zeros(1, dtype=torch.bool), torch.ones(1, dtype=torch.bool)
    assert (compare(wrong, right).low, compare(right, wrong).high) == (-1.0, 1.0), "no difference is beyond one"


@pytest.mark.parametrize(("nodes", "ours", "theirs"), [(40, 0.1, 0.1), (150, 0.08, 0.02), (300, 0.01, 0.0)])
def test_an_interval_holds_the_true_difference_nineteen_times_in_twenty(nodes, ours, theirs):
    held, draws = 0, 400
    for _ in range(draws):
        draw = torch.rand(nodes)
        found = compare(draw < ours, draw > 1 - theirs)
        held += found.low <= ours - theirs <= found.high
    assert held / draws > 0.93


@pytest.mark.parametrize("homophily", [0.1, 0.9])
def test_the_kept_student_is_near_the_best(quick, homophily):
    data = block_graph(homophily)
    result = rbm.distill(data, config=quick, measure_latency=False)
    found, accuracy = result.summary["verdict"], result.summary
    students = max(accuracy[name]["val_accuracy"] for name in ("mlp", "rbm"))
    assert accuracy[found["kept"]]["val_accuracy"] >= students - 0.0051
    assert result.student is result.students[found["kept"]]
    for name in ("teacher", "labels", "mlp", "rbm"):
        assert found["accuracy"][name] == pytest.approx(accuracy[name]["val_accuracy"]), "on the same nodes"
    assert found["homophily"]["share"] == pytest.approx(homophily, abs=0.05)
    graph, teacher, *_ = result.verdict
    assert ("heterophilous" in graph) == (homophily < 0.3)
    assert ("the graph helps" in teacher) == (homophily > 0.5)
    assert ("students learn those of the MLP" in teacher or "try --teacher mlp" in teacher) == (homophily < 0.5)


def test_the_cheapest_of_equally_accurate_students_is_the_best(small_graph):
    split, trained = split_graph(small_graph), {}
    for name, width in (("rbm", 32), ("mlp", 8)):
        student = rbm.MLPStudent(small_graph.num_features, width, 3)
        for parameter in student.parameters():
            parameter.detach().zero_()
        trained[name] = TrainedStudent(student, None, None)
    found = judging.judge(split, torch.zeros(small_graph.num_nodes, 3), trained, ["rbm", "mlp"], None)
    assert found["best"] == "mlp"
    known = small_graph.train_mask | small_graph.val_mask
    sources, targets = small_graph.edge_index
    assert found["homophily"]["edges"] == int((known[sources] & known[targets] & (sources != targets)).sum())


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_students_are_judged_on_the_validation_nodes(small_graph, setting):
    for name in ("train_mask", "val_mask", "test_mask"):
        small_graph[name] = small_graph[name].roll(31)  # so that unseen nodes come before validation nodes
    split = split_graph(small_graph, setting, unseen_fraction=0.4)
    student = rbm.MLPStudent(small_graph.num_features, 8, 3).eval()
    with torch.no_grad():
        expected = (student(small_graph.x).argmax(-1) == small_graph.y)[small_graph.val_mask]
    assert judging.student_right(split, TrainedStudent(student, {}, None)).tolist() == expected.tolist()


def test_no_test_label_has_a_say(quick):
    data = block_graph(0.5, nodes=300)
    lying = data.clone()
    lying.y = torch.where(data.test_mask, (data.y + 1) % 3, data.y)
    truth, planted = (rbm.distill(graph, config=quick, measure_latency=False) for graph in (data, lying))
    assert truth.summary["mlp"]["test_accuracy"] != planted.summary["mlp"]["test_accuracy"]
    assert truth.summary["verdict"] == planted.summary["verdict"]
    assert truth.verdict == planted.verdict


COSTS = {"cheap": 1, "dear": 3, "dearer": 5}


@pytest.mark.parametrize(
    ("behind", "kept"),
    [
        ({"cheap": (0.005, -0.01), "dear": (0.002, -0.01)}, "cheap"),
        ({"cheap": (0.005, 0.001), "dear": (0.002, -0.01)}, "dear"),
        ({"cheap": (0.03, -0.01), "dear": (0.006, -0.01)}, "dearer"),
    ],
    ids=["as good", "more than chance behind", "more than half a point behind"],
)
def test_the_cheapest_of_those_that_are_as_good_is_kept(behind, kept):
    compared = {name: Comparison(gap, low, 1.0, 0.5, 200) for name, (gap, low) in behind.items()}
    assert judging._cheapest("dearer", compared, COSTS) == kept
    assert judging._cheapest("dearer", compared, dict.fromkeys(COSTS, 5)) == "dearer", "none of them is cheaper"


@pytest.mark.parametrize(
    ("ahead", "methods", "kept"),
    [
        (-0.006, ["dear", "cheap"], "labels"),
        (-0.005, ["dear", "cheap"], "dear"),
        (-0.05, ["dear"], "dear"),
        (0.05, ["dear", "cheap"], "dear"),
    ],
    ids=["more than half a point ahead", "half a point ahead", "one method asked for", "behind"],
)
def test_the_mlp_of_labels_is_kept_where_a_teacher_misled_every_student(ahead, methods, kept):
    behind = {"labels": Comparison(ahead, ahead - 0.03, ahead + 0.03, 0.5, 200)}
    if "cheap" in methods:
        behind["cheap"] = Comparison(0.1, 0.05, 0.15, 0.01, 200)
    assert judging.kept_student("dear", behind, methods, {**COSTS, "labels": 1}) == kept


@pytest.mark.parametrize(("low", "kept"), [(-0.01, "dearer"), (0.001, "cheap")])
def test_the_student_that_a_search_was_for_is_kept_unless_another_is_better(low, kept):
    behind = {"cheap": Comparison(0.004, -0.01, 0.02, 0.5, 200), "dearer": Comparison(0.03, low, 0.05, 0.5, 200)}
    assert judging.kept_student("dear", behind, ["dear", "cheap", "dearer"], COSTS, "dearer") == kept
    assert judging.kept_student("dear", behind, ["dear", "cheap", "dearer"], COSTS, "dear") == "dear"


def test_keep(quick, small_graph, tmp_path):
    few = quick.updated({section: {"max_epochs": 4} for section in ("teacher", "mlp", "rbm")})
    for keep in ("mlp", "rbm", "labels"):
        result = rbm.distill(small_graph, config=few, keep=keep, folder=tmp_path / keep, measure_latency=False)
        assert result.method == result.summary["verdict"]["kept"] == keep
        assert (
            f"Kept: {'MLP on labels' if keep == 'labels' else keep.replace('mlp', 'MLP').replace('rbm', 'RbM')}"
            in (tmp_path / keep / "results.md").read_text()
        )
        saved = rbm.load(tmp_path / keep)
        assert torch.equal(saved(result.student_inputs()), result.student(result.student_inputs()))
    with pytest.raises(ValueError, match="keep is 'glnn', expected one of mlp, rbm, labels, which this run trains"):
        rbm.distill(small_graph, config=quick, keep="glnn")
    with pytest.raises(ValueError, match="expected one of rbm, which this run trains"):
        rbm.distill(small_graph, config=quick, methods=["rbm"], keep="labels", labels_alone=False)


def test_without_the_mlp_of_labels(quick, small_graph):
    result = rbm.distill(small_graph, config=quick, methods=["rbm"], labels_alone=False, measure_latency=False)
    assert list(result.students) == ["rbm"]
    assert result.summary["verdict"]["teacher_gain"] is None
    assert not any(sentence.startswith("Teacher") for sentence in result.verdict)


def test_the_mlp_of_labels_learns_from_nothing_else(quick, small_graph):
    """Neither the graph nor the teacher changes it."""
    lies = 8.0 * torch.nn.functional.one_hot((small_graph.y + 1) % 3, 3).float()
    other = Data(**small_graph.to_dict() | {"edge_index": small_graph.edge_index[:, :5]})
    runs = [(small_graph, None), (small_graph, lies), (other, None)]
    first, *others = (
        rbm.distill(graph, teacher, config=quick, methods=["labels"], measure_latency=False).student.state_dict()
        for graph, teacher in runs
    )
    assert all(torch.equal(state[name], tensor) for state in others for name, tensor in first.items())


def test_a_sentence_for_what_each_student_needs(quick, small_graph):
    config = quick.updated({"encoding": {"deepwalk": True, "embedding_dim": 4}, "glnn": {"max_epochs": 3}})
    result = rbm.distill(small_graph, config=config, methods=["glnn", "mlp"], measure_latency=False)
    assert result.summary["verdict"]["needs"] == {
        "glnn": {"features": 12, "encodings": 0},
        "mlp": {"features": 12, "encodings": 4},
        "labels": {"features": 12, "encodings": 0},
    }
    assert result.verdict[-1] == (
        "Rows to predict: GLNN and MLP on labels: features alone; MLP student: features and 4 encodings of the node's"
        " place in the graph (for a new node, from those of its neighbours); --features-only trains without them,"
        " which may be better or worse, and --auto chooses by validation."
    )


def test_no_step_is_shown_for_encodings_that_nobody_asked_for(quick, small_graph):
    console, few = Console(file=StringIO()), quick.updated({"teacher": {"max_epochs": 3}, "mlp": {"max_epochs": 3}})
    rbm.distill(small_graph, config=few, methods=["mlp"], labels_alone=False, measure_latency=False, console=console)
    lines = console.file.getvalue().splitlines()
    assert any(line.startswith("mlp ") for line in lines)
    assert not any(line.startswith("encodings") for line in lines)


def test_the_walks_of_encodings_are_counted(quick, small_graph, monkeypatch):
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    few = {"teacher": {"max_epochs": 3}, "mlp": {"max_epochs": 3}, "encoding": {"deepwalk": True, "embedding_dim": 4}}
    console, config = Console(file=StringIO()), quick.updated(few)
    rbm.distill(small_graph, config=config, methods=["mlp"], labels_alone=False, measure_latency=False, console=console)
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("encodings")]
    walks = 5 * small_graph.num_nodes
    assert len(lines) > 1
    assert all(f"/{walks}" in line for line in lines)
    assert lines[-1].startswith(f"encodings  {walks}/{walks}")


@pytest.mark.parametrize("edges", [torch.empty(2, 0, dtype=torch.int64), torch.arange(60).expand(2, -1)])
def test_a_run_without_edges_warns_once_and_says_so(small_graph, edges, tmp_path, caplog):
    small_graph.edge_index = edges.contiguous()
    few = {"max_epochs": 2, "min_epochs": 0}
    config = rbm.Config().updated({"teacher": few, "mlp": few, "rbm": few})
    found = rbm.distill(small_graph, config=config, folder=tmp_path, measure_latency=False)
    told = [record.getMessage() for record in caplog.records if record.name == "rbm" and "edge" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("data.edge_index: no edge joins two nodes, so a teacher sees no more than an MLP")
    assert found.verdict[0].startswith("Graph: no edge joins two nodes")
    assert float(found.encodings["mlp"].full.abs().sum()) == 0


def test_the_lead_of_a_teacher_is_measured_on_validation_nodes(quick, small_graph):
    few = quick.updated({"mlp": {"max_epochs": 1}})
    found = rbm.distill(small_graph, config=few, methods=["mlp"], measure_latency=False).summary["verdict"]
    accuracy = found["accuracy"]
    assert found["teacher"] == "sage"
    assert found["teacher_lead"]["difference"] == pytest.approx(accuracy["teacher"] - accuracy["mlp"])


def test_the_command_says_it_and_keeps_what_it_is_told(command, tmp_path):
    quick = [f"--set={section}.max_epochs=3" for section in ("teacher", "mlp", "rbm")] + [
        "--set=encoding.deepwalk=false"
    ]
    run = ["distill", "--no-plots", "--cache", tmp_path / "cache", *quick]
    status, out, _ = command(*run, "--out", tmp_path / "run", "--keep", "rbm")
    assert status == 0
    said = " ".join(out.split())
    for begin in (
        "Graph: homophilous;",
        "Teacher:",
        "Best student:",
        "Kept: RbM student, as requested",
        "Rows to predict:",
    ):
        assert begin in said
    assert type(rbm.load(tmp_path / "run")).__name__ == "RbMStudent"
    status, _, err = command(*run, "--out", tmp_path / "other", "--keep", "gnn")
    assert (status, "keep is 'gnn', expected one of mlp, rbm, labels" in err) == (2, True)
    assert not (tmp_path / "other").exists()
    status, _, err = command(*run, "--seeds", "0-1", "--keep", "rbm")
    assert (status, "--keep is about a run folder" in err) == (2, True)
    text = (tmp_path / "run" / "results.md").read_text()
    assert re.search(r"^- Graph: ", text, re.MULTILINE)

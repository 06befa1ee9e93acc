"""Latency of predictions: percentiles for a run's student, an MLP and the teacher on the run's own graph."""

import itertools
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rbm
from rbm.config import Config
from rbm.distillation import latency
from rbm.distillation.latency import milliseconds, neighborhood_answer
from rbm.distillation.report.finished import read_distillation
from rbm.distillation.run_graph import split_of_run
from rbm.nn.moe import MoEStudent
from rbm.nn.students import EnsembleStudent
from rbm.serving import latency as measuring
from rbm.serving.latency import measure_run, one_expert_mlp
from rbm.teachers import LabelInput, build_teacher
from rbm.training.run_folder import load
from rbm.utils.files import read_json

SHORT = {"max_epochs": 2, "min_epochs": 0}
QUICK = {"teacher": SHORT, "mlp": SHORT, "rbm": {**SHORT, "pretrain_epochs": 0}, "encoding": {"deepwalk": False}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Digits, with a column of encodings that the run folder keeps."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    encodings = [torch.randn(1797, 3)]
    config = Config().updated(QUICK)
    options = {"encodings": encodings, "keep": "rbm", "measure_latency": False}
    rbm.distill(rbm.load_dataset("digits"), config=config, folder=folder, **options)
    return folder


def clock(monkeypatch, step: float) -> None:
    """Make the clock advance by ``step`` seconds at each reading."""
    ticks = itertools.count()
    monkeypatch.setattr(latency, "time", SimpleNamespace(perf_counter=lambda: step * next(ticks)))


def test_a_run_that_cannot_be_written_to_is_told_before_measuring(run, monkeypatch):
    monkeypatch.setattr(measuring, "milliseconds", None)
    monkeypatch.setattr("os.access", lambda folder, mode: folder != run)
    with pytest.raises(PermissionError, match=r"no permission to write to .*; measure a copy of it, or allow it"):
        measure_run(run)


def test_what_json_does_not_hold_is_converted_before_measuring(run):
    """Regression test: the file could not be written, after everything was measured."""
    found = measure_run(run, batch_sizes=[np.int64(2)], repeats=1, device=torch.device("cpu"))
    assert found == read_json(run / "latency.json")
    assert (found["device"], found["rows"][0]["batch_size"]) == ("cpu", 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "tpu"}, ValueError, "device is 'tpu', expected cpu, cuda"),
        ({"device": "cuda:99"}, ValueError, "device is 'cuda:99', which is not usable here"),
        ({"device": None}, TypeError, "device is None, expected cpu"),
        ({"batch_sizes": [True]}, ValueError, r"batch_sizes: got \[True\], expected whole numbers"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(run, monkeypatch, options, error, message):
    monkeypatch.setattr(measuring, "milliseconds", None)
    with pytest.raises(error, match=message):
        measure_run(run, **options)


def test_calls_are_counted_and_timed(monkeypatch):
    seen = []
    clock(monkeypatch, 0.5)
    assert milliseconds(seen.append, itertools.count(), 25) == [500.0] * 25
    assert seen == list(range(26)), "a warm-up call first, and an input of its own for each"


def test_slow_calls_are_fewer(monkeypatch):
    clock(monkeypatch, 1.0)
    assert len(milliseconds(int, itertools.repeat(0), 200, seconds=10.0)) == 20, "of fewer no percentile is taken"
    clock(monkeypatch, 1.0)
    # Two clock readings per call, and a third from the twentieth call on.
    assert len(milliseconds(int, itertools.repeat(0), 200, seconds=90.0)) == 20 + 17
    clock(monkeypatch, 1.0)
    assert len(milliseconds(int, itertools.repeat(0), 5, seconds=0.0)) == 5


@pytest.mark.parametrize(("num_layers", "reuses"), [(2, None), (3, None), (2, 0), (2, 1)])
def test_a_neighborhood_is_all_that_a_teacher_needs(small_graph, num_layers, reuses):
    width = 12 if reuses is None else 15
    teacher = build_teacher("sage", width, 3, hidden_channels=8, num_layers=num_layers).eval()
    if reuses is not None:
        teacher = LabelInput(teacher, [], 3, iterations=reuses).eval()
    nodes = torch.tensor([41, 3, 3, 59])
    with torch.no_grad():
        expected = teacher(small_graph.x, small_graph.edge_index)[nodes]
        torch.testing.assert_close(neighborhood_answer(teacher, small_graph, num_layers)(nodes), expected)
        fewer = neighborhood_answer(teacher, small_graph, num_layers - 1)(nodes)
    assert not torch.allclose(fewer, expected, atol=1e-3), "fewer hops would not do"


def test_the_mlp_is_as_wide_as_an_expert():
    for student in (rbm.RbMStudent(12, 8, 3, num_layers=3, norm="batch"), MoEStudent(12, 8, 3, num_layers=3)):
        mlp = one_expert_mlp(student.eval()).eval()
        assert [tuple(layer.weight.shape) for layer in mlp.layers] == [(8, 12), (8, 8), (3, 8)]
        assert [type(norm) for norm in mlp.norms] == [type(norm) for norm in student.norms]
        assert mlp(torch.randn(2, 12)).shape == (2, 3)
    ensemble = EnsembleStudent(3, in_channels=12, hidden_channels=8, out_channels=3)
    assert one_expert_mlp(ensemble) is ensemble.members[0]
    assert one_expert_mlp(rbm.MLPStudent(12, 8, 3)) is None


def test_a_run_is_measured_on_its_own_graph(run, monkeypatch):
    asked = {"student": set(), "teacher": set()}
    forward = rbm.RbMStudent.forward
    known = torch.cat([rbm.load_dataset("digits").x, rbm.training.run_folder.load_encodings(run)], dim=1)

    def spy(student, x):
        assert all((row == known).all(1).any() for row in x[:2]), "features and encodings of nodes of the graph"
        asked["student"].add(x.shape)
        return forward(student, x)

    def spying_answer(teacher, graph, num_layers):
        assert (graph.num_nodes, num_layers) == (1797, 2)
        answer = neighborhood_answer(teacher, graph, num_layers)
        return lambda nodes: (asked["teacher"].add(nodes.shape), answer(nodes))

    monkeypatch.setattr(rbm.RbMStudent, "forward", spy)
    monkeypatch.setattr(measuring, "neighborhood_answer", spying_answer)
    found = measure_run(run, batch_sizes=(1, 7), repeats=5)
    assert asked == {"student": {(1, 67), (7, 67)}, "teacher": {(1,), (7,)}}
    assert json.loads((run / "latency.json").read_text()) == found
    names = [(row["model"], row["batch_size"]) for row in found["rows"]]
    assert names == [(model, batch) for batch in (1, 7) for model in ("rbm", "one_expert", "teacher")]
    for row in found["rows"]:
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
        assert row["calls"] == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_the_process_changes_nothing(run, dtype):
    expected = read_distillation(run).teacher_logits
    torch.set_default_dtype(dtype)
    try:
        found = measure_run(run, batch_sizes=[1], repeats=1)
        again = read_distillation(run)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [row["model"] for row in found["rows"]] == ["rbm", "one_expert", "teacher"]
    assert next(again.teacher.parameters()).dtype == torch.float32
    assert torch.equal(again.teacher_logits, expected)


def test_weights_of_8_bits_are_timed_beside_float32(run):
    found = measure_run(run, batch_sizes=(2,), repeats=2, quantize="int8")
    assert [row["model"] for row in found["rows"]] == ["rbm", "float32", "one_expert", "teacher"]
    assert [row["title"] for row in found["rows"]][:2] == ["RbM student, int8", "RbM student, float32"]
    assert json.loads((run / "latency-int8.json").read_text()) == found


def test_percentiles(run, monkeypatch):
    times = iter([np.arange(1.0, 101.0)] * 3)
    monkeypatch.setattr(measuring, "milliseconds", lambda *_, **__: next(times).tolist())
    row = measure_run(run, batch_sizes=(1,))["rows"][0]
    assert (row["p50_ms"], row["p95_ms"], row["p99_ms"]) == (50.5, 95.05, 99.01)


@pytest.fixture
def command(command):
    return partial(command, "latency")


def test_command(run, command):
    status, out, _ = command(run, "--batch-sizes", "1,3", "--repeats", "3")
    assert status == 0
    for text in ("RbM student", "MLP of one expert's width", "Teacher, with neighbourhood", "p99", "1 x"):
        assert text in out
    assert (run / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_with_logits_for_a_teacher_has_no_row_for_one(tmp_path):
    data = rbm.load_dataset("digits")
    config = Config().updated(QUICK)
    logits = 9.0 * torch.nn.functional.one_hot(data.y, 10).float()
    rbm.distill(data, logits, config=config, methods=["mlp"], folder=tmp_path / "run", measure_latency=False)
    found = measure_run(tmp_path / "run", batch_sizes=(2,), repeats=2)
    assert [row["model"] for row in found["rows"]] == ["mlp"]
    assert found["teacher"] is None


def test_mistakes(run, small_graph, tmp_path, command):
    assert "batch-sizes: got '1,x', expected whole numbers" in command(run, "--batch-sizes", "1,x")[2]
    assert "batch_sizes: got [0], expected whole numbers of at least 1" in command(run, "--batch-sizes", "0")[2]
    assert "repeats: got 0" in command(run, "--repeats", 0)[2]
    assert "holds no student.json" in command(tmp_path)[2]
    config = Config().updated(QUICK)
    folder = tmp_path / "run"
    rbm.distill(small_graph, config=config, methods=["mlp"], folder=folder, measure_latency=False)
    assert load(folder)
    (folder / "graph.safetensors").unlink()
    status, _, error = command(folder)
    assert status == 2
    assert "a graph that rbm.distill was given as an object, and has no graph.safetensors" in error
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("own graph", "digits"))
    status, _, error = command(folder)
    assert status == 2
    assert "was made on a graph of 60 nodes, and its dataset 'digits' has 1,797" in error
    assert not (folder / "latency.json").exists()


def test_a_graph_file_that_was_moved(small_graph, tmp_path, command):
    """The run folder keeps the graph. Without it, as in earlier versions, the message says where the path is kept; with
    the new path there, the run works again.
    """
    torch.save(small_graph, tmp_path / "graph.pt")
    folder, config = tmp_path / "run", Config().updated({**QUICK, "dataset": str(tmp_path / "graph.pt")})
    rbm.distill(small_graph, config=config, methods=["mlp"], folder=folder, measure_latency=False)
    (tmp_path / "graph.pt").rename(tmp_path / "moved.pt")
    arguments = (folder, "--batch-sizes", "1", "--repeats", "1")
    assert command(*arguments)[0] == 0
    (folder / "graph.safetensors").unlink()
    status, _, error = command(*arguments)
    assert status == 2
    assert f"if it was moved, write its new path as dataset into {folder / 'config.yaml'}" in error
    stored = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(stored.replace("graph.pt", "moved.pt"))
    assert command(*arguments)[0] == 0


@pytest.mark.parametrize("kind", ["dense", "csr"])
def test_a_run_on_a_graph_of_ones_own(small_graph, tmp_path, command, kind):
    """The graph is given as an object; the run folder stores it under its name."""
    graph, folder = small_graph.clone(), tmp_path / "run"
    graph.name = "papers"
    if kind == "csr":
        graph.x = graph.x.relu().to_sparse_csr()
    config = Config().updated({**QUICK, "setting": "inductive"})
    rbm.distill(graph, config=config, methods=["mlp"], folder=folder, unseen_fraction=0.5, measure_latency=False)
    assert command(folder, "--batch-sizes", "1", "--repeats", "1")[0] == 0
    split, classes = split_of_run(folder, Config.from_yaml(folder / "config.yaml"))
    kept = split.graph
    assert kept.x.layout == graph.x.layout
    assert torch.equal(kept.x.to_dense(), graph.x.to_dense())
    for name in ("edge_index", "y", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(kept[name], graph[name])
    assert (classes, len(split.unseen_nodes)) == (3, int(0.5 * graph.test_mask.sum()))
    assert read_json(folder / "latency.json")["dataset"] == "papers"


def test_a_large_graph_is_not_kept(small_graph, tmp_path, monkeypatch):
    monkeypatch.setattr("rbm.distillation.run_graph.MOST_BYTES", 1000)
    config = Config().updated(QUICK)
    rbm.distill(small_graph, config=config, methods=["mlp"], folder=tmp_path / "run", measure_latency=False)
    assert not (tmp_path / "run" / "graph.safetensors").exists()


@pytest.mark.parametrize("method", ["mlp", "sign"])
def test_a_graph_of_float16_features(small_graph, tmp_path, method):
    small_graph.x = small_graph.x.half()
    config = Config().updated({**QUICK, "sign": SHORT})
    rbm.distill(small_graph, config=config, methods=[method], labels_alone=False, folder=tmp_path / "run")
    found = measure_run(tmp_path / "run", batch_sizes=(2,), repeats=1)
    assert {row["model"] for row in found["rows"]} >= {method, "teacher"}

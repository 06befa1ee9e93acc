"""SIGN: stored hops are powers of the mean over neighbours; a new node's hops come from its neighbours' stored ones."""

import copy

import pytest
import torch
from saved_runs import forget_files
from torch.nn import functional as F

import rbm
from rbm.config import Config, SIGNConfig
from rbm.datasets.encodings import transfer
from rbm.datasets.encodings.hops import hop_encodings, neighbor_means, passed_on
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.sign import SIGNTrainer
from rbm.nn.students import SIGNStudent
from rbm.serving.latency import measure_run, new_node_answer
from rbm.serving.prediction import predict_file
from rbm.serving.server.requests import _joined
from rbm.serving.server.student import open_student
from rbm.teachers.outputs import outputs_from_logits
from rbm.training.run_folder import load_encodings


def mean_matrix(edge_index: torch.Tensor, count: int) -> torch.Tensor:
    counts = torch.zeros(count, count)
    for u, v in edge_index.T.tolist():
        counts[v, u] += u != v
    return counts / counts.sum(1, keepdim=True).clamp_min(1)


def test_hops_are_powers_of_the_mean_over_neighbours(directed_graph):
    x, mean = directed_graph.x, mean_matrix(directed_graph.edge_index, 40)
    expected = torch.cat([mean @ x, mean @ mean @ x, mean @ mean @ mean @ x], dim=1)
    torch.testing.assert_close(neighbor_means(x, directed_graph.edge_index, 3), expected)
    found = hop_encodings(split_graph(directed_graph), 3)
    torch.testing.assert_close(found.full, expected)
    assert torch.equal(found.features, x)
    assert hop_encodings(split_graph(directed_graph), 0) is None


@pytest.mark.parametrize("loops", [False, True])
def test_an_unseen_node_takes_what_observed_neighbours_have_stored(small_graph, loops):
    edges = small_graph.edge_index
    if loops:  # an unseen node cannot use its own, so observed nodes must not either
        small_graph.edge_index = torch.cat([edges, torch.arange(60).expand(2, -1)], dim=1)
    split = split_graph(small_graph, "inductive", unseen_fraction=0.4)
    found = hop_encodings(split, 2)
    mean = mean_matrix(split.observed.edge_index, split.observed.num_nodes)
    x = split.observed.x
    torch.testing.assert_close(found.observed, torch.cat([mean @ x, mean @ mean @ x], dim=1))
    for node in split.unseen_nodes.tolist():
        sources = edges[0, edges[1] == node]
        rows = [split.observed_nodes.tolist().index(u) for u in sources.tolist() if u in split.observed_nodes]
        expected = torch.cat([x[rows].mean(0), (mean @ x)[rows].mean(0)]) if rows else torch.zeros(24)
        torch.testing.assert_close(found.full[node], expected)


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_loss(split, teacher_outputs, weight):
    config = SIGNConfig(hidden_channels=8, dropout=0.0, label_weight=weight, hops=1)
    encodings = hop_encodings(split, 1)
    ours = SIGNTrainer(SIGNStudent(12, 8, 4), split, teacher_outputs, config, encodings)
    observed = split.observed
    mean = mean_matrix(observed.edge_index, observed.num_nodes)
    logits = ours.model(torch.cat([observed.x, mean @ observed.x], dim=1))
    hard = F.cross_entropy(logits[observed.train_mask], observed.y[observed.train_mask])
    p = teacher_outputs.soft_labels.softmax(-1)
    soft = (p * (p.log() - logits.log_softmax(-1))).sum(-1).mean()
    assert ours.train_epoch(0) == pytest.approx((weight * hard + (1 - weight) * soft).item(), rel=1e-5)


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_sparse_features_train_without_their_hops(small_graph, setting, weight):
    loops = torch.arange(60).expand(2, -1)
    small_graph.edge_index = torch.cat([small_graph.edge_index, loops], dim=1)
    small_graph.x = small_graph.x * (torch.rand(60, 12) < 0.3)
    sparse = small_graph.clone()
    sparse.x = sparse.x.to_sparse_csr()
    config, results = SIGNConfig(hidden_channels=8, label_weight=weight, hops=3), []
    student = SIGNStudent(48, 8, 4, dropout=0.5, norm="batch")
    for graph in (small_graph, sparse):
        torch.manual_seed(0)
        split = split_graph(graph, setting, unseen_fraction=0.4)
        outputs = outputs_from_logits(torch.randn(60, 4), split)
        trainer = SIGNTrainer(copy.deepcopy(student), split, outputs, config, hop_encodings(split, 3))
        assert (trainer.full_layer is None) == (graph is small_graph)
        trainer.optimizer = trainer.build_optimizer()
        losses = [trainer.train_epoch(epoch) for epoch in range(3)]
        trainer.model.eval()
        with torch.no_grad():
            results.append((torch.tensor(losses), trainer.all_logits(), trainer.model(trainer.full_x)))
    # Sums in another order, and Adam's first steps, which only see the sign of a small gradient.
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(results[1][1], results[1][2], rtol=1e-4, atol=1e-4)


def test_too_many_numbers_are_refused_before_any_work(small_graph, quick, tmp_path):
    message = r"sign\.hops is 10000000: of 60 nodes with 12 features .*expected at most"
    with pytest.raises(ValueError, match=message):
        hop_encodings(split_graph(small_graph), 10_000_000)
    config = quick.updated({"sign": {"hops": 10_000_000}})
    with pytest.raises(ValueError, match=message):
        rbm.distill(small_graph, config=config, methods=["sign"], folder=tmp_path / "run")
    assert not (tmp_path / "run").exists(), "the teacher would have been trained first"


@pytest.fixture
def run(small_graph, quick, tmp_path):
    config = quick.updated({"setting": "inductive", "teacher": {"max_epochs": 2}, "sign": {"max_epochs": 3}})
    folder = tmp_path / "run"
    result = rbm.distill(
        small_graph, config=config, methods=["sign"], folder=folder, unseen_fraction=0.4, measure_latency=False
    )
    return result, folder


def test_a_new_node_is_served_as_unseen_nodes_are(run, small_graph, tmp_path, caplog):
    result, folder = run
    split, stored = result.split, load_encodings(folder)
    given = load_encodings(folder, passed_on=True)
    assert torch.equal(given, passed_on(small_graph.x, stored))
    assert "stored means of its neighbours' features" in rbm.load(folder).row
    assert "passed_on=True" in caplog.text
    # Serving only has the observed graph's stored rows and the edges to unseen nodes.
    nodes = split.unseen_nodes
    seen = split.observed_nodes
    arriving = transfer(given[seen], seen, small_graph.edge_index, 60)[nodes]
    torch.testing.assert_close(arriving, stored[nodes])
    edges = [
        (row, int(u))
        for row, node in enumerate(nodes.tolist())
        for u in small_graph.edge_index[0, small_graph.edge_index[1] == node]
        if int(u) in seen
    ]
    (tmp_path / "edges.csv").write_text("".join(f"{row},{u}\n" for row, u in edges))
    (tmp_path / "x.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in small_graph.x[nodes].tolist()))
    predict_file(folder, tmp_path / "x.csv", tmp_path / "out.npy", neighbors=tmp_path / "edges.csv")
    import numpy as np

    expected = result.student(result.student_inputs()[nodes]).softmax(-1).detach().numpy()
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-5)
    lists = [[u for row, u in edges if row == place] for place in range(len(nodes))]
    torch.testing.assert_close(_joined(lists, len(nodes), open_student(folder)), stored[nodes])


def test_the_latency_of_new_nodes_has_the_mean_over_neighbours(run, small_graph):
    result, folder = run
    given = load_encodings(folder, passed_on=True)
    nodes = torch.tensor([41, 3, 3, 59])
    means = mean_matrix(small_graph.edge_index, 60) @ given
    with torch.no_grad():
        expected = result.student(torch.cat([small_graph.x, means], dim=1)[nodes])
        torch.testing.assert_close(new_node_answer(result.student, small_graph, given)(nodes), expected)


def test_latency_has_a_row_for_new_nodes(tmp_path):
    data = rbm.load_dataset("digits")
    short = {"max_epochs": 1, "min_epochs": 0}
    config = Config().updated({"teacher": short, "sign": {**short, "hops": 1}})
    rbm.distill(data, config=config, methods=["sign"], folder=tmp_path, labels_alone=False, measure_latency=False)
    assert load_encodings(tmp_path).shape == data.x.shape, "as many hops as asked for"
    found = measure_run(tmp_path, batch_sizes=(2,), repeats=2)
    assert [row["title"] for row in found["rows"]] == ["SIGN", "SIGN, new nodes", "Teacher, with neighbourhood"]


def test_the_verdict_says_what_is_stored(run):
    needed = run[0].verdict[-1]
    means = "SIGN: features and 36 stored means of its neighbours' features, hop by hop (for a new node, one mean"
    assert means in needed


def test_the_server_says_what_is_stored(run):
    info = open_student(run[1]).info()
    assert info["rows"].startswith("12 features and 36 stored means of its neighbours' features, hop by hop; or the 12")


def test_damaged_hops_are_refused(run):
    from rbm.utils.tensor_files import read_sealed, sealed

    path = run[1] / "encodings.safetensors"
    tensors, _ = read_sealed(path)
    path.write_bytes(sealed({**tensors, "features": tensors["features"][:, :5]}))
    with pytest.raises(ValueError, match=r"encodings\.safetensors is not the file that .* describes"):
        load_encodings(run[1])
    forget_files(run[1])
    with pytest.raises(ValueError, match=r"is damaged: it holds stored hops \[60, 36\] and features \[60, 5\]"):
        load_encodings(run[1], passed_on=True)

"""CoHOp's rounds: the contrast of neighbours, pseudo-labels, and the labels that each of them reads."""

import pytest
import torch

import rbm
from rbm.config import CoHOpConfig, Config
from rbm.datasets.encodings import Encodings
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.cohop import CoHOpTrainer, contrast_loss, histogram_encodings, train_cohop
from rbm.distillation.soft_targets import Neighborhood
from rbm.distillation.task import DistillationTask
from rbm.nn.parameters import count_parameters
from rbm.nn.students import CoHOpStudent
from rbm.training.run_folder import RunFolder
from rbm.utils.progress import Progress


def in_neighbors(edge_index, node) -> list[int]:
    return [u for u, v in edge_index.T.tolist() if v == node != u]


def plain_contrast(logits, edge_index):
    """Mean over nodes of the mean over their in-neighbours; zero for a node without in-neighbours."""
    total = 0.0
    for v in range(len(logits)):
        neighbors = in_neighbors(edge_index, v)
        for u in neighbors:
            total = total - (logits[v].softmax(-1) * logits[u].log_softmax(-1)).sum() / len(neighbors)
    return total / len(logits)


def trainer_of(split, labels=None, **options) -> CoHOpTrainer:
    observed = split.observed
    if labels is None:
        labels = torch.where(observed.train_mask, observed.y, -1)
    encodings = Encodings(torch.rand(observed.num_nodes, 4), torch.rand(split.graph.num_nodes, 4))
    return CoHOpTrainer(CoHOpStudent(10, 8, 4), split, CoHOpConfig(**options), encodings, labels)


def test_contrast_equals_a_loop(directed_graph):
    logits = torch.randn(40, 4, requires_grad=True)
    loss = contrast_loss(logits.log_softmax(-1), Neighborhood(directed_graph.edge_index, 40))
    expected = plain_contrast(logits, directed_graph.edge_index)
    torch.testing.assert_close(loss, expected)
    gradients = (torch.autograd.grad(value, logits)[0] for value in (loss, expected))
    torch.testing.assert_close(*gradients)


def test_an_epoch_learns_labels_and_contrast(split):
    observed = split.observed
    labels = torch.where(torch.rand(observed.num_nodes) < 0.5, torch.randint(0, 4, (observed.num_nodes,)), -1)
    ours = trainer_of(split, labels, contrast_weight=0.7)
    logits = ours.model(ours.observed_x)
    labelled = [row.log_softmax(-1)[label] for row, label in zip(logits, labels.tolist(), strict=True) if label >= 0]
    expected = 0.7 * plain_contrast(logits, observed.edge_index) - sum(labelled) / len(labelled)
    gradients = torch.autograd.grad(expected, list(ours.model.parameters()))
    assert ours.train_epoch(0) == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(ours.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert trainer_of(split, contrast_weight=0.0).train_epoch(0) > 0


@pytest.mark.parametrize("threshold", [0.2, 0.4, 0.6])
def test_labels_of_the_next_round(split, threshold):
    ours, observed = trainer_of(split, threshold=threshold), split.observed
    ours.model.eval()
    with torch.no_grad():
        predicted = (3 * ours.model(ours.observed_x)).softmax(-1)
        ours.model.layers[0].weight.mul_(3)
        ours.model.layers[0].bias.mul_(3)
    labels = ours.next_labels()

    train = observed.train_mask
    predicted[train] = torch.eye(4)[observed.y[train]]
    around = torch.zeros_like(predicted)
    for v in range(len(predicted)):
        if neighbors := in_neighbors(observed.edge_index, v):
            around[v] = predicted[neighbors].mean(0)
    known = observed.val_mask
    best, smoothed = -1.0, None
    for percent in range(101):
        mixed = percent / 100 * predicted + (1 - percent / 100) * around
        score = (mixed[known].argmax(-1) == observed.y[known]).float().mean()
        if score > best:
            best, smoothed = score, mixed
    sure, classes = smoothed.max(-1)
    assert torch.equal(labels[train], observed.y[train])
    assert torch.equal(labels[~train], torch.where(sure > threshold, classes, -1)[~train])
    assert threshold < 0.4 or (labels == -1).any()
    assert (labels[~train] >= 0).any()


def test_a_confidence_at_the_threshold_is_not_enough(directed_graph):
    """Node 39 has the prediction of its only neighbour, node 38: a quarter for each class."""
    directed_graph.edge_index = torch.tensor([[38], [39]])
    directed_graph.train_mask = torch.arange(40) < 8
    directed_graph.val_mask = torch.arange(40) == 38

    def label_of_node_39(threshold: float) -> int:
        ours = trainer_of(split_graph(directed_graph), threshold=threshold)
        with torch.no_grad():
            for parameter in ours.model.parameters():
                parameter.zero_()
        return int(ours.next_labels()[39])

    assert label_of_node_39(0.25) == -1
    assert label_of_node_39(0.2499) >= 0


def test_validation_chooses_the_smoothing(directed_graph):
    """Node 1, a validation node, has class 2 by its own logits, and class 3 by its only neighbour, training node 0."""
    directed_graph.edge_index = torch.tensor([[0], [1]])
    directed_graph.val_mask = torch.arange(40) == 1
    directed_graph.y[0] = 3

    def label_of_node_1(truth: int) -> int:
        directed_graph.y[1] = truth
        ours = trainer_of(split_graph(directed_graph))
        with torch.no_grad():
            ours.model.layers[0].weight.zero_()
            ours.model.layers[0].bias.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0]))
        return int(ours.next_labels()[1])

    assert label_of_node_1(truth=2) == 2
    assert label_of_node_1(truth=3) == 3


def test_validation_chooses_the_round(split, teacher_outputs, monkeypatch):
    rounds = [
        {"val_accuracy": val, "test_accuracy": test, "test_max": test, "best_epoch": 2, "epochs": 5}
        for val, test in ((0.5, 0.9), (0.7, 0.2), (0.7, 0.8), (0.6, 0.8))
    ]
    config = Config().updated({"cohop": {"rounds": 4}})
    task = DistillationTask(split, teacher_outputs, config, 4, lambda section: None, None, Progress(None))

    observed, numbers = split.observed, torch.arange(split.observed.num_nodes)
    monkeypatch.setattr(CoHOpTrainer, "next_labels", lambda trainer: (trainer.labels + 1).where(numbers > 2, -1))

    def fit(phase, trainer, network):
        number = int(phase.removeprefix("cohop-"))
        labels = torch.where(observed.train_mask, observed.y, -1)
        for _ in range(number):
            labels = (labels + 1).where(numbers > 2, -1)
        assert torch.equal(trainer.labels, labels), "those of training nodes, then those that the last round left"
        for parameter in trainer.model.parameters():
            torch.nn.init.constant_(parameter, float(number))
        return rounds[number]

    monkeypatch.setattr(task, "fit", fit)
    trained = train_cohop(task)
    assert all((parameter == 1).all() for parameter in trained.student.parameters()), "the first of the best"
    expected = {"val_accuracy": 0.7, "test_accuracy": 0.2, "test_max": 0.9, "best_epoch": 7, "epochs": 20}
    assert trained.result == expected


def test_two_layers():
    student = CoHOpStudent(10, 8, 4, num_layers=2, dropout=0.5)
    x = torch.randn(30, 10)
    student(x)
    student.eval()
    (first, last), (before, after) = student.layers, student.norms
    torch.testing.assert_close(student(x), last(after(first(before(x)).relu())))
    assert not torch.equal(before.running_mean, torch.zeros(10))
    torch.testing.assert_close(student(x.to_sparse_csr()), student(x))
    assert not torch.equal(student.train()(x), student(x)), "dropout"
    assert count_parameters(CoHOpStudent(10, 8, 4)) == (44, 44), "one layer is a linear map"


def lie(graph, mask):
    lying = graph.clone()
    lying.y = torch.where(mask, (graph.y + 1) % 3, graph.y)
    return lying


@pytest.mark.parametrize("histogram", ["exact", "propagation"])
@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_other_labels_than_those_of_training_reach_no_input(small_graph, setting, histogram):
    lying = lie(small_graph, ~small_graph.train_mask)
    split, wrong = (split_graph(graph, setting, unseen_fraction=0.4) for graph in (small_graph, lying))
    config = CoHOpConfig(histogram=histogram)
    for true, planted in zip(histogram_encodings(split, 3, config), histogram_encodings(wrong, 3, config), strict=True):
        assert torch.equal(true, planted)
    told = split_graph(lie(small_graph, small_graph.train_mask), setting, unseen_fraction=0.4)
    assert not torch.allclose(histogram_encodings(split, 3, config)[1], histogram_encodings(told, 3, config)[1])


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_features_alone(small_graph, quick, tmp_path, setting):
    config = quick.updated({"setting": setting, "cohop": {"histogram": "none"}})
    result = rbm.distill(small_graph, config=config, methods=["cohop"], folder=tmp_path, measure_latency=False)
    assert torch.equal(result.student_inputs(), small_graph.x)
    assert result.summary["cohop"]["val_accuracy"] > 0.6, "a third is chance"
    assert not (tmp_path / "encodings.safetensors").exists()


def test_the_best_round_is_kept(small_graph, quick, tmp_path):
    config = quick.updated({"cohop": {"rounds": 4, "lr": 0.3}})
    result = rbm.distill(small_graph, config=config, methods=["cohop"], folder=tmp_path, measure_latency=False)
    rounds = [RunFolder(tmp_path, result.config, resume=True).finished(f"cohop-{i}") for i in range(4)]
    best = max(range(4), key=lambda i: (rounds[i]["val_accuracy"], -i))
    assert best < 3
    found = result.summary["cohop"]
    assert found["val_accuracy"] == rounds[best]["val_accuracy"]
    assert found["test_accuracy"] == rounds[best]["test_accuracy"]
    assert found["epochs"] == sum(number["epochs"] for number in rounds)
    assert found["best_epoch"] == sum(number["epochs"] for number in rounds[:best]) + rounds[best]["best_epoch"]
    right = (result.student(result.student_inputs()).argmax(-1) == small_graph.y)[small_graph.val_mask]
    assert right.float().mean().item() == pytest.approx(found["val_accuracy"])

"""Reuse of the first layer between evaluation and training: bitwise the same results with half the products."""

import itertools

import pytest
import torch

import rbm
from rbm.config import Config
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.rbm import RbMTrainer
from rbm.distillation.trainer import StudentTrainer
from rbm.nn.first_layer import FirstLayer
from rbm.nn.students import MLPStudent, RbMStudent
from rbm.teachers.outputs import outputs_from_logits
from rbm.training.loop import train_epoch

EPOCHS, PRETRAINED = 5, 2
CONFIG = {
    "rbm": {"num_experts": 4, "top_k": 2, "pretrain_epochs": PRETRAINED},
    "reliability": {"update_start_epoch": 1},
}


def trainer_of(kind, graph, setting="transductive", precision="float32", **student):
    torch.manual_seed(0)
    split = split_graph(graph, setting, unseen_fraction=0.4)
    config = Config().updated(CONFIG)
    outputs = outputs_from_logits(torch.randn(graph.num_nodes, 3), split)
    if kind is MLPStudent:
        trainer = StudentTrainer(MLPStudent(graph.num_features, 8, 3, **student), split, outputs, config)
    else:
        student = RbMStudent(graph.num_features, 8, 3, num_experts=4, top_k=2, **student)
        trainer = RbMTrainer(student, split, outputs, config)
    trainer.precision = precision
    return trainer


def course(trainer) -> list[torch.Tensor]:
    """Losses, accuracies and the whole state after each epoch; saving it updates memories, as the loop does."""
    found = []
    for epoch in range(EPOCHS):
        loss = train_epoch("student", trainer, epoch)
        found += [torch.tensor([loss, *trainer.evaluate()])]
        found += [value.clone() for value in trainer.model.state_dict().values()]
    return found


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize(
    ("kind", "student"),
    [
        (MLPStudent, {"dropout": 0.4}),
        (MLPStudent, {"norm": "batch", "num_layers": 3}),
        (MLPStudent, {"num_layers": 1}),
        (RbMStudent, {}),
        (RbMStudent, {"norm": "layer", "bias": False, "input_attention": False}),
        (RbMStudent, {"dropout": 0.4, "dropout_first_layer": False}),
        (RbMStudent, {"num_layers": 1, "detach_gates": False}),
    ],
)
def test_same_bits_as_without(small_graph, monkeypatch, kind, student, setting, precision):
    found = course(trainer := trainer_of(kind, small_graph, setting, precision, **student))
    assert trainer.first_layer is not None
    assert trainer.first_layer._kept is not None, "or this compares a way with itself"
    monkeypatch.setattr(FirstLayer, "serves", lambda *_: False)
    expected = course(trainer := trainer_of(kind, small_graph, setting, precision, **student))
    assert trainer.first_layer is None
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def counted_course(graph, from_epoch: int) -> list[torch.Tensor]:
    """Like :func:`course`, but the rows of each expert are counted from an epoch's training on; also the counts."""
    trainer = trainer_of(RbMStudent, graph)
    for epoch in range(EPOCHS):
        if epoch == from_epoch:
            rbm.track_usage(trainer.model)
        train_epoch("student", trainer, epoch)
        trainer.evaluate()
    assert trainer.first_layer is None or (trainer.first_layer._kept is None) == (from_epoch < EPOCHS)
    return [*trainer.model.state_dict().values(), *(use.counts for use in rbm.expert_usage(trainer.model).values())]


@pytest.mark.parametrize("from_epoch", [0, PRETRAINED + 1])  # the latter between an evaluation and the next forward
def test_counts_are_those_of_every_forward(small_graph, monkeypatch, from_epoch):
    found = counted_course(small_graph, from_epoch)
    # One training forward and one evaluation per epoch, two experts per row, and a forward for K-means at the start.
    forwards = 2 * (EPOCHS - max(PRETRAINED, from_epoch)) + (from_epoch < PRETRAINED)
    for counts in found[-2:]:
        assert counts.sum() == forwards * 2 * small_graph.num_nodes
    monkeypatch.setattr(FirstLayer, "serves", lambda *_: False)
    for one, other in zip(found, counted_course(small_graph, from_epoch), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [MLPStudent, RbMStudent])
def test_an_epoch_has_one_first_product(small_graph, kind, monkeypatch, precision):
    trainer = trainer_of(kind, small_graph, precision=precision)
    layer, calls = trainer.model.layers[0], []
    forward = type(layer).forward

    def counted(self, *arguments, **options):
        if self is layer:
            calls.append(len(arguments[0]))
        return forward(self, *arguments, **options)

    monkeypatch.setattr(type(layer), "forward", counted)
    course(trainer)
    if kind is MLPStudent:
        assert calls == [small_graph.num_nodes] * (1 + EPOCHS)
    else:  # one for K-means of the second layer's rows, one to begin with
        assert calls == [small_graph.num_nodes] * (2 + EPOCHS - PRETRAINED)


@pytest.mark.parametrize(
    ("kind", "change"),
    [*itertools.product([MLPStudent, RbMStudent], ["weights", "data", "fused step"]), (RbMStudent, "memory")],
)
def test_what_has_moved_since_is_not_taken(small_graph, kind, change):
    trainer = trainer_of(kind, small_graph)
    student, first = trainer.model, trainer.first_layer
    student.pretraining = False
    if kind is RbMStudent:
        student.set_track_memory(False)
    student.eval()
    with torch.no_grad():
        first.logits()
        if change == "weights":
            student.layers[0].weight.mul_(2)
        elif change == "data":  # the version stays
            student.layers[0].weight.data = student.layers[0].weight * 2
        elif change == "fused step":  # and here
            student.layers[0].weight.grad = torch.ones_like(student.layers[0].weight)
            torch.optim.Adam(student.parameters(), lr=0.1, fused=True).step()
        else:
            student.layers[0].memory.copy_(torch.randn_like(student.layers[0].memory))
    student.train()
    logits, trace = first.train()
    with torch.no_grad():
        expected, theirs = student(trainer.observed_x, return_trace=True)
    assert torch.equal(logits, expected)
    assert torch.equal(trace.first, theirs.first)


def test_students_that_drop_their_input_out_are_left_alone(small_graph):
    assert trainer_of(RbMStudent, small_graph, dropout=0.4).first_layer is None
    assert not FirstLayer.serves(MLPStudent(6, 8, 3), torch.randn(4, 6).to_sparse_csr())

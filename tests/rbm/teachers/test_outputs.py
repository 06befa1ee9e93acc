"""Checks of a teacher's outputs before students learn from them."""

import pytest
import torch

import rbm
from rbm.datasets.splits import split_graph
from rbm.teachers.outputs import check_logits, outputs_from_logits, outputs_from_module, warn_of_flat_soft_labels


def test_numbers_that_are_not_probabilities_are_logits():
    check_logits(torch.randn(60, 3).softmax(-1).log(), 60, 3)
    check_logits(torch.rand(60, 3), 60, 3)
    check_logits(torch.zeros(60, 3), 60, 3)
    check_logits(torch.ones(60, 1), 60, 1)


def test_a_negative_number_in_any_row_shows_that_rows_are_not_probabilities():
    logits = torch.eye(3)[torch.arange(60) % 3]
    logits[59] = torch.tensor([-1.0, 1.0, 1.0])  # the sum is one as well
    check_logits(logits, 60, 3)


def right_on_four_of_five(graph) -> torch.Tensor:
    """One-hot rows ``[60, 3]`` that are right on 12 of the 15 validation nodes, and assign five to each class."""
    classes = graph.y.clone()
    wrong = graph.val_mask.nonzero().flatten()[:3]
    classes[wrong] = (classes[wrong] + 1) % 3
    return torch.eye(3)[classes]


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize(("scale", "warned"), [(0.05, True), (0.5, False), (5.0, False)])
def test_soft_labels_close_to_equal_shares_are_reported(small_graph, caplog, setting, scale, warned):
    """At a scale of 0.05, the probability of the predicted class is 0.34, little above 1/3."""
    split = split_graph(small_graph, setting=setting)
    warn_of_flat_soft_labels(outputs_from_logits(scale * right_on_four_of_five(small_graph) - 1, split), split)
    assert ("students learn little about them" in caplog.text) == warned
    if warned:
        assert "right on 80% of the validation nodes that it assigns to classes 0, 1, 2, but with a mean" in caplog.text
        assert "probability of 34% (33% is guessing)" in caplog.text


def test_a_single_class_with_flat_soft_labels_is_reported(small_graph, caplog):
    split, logits = split_graph(small_graph), 5 * right_on_four_of_five(small_graph)
    logits[logits.argmax(1) == 1] *= 0.01
    warn_of_flat_soft_labels(outputs_from_logits(logits - 1, split), split)
    assert "assigns to class 1, but" in caplog.text
    assert "students learn little about it." in caplog.text


def test_classes_of_few_validation_nodes_are_not_judged(small_graph, caplog):
    small_graph.val_mask[15:19] = False  # 11 nodes: four or three of each class
    split = split_graph(small_graph)
    warn_of_flat_soft_labels(outputs_from_logits(0.01 * torch.eye(3)[small_graph.y] - 1, split), split)
    assert not caplog.text


def test_a_teacher_that_only_guesses_is_not_reported(small_graph, caplog):
    """Its soft labels are as flat as they should be."""
    split = split_graph(small_graph)
    warn_of_flat_soft_labels(outputs_from_logits(0.001 * torch.eye(3)[(small_graph.y + 1) % 3] - 1, split), split)
    assert not caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_a_given_module_may_answer_in_any_precision(small_graph, setting, dtype):
    class Other(torch.nn.Module):
        def forward(self, x, edge_index):
            return x[:, :3].to(dtype)

        def embed(self, x, edge_index):
            return x.to(dtype)

    outputs = outputs_from_module(Other(), split_graph(small_graph, setting), 3)
    assert {t.dtype for t in (outputs.soft_labels, outputs.logits, outputs.embedding("a test"))} == {torch.float32}


class Stored(torch.nn.Module):
    """A teacher that answers with what it holds."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, x, edge_index):
        return self.logits


KINDS = {
    "sparse": lambda logits: logits.to_sparse_csr(),
    "nested": lambda logits: torch.nested.nested_tensor([logits], layout=torch.jagged),
    "quantized": lambda logits: torch.quantize_per_tensor(logits, 0.1, 0, torch.qint8),
    "complex": lambda logits: logits.to(torch.complex64),
    "meta": lambda logits: logits.to("meta"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_another_kind_are_named(kind, small_graph):
    """Regression test: they ended in errors of PyTorch."""
    logits = KINDS[kind](torch.randn(60, 3))
    for teacher, what in ((logits, "^teacher logits are"), (Stored(logits), "^teacher is a Stored, which returned")):
        with pytest.raises(ValueError, match=f"{what} a {kind} tensor, expected a dense one of real numbers"):
            rbm.distill(small_graph, teacher, methods=["mlp"])


def test_a_teacher_that_answers_with_a_parameter(small_graph):
    """Regression test: students were trained through it, which failed in the second epoch."""
    logits = torch.randn(60, 3)
    quick = rbm.Config().updated({"mlp": {"max_epochs": 3, "hidden_channels": 8}, "encoding": {"deepwalk": False}})
    options = {"config": quick, "methods": ["mlp"], "measure_latency": False}
    found = rbm.distill(small_graph, Stored(torch.nn.Parameter(logits)), **options)
    assert found.summary["mlp"] == rbm.distill(small_graph, logits, **options).summary["mlp"]

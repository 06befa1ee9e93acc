"""Accuracy, purity of groups and load of experts, on examples by hand."""

import math

import torch

from rbm.nn.students import RbMStudent
from rbm.training.metrics import accuracy, expert_loads, purity


def test_accuracy_of_logits_and_of_classes():
    labels = torch.tensor([0, 1, 2, 1])
    logits = torch.eye(3)[[0, 1, 1, 1]]
    assert accuracy(logits, labels) == accuracy(logits.argmax(-1), labels) == 0.75
    assert math.isnan(accuracy(logits[:0], labels[:0])), "no rows are neither right nor wrong"


def test_purity_counts_the_most_frequent_class_of_each_group():
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 3, 3])
    labels = torch.tensor([2, 2, 2, 0, 2, 2, 1, 2, -1])
    assert purity(groups, labels) == (3 + 2 + 1) / 8


def test_expert_loads_are_shares_of_the_gates_without_dropout():
    student, x = RbMStudent(6, 5, 3, num_experts=4, top_k=2, dropout=0.9).train(), torch.randn(20, 6)
    found = expert_loads(student, x)
    assert student.training, "left as it was"
    routings = student.eval()(x, return_trace=True)[1].routings
    for load, routing in zip(found, routings, strict=True):
        expected = [routing.gates[routing.experts == expert].sum() / 20 for expert in range(4)]
        torch.testing.assert_close(load, torch.stack(expected))

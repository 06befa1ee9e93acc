"""Checks of a teacher's outputs before students learn from them."""

import pytest
import torch

from rbm.datasets.splits import split_graph
from rbm.teachers.outputs import check_logits, outputs_from_logits, warn_of_flat_soft_labels


def test_numbers_that_are_not_probabilities_are_logits():
    check_logits(torch.randn(60, 3).softmax(-1).log(), 60, 3)
    check_logits(torch.rand(60, 3), 60, 3)
    check_logits(torch.zeros(60, 3), 60, 3)
    check_logits(torch.ones(60, 1), 60, 1)


def test_a_negative_number_in_any_row_shows_that_rows_are_not_probabilities():
    logits = torch.eye(3)[torch.arange(60) % 3]
    logits[59] = torch.tensor([-1.0, 1.0, 1.0])  # the sum is one as well
    check_logits(logits, 60, 3)


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize(("scale", "warned"), [(0.05, True), (0.5, False), (5.0, False)])
def test_soft_labels_close_to_equal_shares_are_reported(small_graph, caplog, setting, scale, warned):
    """Two of three validation nodes are right. At a scale of 0.05, the mean probability is 0.34, little above 1/3."""
    split = split_graph(small_graph, setting=setting)
    classes = small_graph.y.clone()
    wrong = small_graph.val_mask.nonzero().flatten()[::3]
    classes[wrong] = (classes[wrong] + 1) % 3
    warn_of_flat_soft_labels(outputs_from_logits(scale * torch.eye(3)[classes] - 1, split), split)
    assert ("students learn little from it" in caplog.text) == warned
    if warned:
        assert "but the mean probability of a predicted class is 34% (33% is guessing)" in caplog.text


def test_a_teacher_that_only_guesses_is_not_reported(small_graph, caplog):
    """Its soft labels are as flat as they should be."""
    split = split_graph(small_graph)
    warn_of_flat_soft_labels(outputs_from_logits(0.001 * torch.eye(3)[(small_graph.y + 1) % 3] - 1, split), split)
    assert not caplog.text

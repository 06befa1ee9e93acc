"""Helpers of evaluations."""

import pytest
from torch import nn

from rbm.nn.evaluation import evaluating


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_the_mode_as_it_was(training):
    module = nn.Sequential(nn.Dropout(0.5)).train(training)
    with evaluating(module):
        assert not module[0].training
    assert module[0].training == training
    with pytest.raises(ZeroDivisionError), evaluating(module):
        1 / 0  # noqa: B018
    assert module[0].training == training


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_the_mode_of_each_part_as_it_was(training):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).train(training)
    module[1].train(not training)
    with evaluating(module):
        assert not any(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == [training, training, not training]

"""Helpers of evaluations."""

import pytest
from torch import nn

from rbm.training.metrics import evaluating


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_the_mode_as_it_was(training):
    module = nn.Sequential(nn.Dropout(0.5)).train(training)
    with evaluating(module):
        assert not module[0].training
    assert module[0].training == training
    with pytest.raises(ZeroDivisionError), evaluating(module):
        1 / 0  # noqa: B018
    assert module[0].training == training

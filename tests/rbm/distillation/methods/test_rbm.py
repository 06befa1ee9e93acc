"""The losses of RbM's layers in its training (Eq. 13)."""

import pytest
import torch
from trained_rbm import trained

from rbm.nn.losses import commitment_loss, load_balance_loss, self_similarity_loss


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_losses_of_all_layers_have_the_weights_of_the_section(small_graph, quick, share):
    weights = {"commitment_weight": 0.3, "self_similarity_weight": 0.2, "load_balance_weight": 0.1}
    trainer = trained(small_graph, quick.updated({"encoding": {"deepwalk": False}, "rbm": weights}), 7)
    trainer.model.eval()
    _, trace = trainer.model(small_graph.x, return_trace=True)
    expected = 0.0
    for routing, layer in zip(trace.routings, trainer.model.layers, strict=True):
        expected += 0.3 * share * commitment_loss(routing)  # the only one that is a mean over the rows of this rank
        expected += 0.2 * self_similarity_loss(layer.memory) + 0.1 * load_balance_loss(routing, 4)
    torch.testing.assert_close(trainer.auxiliary_loss(trace, share), expected)


def test_pretraining_has_none_of_them(small_graph, quick):
    trainer = trained(small_graph, quick.updated({"encoding": {"deepwalk": False}}), 3)
    _, trace = trainer.model(small_graph.x, return_trace=True)
    assert trainer.auxiliary_loss(trace, 1.0) is None

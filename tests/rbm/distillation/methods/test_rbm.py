"""RbM's training: the losses of its layers (Eq. 13), and the groups by which their memory may start."""

from dataclasses import replace

import pytest
import torch
from trained_rbm import trained

from rbm.datasets.splits import split_graph
from rbm.nn.kmeans_init import group_nodes
from rbm.nn.losses import commitment_loss, load_balance_loss, self_similarity_loss
from rbm.teachers.outputs import outputs_from_logits


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


def test_memory_may_start_at_groups_of_the_teachers_classes_or_hidden_rows(small_graph, quick):
    outputs = outputs_from_logits(4 * torch.randn(60, 3), split_graph(small_graph))
    outputs = replace(outputs, hidden=torch.randn(60, 5))
    for start, rows in (("classes", outputs.logits.softmax(-1)), ("teacher", outputs.hidden)):
        config = quick.updated({"seed": 3, "encoding": {"deepwalk": False}, "rbm": {"memory_init": start}})
        groups = trained(small_graph, config, 0, outputs=outputs).groups
        assert groups.tolist() == group_nodes(rows, 4, seed=3).tolist()
    assert trained(small_graph, config.updated({"rbm": {"memory_init": "kmeans"}}), 0, outputs=outputs).groups is None

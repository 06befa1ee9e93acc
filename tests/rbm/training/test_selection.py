"""The nodes that each accuracy counts, and what is selected by them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.data import Data

from rbm.datasets.splits import split_graph
from rbm.training.selection import Accuracies, EpochLimits, Selection, split_accuracies

CLASSES = 3
TRAIN, VAL, TEST = range(4), range(4, 9), range(9, 19)  # of 20 nodes; the last one is in no set


@pytest.fixture
def graph() -> Data:
    position = torch.arange(20)
    masks = {
        name: (position >= nodes.start) & (position < nodes.stop)
        for name, nodes in (("train_mask", TRAIN), ("val_mask", VAL), ("test_mask", TEST))
    }
    order = torch.randperm(20)
    return Data(
        x=torch.randn(20, 2),
        y=torch.randint(CLASSES, (20,)),
        edge_index=torch.randint(20, (2, 40)),
        **{name: mask[order] for name, mask in masks.items()},
    )


def answers(labels: torch.Tensor, right: torch.Tensor, *, as_logits: bool) -> torch.Tensor:
    """Predictions that are right for some nodes and wrong for all others."""
    classes = torch.where(right, labels, (labels + 1) % CLASSES)
    return 5.0 * F.one_hot(classes, CLASSES) if as_logits else classes


@pytest.mark.parametrize("as_logits", [True, False])
@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_each_accuracy_counts_its_own_nodes(graph, setting, as_logits):
    split = split_graph(graph, setting, unseen_fraction=0.4)
    observed = split.observed
    unseen = torch.zeros(20, dtype=torch.bool).index_fill_(0, split.unseen_nodes, True)
    tested = unseen if setting == "inductive" else graph.test_mask
    nowhere, everywhere = torch.zeros_like(tested), torch.ones_like(tested)
    # Predictions on the observed graph that are right on the nodes of one mask; those on the full graph, likewise.
    for mine, theirs, expected in (
        (observed.train_mask, nowhere, (1.0, 0.0, 0.0)),
        (observed.val_mask, nowhere, (0.0, 1.0, 0.0)),
        (split.of_observed(everywhere), nowhere, (1.0, 1.0, 0.0)),
        (split.of_observed(nowhere), tested, (0.0, 0.0, 1.0)),
        (split.of_observed(nowhere), ~tested, (0.0, 0.0, 0.0)),
    ):
        found = split_accuracies(
            answers(observed.y, mine, as_logits=as_logits), answers(graph.y, theirs, as_logits=as_logits), split
        )
        assert found == expected


def test_figures_of_the_float32_model_leave_a_larger_maximum():
    selection, model = Selection(EpochLimits(max_epochs=2, patience=2)), nn.Linear(1, 1)
    selection.see(0, Accuracies(1.0, 0.2, 0.9), model)
    selection.see(1, Accuracies(1.0, 0.5, 0.4), model)
    selection.correct(Accuracies(1.0, 0.6, 0.3))
    result = selection.result
    assert (result.val_accuracy, result.test_accuracy, result.test_max, result.best_epoch) == (0.6, 0.3, 0.9, 1)

"""Graphs, logits and a short configuration shared by the tests of the baselines."""

import copy

import pytest
import torch
from torch_geometric.data import Data

from rbm.config import Config
from rbm.datasets.splits import GraphSplit, split_graph
from rbm.teachers.outputs import TeacherOutputs, outputs_from_logits

QUICK = {
    "teacher": {"hidden_channels": 16, "max_epochs": 25, "min_epochs": 0},
    "encoding": {"walk_length": 10, "walks_per_node": 1, "embedding_dim": 4},
    "mlp": {"max_epochs": 20},
    "rbm": {"hidden_channels": 32, "num_experts": 4, "top_k": 2, "max_epochs": 15, "pretrain_epochs": 5},
    "moe": {"hidden_channels": 32, "num_experts": 4, "top_k": 2, "max_epochs": 15, "pretrain_epochs": 5},
    "ensemble": {"members": 2},
    "glnn": {"hidden_channels": 64, "max_epochs": 20},
    "krd": {"hidden_channels": 64, "max_epochs": 15, "reliability": {"update_start_epoch": 3}},
    "nosmog": {
        "hidden_channels": 64,
        "max_epochs": 20,
        "encoding": {"walk_length": 10, "walks_per_node": 1, "embedding_dim": 4},
    },
    "cohop": {"max_epochs": 10, "rounds": 3},
    "hgmd": {"hidden_channels": 64, "max_epochs": 20},
    "tined": {"max_epochs": 20},
    "tined_plus": {"max_epochs": 10, "encoding": {"walk_length": 10, "walks_per_node": 1, "embedding_dim": 4}},
    "simmlp": {"hidden_channels": 64, "predictor_channels": 16, "max_epochs": 10, "head_epochs": 60},
    "vqgraph": {
        "hidden_channels": 64,
        "max_epochs": 20,
        "tokenizer": {"code_channels": 32, "codebook_size": 150, "dropout": 0.1, "lr": 0.03, "max_epochs": 25},
    },
    "sign": {"hidden_channels": 64, "max_epochs": 20},
    "trees": {"max_epochs": 8, "leaves": 6, "min_samples": 2},
}


@pytest.fixture
def quick() -> Config:
    return Config().updated(QUICK)


@pytest.fixture
def directed_graph() -> Data:
    """40 nodes in four classes with random directed edges, self-loops, one duplicate, and five isolated nodes."""
    edges = torch.randint(0, 35, (2, 70))
    edges = torch.cat([edges, edges[:, :1], torch.tensor([[3, 8], [3, 8]])], dim=1)
    position = torch.arange(40)
    return Data(
        x=torch.randn(40, 6),
        edge_index=edges,
        y=torch.randint(0, 4, (40,)),
        train_mask=position % 4 == 0,
        val_mask=position % 4 == 1,
        test_mask=position % 4 >= 2,
    )


@pytest.fixture(params=["transductive", "inductive"])
def split(request, directed_graph) -> GraphSplit:
    return split_graph(directed_graph, request.param, unseen_fraction=0.4)


@pytest.fixture
def teacher_outputs(split) -> TeacherOutputs:
    return outputs_from_logits(torch.randn(40, 4), split)


@pytest.fixture
def twin():
    """A copy of a model, and an Adam optimiser for it."""

    def make(model, network, *further):
        model = copy.deepcopy(model)
        parameters = [*model.parameters(), *further]
        return model, torch.optim.Adam(parameters, lr=network.lr, weight_decay=network.weight_decay)

    return make

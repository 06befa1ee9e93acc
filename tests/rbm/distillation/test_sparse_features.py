"""Sparse features of a graph give the results of dense ones: in teachers, in students' epochs, and in a whole run."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rbm
from rbm import MLPStudent, RbMStudent
from rbm.config import Config
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.rbm import RbMTrainer
from rbm.distillation.trainer import StudentTrainer
from rbm.teachers import TEACHERS, build_teacher
from rbm.teachers.outputs import outputs_from_logits
from rbm.teachers.training import TeacherTrainer


@pytest.mark.parametrize("hidden", [8, 40])
@pytest.mark.parametrize("name", [name for name in TEACHERS if name != "label_propagation"])
def test_teachers_equal_dense(small_graph, name, hidden):
    teacher = build_teacher(name, 12, 3, hidden_channels=hidden).double()
    x = small_graph.x.double() * (small_graph.x > 0.5)
    gradients = []
    for features in (x.to_sparse_csr(), x):
        teacher.zero_grad()
        teacher(features, small_graph.edge_index).square().sum().backward()
        gradients.append([p.grad.clone() for p in teacher.parameters()])
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        teacher.embed(x.to_sparse_csr(), small_graph.edge_index), teacher.embed(x, small_graph.edge_index)
    )


CALM = {
    "teacher": {"hidden_channels": 16, "dropout": 0.0, "max_epochs": 3},
    "mlp": {"dropout": 0.0, "max_epochs": 3},
    "rbm": {
        "hidden_channels": 8,
        "num_experts": 3,
        "top_k": 2,
        "dropout": 0.0,
        "pretrain_epochs": 1,
        "max_epochs": 3,
    },
}


def sparse_graph(small_graph):
    """The graph with features that are mostly zero, dense and as CSR."""
    dense = small_graph.clone()
    dense.x = small_graph.x * (small_graph.x > 0.7)
    packed = dense.clone()
    packed.x = dense.x.to_sparse_csr()
    return dense, packed


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_three_epochs_have_the_losses_of_dense_features(small_graph, setting):
    """Teacher, MLP and RbM student, including pretraining, K-means and routing; dropout off."""
    config = Config().updated(CALM)
    runs = []
    for data in sparse_graph(small_graph):
        split = split_graph(data, setting, unseen_fraction=0.4)
        logits = torch.randn(data.num_nodes, 3, generator=torch.Generator().manual_seed(3))
        teacher_outputs = outputs_from_logits(logits, split)
        losses = []
        teacher = build_teacher("sage", 12, 3, hidden_channels=16)
        for model in (teacher, MLPStudent(12, 8, 3), RbMStudent(12, 8, 3, num_experts=3)):
            torch.manual_seed(0)
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            if model is teacher:
                trainer = TeacherTrainer(model, split, config)
            else:
                kind = RbMTrainer if isinstance(model, RbMStudent) else StudentTrainer
                trainer = kind(model, split, teacher_outputs, config)
            for epoch in range(3):
                model.train()
                losses.append(trainer.train_epoch(epoch))
                model.eval()
                losses.extend(trainer.evaluate())
        runs.append(losses)
    np.testing.assert_allclose(*runs, rtol=1e-4)


def test_distills_from_sparse_features_end_to_end(small_graph, tmp_path):
    config = Config().updated(CALM)
    dense, packed = (
        rbm.distill(data, config=config, folder=tmp_path / name)
        for name, data in zip(("dense", "packed"), sparse_graph(small_graph), strict=True)
    )
    for phase in ("teacher", "mlp", "rbm"):
        assert packed.summary[phase] == pytest.approx(dense.summary[phase]), phase
    loaded = rbm.load_student(tmp_path / "packed")
    torch.testing.assert_close(loaded(packed.student_inputs()), packed.student(dense.student_inputs()))


class DenseOnly(nn.Module):
    """A user's teacher that would fail on CSR features."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(12, 3)

    def forward(self, x, edge_index):
        assert x.layout == torch.strided
        return self.lin(F.relu(x))


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_anyones_teacher_gets_dense_features(small_graph, setting):
    _, packed = sparse_graph(small_graph)
    result = rbm.distill(
        packed, DenseOnly(), config=Config().updated({**CALM, "setting": setting}), unseen_fraction=0.4
    )
    assert result.summary["teacher"]["name"] == "given"
    assert result.timings["teacher"]["one_node_ms"] > 0


def test_bad_features_of_a_graph(small_graph):
    _, packed = sparse_graph(small_graph)
    x = packed.x.to_dense()
    x[9, int(x[9].argmax())] = float("inf")
    packed.x = x.to_sparse_csr()
    with pytest.raises(ValueError, match=r"data.x: 1 of 60 nodes have NaN or infinite features \(node 9\)"):
        rbm.distill(packed, config=Config().updated(CALM))

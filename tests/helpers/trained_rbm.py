"""An RbM student trained for a few epochs on a graph with 12 features and three classes, such as ``small_graph``."""

import torch
from torch_geometric.data import Data

import rbm
from rbm.config import Config
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.rbm import RbMTrainer
from rbm.teachers.outputs import TeacherOutputs, outputs_from_logits


def trained(
    graph: Data,
    config: Config,
    epochs: int,
    kind: type[RbMTrainer] = RbMTrainer,
    outputs: TeacherOutputs | None = None,
) -> RbMTrainer:
    """The trainer after its epochs; without a teacher's ``outputs``, it learns from random logits."""
    torch.manual_seed(0)
    split = split_graph(graph)
    student = rbm.RbMStudent.from_config(config.rbm, in_channels=12, out_channels=3)
    trainer = kind(student, split, outputs or outputs_from_logits(torch.randn(60, 3), split), config)
    for epoch in range(epochs):
        student.train()
        trainer.train_epoch(epoch)
        student.eval()
        trainer.evaluate()
    return trainer

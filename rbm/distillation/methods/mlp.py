"""The plain student: RbM's recipe, its shape by default, and no mixture. What RbM gains over it, the mixture gains."""

from dataclasses import replace
from typing import Any

from rbm.config import Config, MLPConfig, Network
from rbm.datasets.encodings import Encodings
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import StudentTrainer
from rbm.nn.students import MLPStudent


def train_mlp(task: DistillationTask) -> TrainedStudent:
    """Train an MLP on the soft labels of each node and of its reliable neighbours."""
    encodings = task.encode(task.config.encoding)
    arguments = mlp_arguments(task, shaped_like_rbm(task.config), encodings)
    student = task.start(MLPStudent, arguments)
    trainer = StudentTrainer(student, task.split, task.teacher_outputs, task.config, encodings)
    return TrainedStudent(student, arguments, task.fit("mlp", trainer, task.config.mlp), encodings)


def shaped_like_rbm(config: Config) -> MLPConfig:
    """The section ``mlp``, with the RbM student's shape where it has none of its own."""
    mlp, shape = config.mlp, config.rbm
    return replace(
        mlp,
        num_layers=mlp.num_layers or shape.num_layers,
        hidden_channels=mlp.hidden_channels or shape.hidden_channels,
        norm=shape.norm if mlp.norm == "same" else mlp.norm,
    )


def mlp_arguments(task: DistillationTask, network: Network, encodings: Encodings | None = None) -> dict[str, Any]:
    """Those of :class:`~rbm.nn.students.MLPStudent`."""
    return {
        "in_channels": task.width(encodings),
        "hidden_channels": task.hidden(network),
        "out_channels": task.classes,
        "num_layers": network.num_layers,
        "norm": network.norm,
        "dropout": network.dropout,
    }

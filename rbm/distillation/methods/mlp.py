"""The plain student: RbM's recipe, its shape by default, and no mixture. What RbM gains over it, the mixture gains."""

from dataclasses import replace
from typing import Any

from rbm.config import Config, MLPConfig, Network
from rbm.datasets.encodings import Encodings
from rbm.distillation.task import Learned, Lesson
from rbm.distillation.trainer import StudentTraining
from rbm.nn.students import MLPStudent


def learn_mlp(lesson: Lesson) -> Learned:
    """Train an MLP on the soft labels of each node and of its reliable neighbours."""
    encodings = lesson.encode(lesson.config.encoding)
    arguments = mlp_arguments(lesson, shaped_like_rbm(lesson.config), encodings)
    student = lesson.start(MLPStudent, arguments)
    learner = StudentTraining(student, lesson.split, lesson.teaching, lesson.config, encodings)
    return Learned(student, arguments, lesson.fit("mlp", learner, lesson.config.mlp), encodings)


def shaped_like_rbm(config: Config) -> MLPConfig:
    """The section ``mlp``, with the RbM student's shape where it has none of its own."""
    mlp, shape = config.mlp, config.rbm
    return replace(
        mlp,
        num_layers=mlp.num_layers or shape.num_layers,
        hidden_channels=mlp.hidden_channels or shape.hidden_channels,
        norm=shape.norm if mlp.norm == "same" else mlp.norm,
    )


def mlp_arguments(lesson: Lesson, network: Network, encodings: Encodings | None = None) -> dict[str, Any]:
    """Those of :class:`~rbm.nn.students.MLPStudent`."""
    return {
        "in_channels": lesson.width(encodings),
        "hidden_channels": lesson.hidden(network),
        "out_channels": lesson.classes,
        "num_layers": network.num_layers,
        "norm": network.norm,
        "dropout": network.dropout,
    }

"""The plain student: RbM's recipe, width and depth, and no mixture. What RbM gains over it, the mixture gains."""

from dataclasses import replace
from typing import Any

from rbm.config import Config, MLPConfig, Network
from rbm.encodings import Encodings
from rbm.learners import StudentTraining
from rbm.lessons import Learned, Lesson
from rbm.students import MLPStudent


def learn_mlp(lesson: Lesson) -> Learned:
    """Train an MLP on the soft labels of each node and of its reliable neighbours."""
    encodings = lesson.encode(lesson.config.encoding)
    arguments = mlp_arguments(lesson, shaped_like_rbm(lesson.config), encodings)
    student = lesson.start(MLPStudent, arguments)
    learner = StudentTraining(student, lesson.split, lesson.teaching, lesson.config, encodings)
    return Learned(student, arguments, lesson.fit("mlp", learner, lesson.config.mlp), encodings)


def shaped_like_rbm(config: Config) -> MLPConfig:
    """The section ``mlp`` with the shape of the RbM student, which is the plain student's too."""
    shape = config.rbm
    return replace(config.mlp, num_layers=shape.num_layers, hidden_channels=shape.hidden_channels, norm=shape.norm)


def mlp_arguments(lesson: Lesson, network: Network, encodings: Encodings | None = None) -> dict[str, Any]:
    """Those of :class:`~rbm.students.MLPStudent`."""
    return {
        "in_channels": lesson.width(encodings),
        "hidden_channels": lesson.hidden(network),
        "out_channels": lesson.classes,
        "num_layers": network.num_layers,
        "norm": network.norm,
        "dropout": network.dropout,
    }

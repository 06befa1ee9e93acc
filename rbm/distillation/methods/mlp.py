"""The plain student: an MLP with RbM's recipe and, by default, its shape, that RbM is compared with."""

from dataclasses import replace

from rbm.config import Config, MLPConfig
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import StudentTrainer
from rbm.nn.students import MLPStudent


def train_mlp(task: DistillationTask) -> TrainedStudent:
    """Train an MLP on the soft labels of each node and of its reliable neighbours."""
    encodings = task.encode(task.config.encoding)
    student = task.new_student(MLPStudent, shaped_like_rbm(task.config), encodings)
    trainer = StudentTrainer(student, task.split, task.teacher_outputs, task.config, encodings)
    return TrainedStudent(student, task.fit("mlp", trainer, task.config.mlp), encodings)


def shaped_like_rbm(config: Config) -> MLPConfig:
    """The section ``mlp``; shape settings that it leaves open are those of the RbM student."""
    mlp, shape = config.mlp, config.rbm
    return replace(
        mlp,
        num_layers=mlp.num_layers or shape.num_layers,
        hidden_channels=mlp.hidden_channels or shape.hidden_channels,
        norm=shape.norm if mlp.norm == "same" else mlp.norm,
    )

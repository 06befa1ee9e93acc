"""Every distillation method by name. A new one is a function of a :class:`~rbm.distillation.task.Lesson`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rbm.config import Config
from rbm.distillation.methods.cohop import learn_cohop
from rbm.distillation.methods.ensemble import learn_ensemble
from rbm.distillation.methods.glnn import learn_glnn
from rbm.distillation.methods.krd import learn_krd
from rbm.distillation.methods.mlp import learn_mlp
from rbm.distillation.methods.moe import learn_moe
from rbm.distillation.methods.nosmog import learn_nosmog
from rbm.distillation.task import Learned, Lesson
from rbm.distillation.trainer import RbMTraining
from rbm.nn.students import RbMStudent

_RECIPE = ("distill", "reliability", "encoding")


@dataclass(frozen=True)
class Method:
    """A way to make a student.

    Attributes:
        title: as tables show it.
        sections: of the configuration that its result depends on.
        learn: makes the student.
        data_parallel: whether ``learn`` may run on several ranks at once, each with a part of every batch; it is the
            first rank's otherwise (:mod:`rbm.utils.distributed`).
    """

    title: str
    sections: tuple[str, ...]
    learn: Callable[[Lesson], Learned]
    data_parallel: bool = False


def learn_rbm(lesson: Lesson) -> Learned:
    """The Routing-by-Memory student, which this package is about."""
    config = lesson.config
    encodings = lesson.encode(config.encoding)
    arguments = rbm_arguments(config, lesson.width(encodings), lesson.classes)
    student = lesson.start(RbMStudent, arguments)
    learner = RbMTraining(student, lesson.split, lesson.teaching, config, encodings)
    result = lesson.fit("rbm", learner, config.rbm, warmup=config.rbm.pretrain_epochs)
    for buffer in student.buffers():
        buffer.requires_grad_(False)
    return Learned(student, arguments, result, encodings)


def rbm_arguments(config: Config, in_channels: int, classes: int) -> dict[str, Any]:
    """Those of :class:`~rbm.nn.students.RbMStudent` that a configuration says."""
    return {
        "in_channels": in_channels,
        "hidden_channels": config.rbm.hidden_channels * config.inflate,
        "out_channels": classes,
        **{name: getattr(config.rbm, name) for name in _FROM_CONFIG},
    }


_FROM_CONFIG = (
    "num_layers",
    "num_experts",
    "top_k",
    "norm",
    "dropout",
    "dropout_first_layer",
    "input_attention",
    "init_scale",
    "init_attention",
    "decay",
    "gate_temperature",
    "detach_gates",
    "normalize_memory",
    "normalize_memory_input",
)

METHODS = {
    "mlp": Method("MLP student", ("teacher", "mlp", "rbm", *_RECIPE), learn_mlp, data_parallel=True),
    "rbm": Method("RbM student", ("teacher", "rbm", *_RECIPE), learn_rbm, data_parallel=True),
    "moe": Method("MoE student", ("teacher", "moe", *_RECIPE), learn_moe, data_parallel=True),
    "ensemble": Method(
        "MLP ensemble", ("teacher", "ensemble", "mlp", "rbm", *_RECIPE), learn_ensemble, data_parallel=True
    ),
    "glnn": Method("GLNN", ("teacher", "glnn"), learn_glnn),
    "krd": Method("KRD", ("teacher", "krd"), learn_krd),
    "nosmog": Method("NOSMOG", ("teacher", "nosmog"), learn_nosmog),
    "cohop": Method("CoHOp", ("cohop",), learn_cohop),
}

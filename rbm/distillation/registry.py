"""All distillation methods by name. A method is a function of a :class:`~rbm.distillation.task.DistillationTask`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from rbm.config import Config
from rbm.distillation.methods.cohop import train_cohop
from rbm.distillation.methods.ensemble import train_ensemble
from rbm.distillation.methods.glnn import train_glnn
from rbm.distillation.methods.hgmd import train_hgmd
from rbm.distillation.methods.krd import train_krd
from rbm.distillation.methods.labels import train_labels
from rbm.distillation.methods.mlp import train_mlp
from rbm.distillation.methods.moe import train_moe
from rbm.distillation.methods.nosmog import train_nosmog
from rbm.distillation.methods.rbm import train_rbm
from rbm.distillation.methods.sign import train_sign
from rbm.distillation.methods.simmlp import train_simmlp
from rbm.distillation.methods.tined import check_layers, train_tined, train_tined_plus
from rbm.distillation.methods.trees import train_trees
from rbm.distillation.methods.vqgraph import train_vqgraph
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.teachers.outputs import no_hidden_layer

_RECIPE = ("distill", "reliability", "encoding")


@dataclass(frozen=True)
class Method:
    """A distillation method.

    Attributes:
        title: name in tables.
        sections: sections of the configuration that the result depends on.
        train: trains the student.
        data_parallel: whether ``train`` can run on several ranks at once, each with a part of every batch. Otherwise it
            runs on the first rank only (:mod:`rbm.utils.distributed`).
        check_teacher: for a method that needs the teacher itself and not only soft labels: raises ValueError unless it
            supports teachers of this class (None: logits alone). Such a method always learns from the run's teacher,
            also if ``distill.source`` selects other soft labels.
    """

    title: str
    sections: tuple[str, ...]
    train: Callable[[DistillationTask], TrainedStudent]
    data_parallel: bool = False
    check_teacher: Callable[[type[nn.Module] | None], None] | None = None


METHODS = {
    "mlp": Method("MLP student", ("teacher", "mlp", "rbm", *_RECIPE), train_mlp, data_parallel=True),
    "rbm": Method("RbM student", ("teacher", "rbm", *_RECIPE), train_rbm, data_parallel=True),
    "moe": Method("MoE student", ("teacher", "moe", *_RECIPE), train_moe, data_parallel=True),
    "ensemble": Method(
        "MLP ensemble", ("teacher", "ensemble", "mlp", "rbm", *_RECIPE), train_ensemble, data_parallel=True
    ),
    "glnn": Method("GLNN", ("teacher", "glnn"), train_glnn),
    "krd": Method("KRD", ("teacher", "krd"), train_krd),
    "nosmog": Method("NOSMOG", ("teacher", "nosmog"), train_nosmog),
    "cohop": Method("CoHOp", ("cohop",), train_cohop),
    "hgmd": Method("HGMD", ("teacher", "hgmd"), train_hgmd),
    "tined": Method("TINED", ("teacher", "tined"), train_tined, check_teacher=check_layers),
    "tined_plus": Method("TINED+", ("teacher", "tined_plus"), train_tined_plus, check_teacher=check_layers),
    "simmlp": Method("SimMLP", ("simmlp",), train_simmlp),
    "vqgraph": Method("VQGraph", ("vqgraph",), train_vqgraph),
    "sign": Method("SIGN", ("teacher", "sign"), train_sign),
    "trees": Method("Boosted trees", ("teacher", "trees", "encoding"), train_trees),
    "labels": Method("MLP on labels", ("teacher",), train_labels),
}


def check_teacher_of(methods: Iterable[str], teacher: type[nn.Module] | None) -> None:
    """Raise ValueError if one of the ``methods`` does not support teachers of this class (None: logits alone)."""
    for method in methods:
        if (check := METHODS[method].check_teacher) is not None:
            check(teacher)


def check_hidden_layer(methods: Iterable[str], config: Config) -> None:
    """Raise ValueError if the configuration of one of the ``methods`` needs a teacher's hidden layer."""
    for method in methods:
        for section in METHODS[method].sections:
            if getattr(getattr(config, section, None), "similarity_weight", 0) > 0:
                raise no_hidden_layer(f"{section}.similarity_weight is set")
        if method == "rbm" and config.rbm.memory_init == "teacher":
            raise no_hidden_layer("rbm.memory_init is teacher")


def learns_soft_labels(method: str) -> bool:
    """Whether a method's student learns the soft labels that ``distill.source`` selects. Methods without a teacher do
    not, nor do methods that need the teacher itself, nor ``labels``, which only has the teacher's settings.
    """
    if method not in METHODS or method == "labels":
        return False
    return "teacher" in METHODS[method].sections and METHODS[method].check_teacher is None


def title_of(model: str) -> str:
    """The title of the teacher or of a method's student in tables; another name is its own title."""
    return "Teacher" if model == "teacher" else METHODS[model].title if model in METHODS else model

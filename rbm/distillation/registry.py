"""All distillation methods by name. A method is a function of a :class:`~rbm.distillation.task.DistillationTask`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from rbm.config import Config
from rbm.datasets.encodings.grown import GrownGraph, encodings_on, means_on
from rbm.distillation.methods.cohop import histograms_on, train_cohop
from rbm.distillation.methods.ensemble import train_ensemble
from rbm.distillation.methods.glnn import train_glnn
from rbm.distillation.methods.hgmd import train_hgmd
from rbm.distillation.methods.krd import train_krd
from rbm.distillation.methods.labels import train_labels
from rbm.distillation.methods.mlp import train_mlp
from rbm.distillation.methods.moe import train_moe
from rbm.distillation.methods.nosmog import train_nosmog
from rbm.distillation.methods.rbm import train_rbm
from rbm.distillation.methods.sign import hops_on, train_sign
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
        encodings_on: for a method whose students take encodings: the encodings of all nodes of a graph that has grown
            since training.
    """

    title: str
    sections: tuple[str, ...]
    train: Callable[[DistillationTask], TrainedStudent]
    data_parallel: bool = False
    check_teacher: Callable[[type[nn.Module] | None], None] | None = None
    encodings_on: Callable[[GrownGraph], Tensor] = means_on


METHODS = {
    "mlp": Method(
        "MLP student", ("teacher", "mlp", "rbm", *_RECIPE), train_mlp, data_parallel=True, encodings_on=encodings_on
    ),
    "rbm": Method(
        "RbM student", ("teacher", "rbm", *_RECIPE), train_rbm, data_parallel=True, encodings_on=encodings_on
    ),
    "moe": Method(
        "MoE student", ("teacher", "moe", *_RECIPE), train_moe, data_parallel=True, encodings_on=encodings_on
    ),
    "ensemble": Method(
        "MLP ensemble",
        ("teacher", "ensemble", "mlp", "rbm", *_RECIPE),
        train_ensemble,
        data_parallel=True,
        encodings_on=encodings_on,
    ),
    "glnn": Method("GLNN", ("teacher", "glnn"), train_glnn),
    "krd": Method("KRD", ("teacher", "krd"), train_krd),
    "nosmog": Method(
        "NOSMOG", ("teacher", "nosmog"), train_nosmog, encodings_on=partial(encodings_on, section="nosmog")
    ),
    "cohop": Method("CoHOp", ("cohop",), train_cohop, encodings_on=histograms_on),
    "hgmd": Method("HGMD", ("teacher", "hgmd"), train_hgmd),
    "tined": Method("TINED", ("teacher", "tined"), train_tined, check_teacher=check_layers),
    "tined_plus": Method(
        "TINED+",
        ("teacher", "tined_plus"),
        train_tined_plus,
        check_teacher=check_layers,
        encodings_on=partial(encodings_on, section="tined_plus"),
    ),
    "simmlp": Method("SimMLP", ("simmlp",), train_simmlp),
    "vqgraph": Method("VQGraph", ("vqgraph",), train_vqgraph),
    "sign": Method("SIGN", ("teacher", "sign"), train_sign, encodings_on=hops_on),
    "trees": Method("Boosted trees", ("teacher", "trees", "encoding"), train_trees, encodings_on=encodings_on),
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

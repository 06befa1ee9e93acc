"""What a call of :func:`rbm.distill` asks for, checked before any work."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import is_undirected

from rbm.config import Config
from rbm.config.presets import features_only as without_encodings
from rbm.config.presets import teacher_settings
from rbm.datasets import num_classes, validate_data
from rbm.datasets.encodings import own_encoding
from rbm.datasets.encodings.hops import check_hops
from rbm.datasets.splits import GraphSplit, split_for
from rbm.datasets.validation import warn_of_graph
from rbm.distillation.auto.run import budget_in_seconds
from rbm.distillation.choices import Choices, with_labels
from rbm.distillation.registry import METHODS, check_hidden_layer, check_teacher_of
from rbm.distillation.run_graph import named_after_graph
from rbm.distillation.run_inputs import choices_of
from rbm.teachers import TEACHERS, check_teacher
from rbm.teachers.neighbor_sampling import check_sampling
from rbm.teachers.outputs import check_logits, check_module
from rbm.teachers.prepare import check_configured_teacher
from rbm.training.run_folder import check_has_folder
from rbm.training.tensorboard import check_tensorboard
from rbm.utils.arguments import check_flags
from rbm.utils.distributed import is_main_process
from rbm.utils.files import as_path
from rbm.utils.suggestions import did_you_mean

DEFAULT_METHODS = ("mlp", "rbm")


@dataclass(frozen=True)
class Request:
    """The arguments of :func:`rbm.distill` that its parts share.

    Attributes:
        data: the graph.
        split: its split for training and evaluation.
        classes: C.
        config: the settings of the run.
        teacher: a module or logits ``[N, C]``; None if one is trained.
        teacher_name: the name of the teacher, if the caller gave a name.
        encodings: further columns of a student's input, ``[N, D]`` each.
        methods: the methods to train.
        asked: what the run was asked for; its methods are without ``labels``, unless that was named.
        folder: the run folder, or None.
        budget: seconds for a search and the run after it.
    """

    data: Data
    split: GraphSplit
    classes: int
    config: Config
    teacher: nn.Module | Tensor | None
    teacher_name: str | None
    encodings: Sequence[Tensor]
    methods: tuple[str, ...]
    asked: Choices
    folder: Path | None
    budget: float

    @property
    def teacher_in_results(self) -> str:
        """The name of a teacher that is trained; ``given`` otherwise."""
        return self.config.teacher.name if self.teacher is None else "given"

    def after_search(self, config: Config) -> "Request":
        """The same with the configuration that a search has chosen, whose teacher is checked."""
        teacher = self.teacher
        if not isinstance(teacher, Tensor):
            teacher = _given_teacher(teacher, config, self.split, self.classes, self.methods)
        return replace(self, config=config, teacher=teacher)


def check_request(
    data: Data,
    teacher: nn.Module | Tensor | str | None,
    *,
    config: Config | None,
    methods: Sequence[str] | None,
    keep: str | None,
    labels_alone: bool | None,
    auto: bool,
    budget: float | str | None,
    encodings: Sequence[Tensor],
    features_only: bool,
    folder: Path | str | None,
    resume: bool,
    overwrite: bool,
    unseen_fraction: float | None,
    tensorboard: bool,
    plots: bool | None,
    warn: bool,
) -> Request:
    """Check the arguments of :func:`rbm.distill`, which describes them and the errors that are raised. With ``warn``,
    log what is unusual about the graph.
    """
    teacher_name = teacher if isinstance(teacher, str) else None
    config, teacher = _named(config, teacher)
    if not isinstance(encodings, Iterable):
        raise TypeError(f"encodings is {encodings!r}, expected a list of tensors, such as encodings=[positions]")
    if features_only:
        if len(encodings):
            raise ValueError(f"features_only is True and encodings holds {len(encodings)}; expected one of them")
        config = without_encodings(config)
    folder = None if folder is None else as_path("folder", folder)
    before = choices_of(folder if resume else None, auto)
    methods = (before.methods or DEFAULT_METHODS) if methods is None else methods
    labels_alone = before.labels_alone if labels_alone is None else labels_alone
    check_flags(labels_alone=labels_alone)
    _check_arguments(config, methods, teacher, encodings)
    seconds = budget_in_seconds(auto, budget, encodings)
    trained = with_labels(methods, labels_alone)
    keep = before.keep if keep is None and before.keep in trained else keep
    if keep is not None and keep not in trained:
        raise ValueError(f"keep is {keep!r}, expected one of {', '.join(trained)}, which this run trains")
    check_has_folder(folder, resume=resume, overwrite=overwrite, plots=plots, tensorboard=tensorboard)
    if tensorboard:
        check_tensorboard()
    _check_graph(data, config, warn=warn)
    data = _for_training(data)
    for place, own in enumerate(encodings):
        own_encoding(own, place, data.num_nodes)
    config = named_after_graph(config, data, folder if resume else None)
    classes, split = num_classes(data), split_for(config, data, unseen_fraction=unseen_fraction)
    teacher = _given_teacher(teacher, config, split, classes, trained)
    _check_sizes(config, trained, split)
    asked = Choices(tuple(methods), keep, labels_alone)
    return Request(data, split, classes, config, teacher, teacher_name, encodings, trained, asked, folder, seconds)


def _for_training(data: Data) -> Data:
    """The graph, with copies of tensors that were made under ``torch.inference_mode()``, such as the embeddings of a
    language model: autograd cannot save these.
    """
    made = {name: value for name, value in data.to_dict().items() if isinstance(value, Tensor) and value.is_inference()}
    if not made:
        return data
    data = copy(data)
    for name, value in made.items():
        data[name] = value.clone()
    return data


def _named(config: Config | None, teacher: nn.Module | Tensor | str | None) -> tuple[Config, nn.Module | Tensor | None]:
    """The configuration with the name of the teacher to train, and the teacher if one is given."""
    if not isinstance(config, Config | None):
        remedy = "; use rbm.Config().updated(config)" if isinstance(config, dict) else ""
        raise TypeError(f"config is a {type(config).__name__}, expected an rbm.Config or None{remedy}")
    if not isinstance(teacher, nn.Module | Tensor | str | None):
        remedy = "; use torch.as_tensor(teacher)" if isinstance(teacher, np.ndarray) else ""
        raise TypeError(
            f"teacher is a {type(teacher).__name__}, expected a torch.nn.Module, a tensor of logits, a name or None"
            f"{remedy}"
        )
    if not isinstance(teacher, str):
        return config or Config(), teacher
    config = config or Config().updated(teacher_settings(teacher))
    return config.updated({"teacher": {"name": teacher}}), None


def _given_teacher(
    teacher: nn.Module | Tensor | None, config: Config, split: GraphSplit, classes: int, methods: Sequence[str]
) -> nn.Module | Tensor | None:
    """The given teacher, checked, also against the methods: a module or logits (possibly from the graph); None if a
    teacher is to be trained.
    """
    if teacher is None and config.teacher.name == "logits":
        teacher = split.graph.get("teacher_logits")
        if teacher is None:
            raise ValueError(
                "teacher is 'logits' but the graph holds none; set data.teacher_logits ([nodes, classes]), or name"
                " another"
            )
    if teacher is None:
        check_teacher(config.teacher.name)
        check_sampling(config)
        check_teacher_of(methods, TEACHERS[config.teacher.name])
        check_configured_teacher(config, split, classes)
    elif isinstance(teacher, Tensor):
        check_logits(teacher, split.graph.num_nodes, classes)
        check_teacher_of(methods, None)
    else:
        check_module(teacher)
        check_teacher_of(methods, type(teacher))
    if teacher is not None and not hasattr(teacher, "embed"):
        check_hidden_layer(methods, config)
    return teacher


def _check_arguments(
    config: Config, methods: Sequence[str], teacher: nn.Module | Tensor | None, encodings: Sequence[Tensor]
) -> None:
    if isinstance(methods, str):
        raise TypeError(f"methods is {methods!r}, expected a list of names; use methods={methods.split(',')}")
    if not isinstance(methods, Iterable):
        raise TypeError(f"methods is {methods!r}, expected a list of names, such as methods=['mlp', 'rbm']")
    unknown = [name for name in methods if name not in METHODS]
    if not methods or unknown or len(set(methods)) < len(methods):
        hint = did_you_mean(str(unknown[0]), METHODS) if unknown else ""
        raise ValueError(f"methods is {list(methods)}, expected one or more of {', '.join(METHODS)}, each once{hint}")
    if config.evaluate_on == "validation" and (isinstance(teacher, Tensor) or len(encodings)):
        raise ValueError(
            "evaluate_on is 'validation', which takes nodes away, and logits or encodings are given for all nodes;"
            " train a teacher, pass a module, or set data.teacher_logits and teacher='logits'"
        )


def _check_graph(data: Data, config: Config, *, warn: bool) -> None:
    """Raise an error if the graph is not valid; with ``warn``, also log what is unusual about it."""
    validate_data(data)
    if config.undirected and not is_undirected(data.edge_index, num_nodes=data.num_nodes):
        raise ValueError(
            "undirected is for graphs that rbm reads from files, and data has an edge without its reverse; use"
            " torch_geometric.transforms.ToUndirected()(data)"
        )
    if warn and is_main_process():
        warn_of_graph(data)


def _check_sizes(config: Config, methods: Sequence[str], split: GraphSplit) -> None:
    nodes = split.observed.num_nodes
    if "rbm" in methods and config.rbm.num_experts > nodes:
        raise ValueError(
            f"rbm.num_experts is {config.rbm.num_experts} but the observed graph has {nodes} nodes;"
            " use at most as many experts as nodes"
        )
    if "sign" in methods:
        check_hops(split.graph.num_nodes, split.graph.num_features, config.sign.hops)

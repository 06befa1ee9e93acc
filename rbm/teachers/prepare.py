"""Prepares the outputs of the teacher of a run: builds, trains or loads the teacher, and evaluates it once."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rbm.config import ATTENTION_TEACHERS, Config
from rbm.datasets.splits import GraphSplit
from rbm.teachers import TEACHERS, LabelInput, LabelPropagation, Teacher, build_teacher
from rbm.teachers.outputs import TeacherOutputs, check_untrained, outputs_from_logits, outputs_from_module
from rbm.teachers.training import build_teacher_trainer
from rbm.training.cached import cached_phase
from rbm.training.loop import fit_phase, train_epoch
from rbm.training.run_folder import RunFolder
from rbm.training.selection import EpochLimits, Selection, split_accuracies
from rbm.training.time_limit import current_limit
from rbm.utils.cache import Cache
from rbm.utils.distributed import broadcast_from_rank0, forked, is_main_process
from rbm.utils.plugins import checksum_of_own_code, is_of_package
from rbm.utils.progress import Progress


def outputs_of_given(teacher: nn.Module | Tensor, split: GraphSplit, classes: int) -> TeacherOutputs:
    """The outputs of a trained module, or of logits ``[N, C]``, from which students learn.

    Raises:
        TypeError: the module returns something else than a tensor.
        ValueError: the logits are not finite, have another shape, or are probabilities.
    """
    return outputs_from_logits(teacher, split) if isinstance(teacher, Tensor) else _shared(teacher, split, classes)


def prepare_teacher(
    split: GraphSplit, config: Config, classes: int, *, run: RunFolder | None, cache: Cache, progress: Progress
) -> TeacherOutputs:
    """Train the teacher of the configuration, and return the outputs from which students learn.

    Args:
        split: the graph, and what training may see of it.
        config: configuration of the run.
        classes: C.
        run: folder that the trained teacher is saved in, and loaded from if the run is resumed.
        cache: cache with the teacher if another run has trained the same one.
        progress: display of the training.
    """
    torch.manual_seed(config.seed)
    teacher = build_configured_teacher(config, split, classes)
    return _shared(teacher, split, classes, partial(_train, teacher, split, config, classes, run, cache, progress))


def _shared(
    teacher: nn.Module, split: GraphSplit, classes: int, train: Callable[[], dict[str, Any]] | None = None
) -> TeacherOutputs:
    """Let the first rank train the teacher, if asked to, and compute the outputs for all ranks."""
    state, outputs = broadcast_from_rank0(lambda: _ask(teacher, split, classes, train() if train else None))
    if not is_main_process():
        teacher.load_state_dict(state)
        teacher.eval()
    soft_labels, logits, result = outputs
    return TeacherOutputs(soft_labels, logits, result, teacher, split.observed)


def _ask(
    teacher: nn.Module, split: GraphSplit, classes: int, result: dict[str, Any] | None
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, dict[str, Any]]]:
    """What other ranks need: the teacher's state, and its soft labels, logits and result."""
    outputs = outputs_from_module(teacher, split, classes, result)
    return teacher.state_dict(), (outputs.soft_labels, outputs.logits, outputs.result)


def _train(
    teacher: Teacher,
    split: GraphSplit,
    config: Config,
    classes: int,
    run: RunFolder | None,
    cache: Cache,
    progress: Progress,
) -> dict[str, Any]:
    """Train ``teacher``, or load it from the run folder or the cache, and return its result."""

    def fit() -> dict[str, Any]:
        network = config.teacher
        if isinstance(teacher, LabelPropagation):  # nothing to train
            network = replace(network, max_epochs=1)
        return fit_phase("teacher", build_teacher_trainer(teacher, split, config), network, run, progress)

    if run is not None and run.finished("teacher") is not None:
        return fit()  # loads the teacher of the run folder
    result = cached_teacher(teacher, split, config, classes, cache, fit, progress)
    if run is not None:
        run.save_phase("teacher", teacher, result)
    return result


def cached_teacher(
    teacher: Teacher,
    split: GraphSplit,
    config: Config,
    classes: int,
    cache: Cache,
    train: Callable[[], dict[str, Any]],
    progress: Progress,
) -> dict[str, Any]:
    """Train ``teacher`` with ``train()``, which returns its result, unless the cache contains the same training."""
    return cached_phase("teacher", teacher, *_made_from(split, config, classes), train, cache, progress)


def _made_from(split: GraphSplit, config: Config, classes: int) -> tuple[dict[str, Any], list[Tensor]]:
    """What a trained teacher depends on: settings and tensors."""
    graph = split.observed
    settings = {name: asdict(getattr(config, name)) for name in config.teacher_sections} | {"seed": config.seed}
    if config.precision != "float32":  # the default, so that it leaves the names of existing files
        settings["precision"] = config.precision
    if classes != int(split.graph.y.max()) + 1:  # declared classes without a node, each an output of the teacher
        settings["classes"] = classes
    if code := checksum_of_own_code(TEACHERS[config.teacher.name]):  # its settings do not tell what it computes
        settings["code"] = code
    # Unseen nodes do not affect the training, but define the test accuracy.
    inputs = [graph.x, graph.edge_index, graph.y, graph.train_mask, graph.val_mask, graph.test_mask]
    inputs += [split.graph.edge_index, split.graph.y, split.unseen_nodes]
    if len(split.unseen_nodes):
        inputs.append(split.graph.x)
    return settings, inputs


def share_training(
    splits: Sequence[GraphSplit], wanted: int, config: Config, classes: int, cache: Cache, progress: Progress
) -> None:
    """Train one teacher for several splits, and write to the cache what separate trainings would have written.

    The splits must only differ in their validation and test nodes, and must not have unseen nodes. Their trainings then
    have the same epochs, but each split has its own selected epoch and early stopping. Nothing is done if the cache
    already contains the teacher of the ``wanted`` split.

    Raises:
        FloatingPointError: the loss is no longer finite.
        OutOfTimeError: the training cannot end within its :func:`rbm.training.time_limit.time_limit`.
    """
    if cache.holds("teacher", *_made_from(splits[wanted], config, classes)):
        return
    torch.manual_seed(config.seed)
    teacher = build_configured_teacher(config, splits[wanted], classes)
    trainer = build_teacher_trainer(teacher, splits[wanted], config)
    selections = [Selection(EpochLimits.of(config.teacher)) for _ in splits]
    training = list(zip(splits, selections, strict=True))
    limit, fastest = current_limit(), float("inf")
    for epoch in range(config.teacher.max_epochs):
        began = limit.passed()
        train_epoch("teacher", trainer, epoch)
        logits = trainer.logits()
        for split, selection in training:
            selection.see(epoch, split_accuracies(*logits, split), teacher)
        training = [pair for pair in training if not pair[1].is_over]
        if not training:
            break
        fastest = min(fastest, limit.passed() - began)
        limit.check("teacher", fastest * max(selection.least_left for _, selection in training))
    trainer.precision = "float32"
    for split, selection in zip(splits, selections, strict=True):
        teacher.load_state_dict(selection.state)
        if config.precision != "float32":
            selection.correct(split_accuracies(*trainer.logits(), split))
        cached_teacher(teacher, split, config, classes, cache, partial(asdict, selection.result), progress)


def build_configured_teacher(config: Config, split: GraphSplit, classes: int) -> Teacher:
    """Build the untrained teacher of the configuration on the graph's device."""
    section, attention = config.teacher, config.attention
    shows_labels = section.name in ATTENTION_TEACHERS and attention.label_input
    features = split.graph.num_features + (classes if shows_labels else 0)
    teacher = build_teacher(section.name, features, classes, **_settings(config))
    if isinstance(teacher, LabelPropagation):
        teacher.register_labels(training_labels(split))
    if shows_labels:
        labels = training_labels(split)
        teacher = LabelInput(teacher, labels, classes, attention.label_mask_rate, attention.label_iterations)
    teacher = teacher.to(split.graph.x.device)
    if not isinstance(teacher, Teacher):
        check_untrained(teacher, split.observed, classes)
    return teacher


def check_configured_teacher(config: Config, split: GraphSplit, classes: int) -> None:
    """Raise the errors of :func:`build_configured_teacher`, for a known teacher, before a run folder is replaced.

    Raises:
        TypeError: the teacher is a plugin's and does not fit, see :func:`rbm.teachers.outputs.check_untrained`.
        ValueError: likewise, or the teacher cannot have its settings.
    """
    name = config.teacher.name
    if not is_of_package(TEACHERS[name]):
        with forked():
            build_configured_teacher(config, split, classes)
        return
    try:
        with torch.device("meta"):  # its weights may take most of the memory
            build_teacher(name, 1, 1, **_settings(config))
    except ValueError as error:  # begins with the name of a setting, without its section
        section = "attention" if hasattr(config.attention, str(error).partition(":")[0]) else "teacher"
        raise ValueError(f"{section}.{error}") from None


def _settings(config: Config) -> dict[str, Any]:
    """The settings of the configuration that its teacher is built with."""
    section, attention = config.teacher, config.attention
    settings = {name: getattr(section, name) for name in ("hidden_channels", "num_layers", "dropout", "norm")}
    if section.name in ATTENTION_TEACHERS:
        settings |= {name: getattr(attention, name) for name in ("heads", "input_dropout", "edge_dropout")}
    if section.name == "revgat":
        settings["groups"] = attention.groups
    return settings


def training_labels(split: GraphSplit) -> tuple[Tensor, Tensor]:
    """Classes of the observed training nodes, -1 for all other nodes: int64 ``[N_observed]`` and ``[N]``."""
    observed = split.observed.y.masked_fill(~split.observed.train_mask, -1)
    full = split.graph.y.new_full((split.graph.num_nodes,), -1)
    full[split.observed_nodes.to(full.device)] = observed
    return observed, full

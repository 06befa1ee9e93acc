"""The main job: train a teacher on the graph, distil it into students that need no graph, and compare them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch_geometric.data import Data

from rbm.checkpoint import RunFolder, save_student, write_json
from rbm.config import Config, StudentConfig
from rbm.datasets import num_classes, validate_data
from rbm.learners import StudentTraining, TeacherTraining, split_accuracies
from rbm.metrics import evaluating, student_latency, teacher_latency
from rbm.progress import Progress
from rbm.splits import GraphSplit, split_graph
from rbm.students import MLPStudent, RbMStudent, count_parameters
from rbm.teachers import build_teacher, check_teacher, edges_for, features_for
from rbm.training import Result, fit

PHASES = ("teacher", "mlp", "student")


@dataclass
class Distillation:
    """What :func:`distill` returns.

    Attributes:
        student: the RbM student at its best validation epoch, in eval mode.
        mlp: the plain student, trained with the same width, depth and soft labels.
        teacher: the teacher's module, or None where only its logits were given.
        teacher_logits: ``[N, C]`` on the full graph.
        split: who was seen in training and who was not.
        summary: accuracies and parameter counts, as in ``summary.json``.
        timings: milliseconds for one node and for all, as in ``timings.json``.
        config: the configuration that made it.
    """

    student: RbMStudent
    mlp: MLPStudent
    teacher: nn.Module | None
    teacher_logits: Tensor
    split: GraphSplit
    summary: dict[str, Any]
    timings: dict[str, Any]
    config: Config


def distill(
    data: Data,
    teacher: nn.Module | Tensor | str | None = None,
    *,
    config: Config | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    unseen_fraction: float = 0.2,
    console: Console | None = None,
) -> Distillation:
    """Distil a graph neural network into a Routing-by-Memory student.

    Args:
        data: a graph with ``x [N, F]`` (dense or CSR), ``edge_index [2, M]``, ``y [N]`` and boolean ``train_mask``,
            ``val_mask``, ``test_mask``.
        teacher: a trained module called as ``teacher(x, edge_index) -> logits [N, C]``; or logits ``[N, C]``; or the
            name of a teacher to train (``sage`` or ``gcn``); by default the one in ``config``.
        config: everything else; see :class:`rbm.config.Config`. Its ``dataset`` and ``root`` are not read.
        folder: run folder to write to (see :class:`rbm.checkpoint.RunFolder`); nothing is written by default.
        resume: continue the run of this folder.
        overwrite: replace the run of this folder.
        unseen_fraction: share of the test nodes that the inductive setting hides.
        console: shows progress there; silent by default.

    Returns:
        The student and all that is needed to judge it. The same seed gives the same numbers, bit for bit, on the same
        machine; the global random state is left as it was.

    Raises:
        ValueError, TypeError: data, teacher or configuration do not fit; before any work.
        FileExistsError, FileNotFoundError: there is a run in the folder, or none to resume.
    """
    config = config or Config()
    if isinstance(teacher, str):
        config, teacher = config.updated({"teacher": {"name": teacher}}), None
    validate_data(data)
    classes = num_classes(data)
    split = split_graph(data, config.setting, unseen_fraction=unseen_fraction, seed=config.seed)
    _check_experts(config.student, split.observed.num_nodes)
    if teacher is None:
        check_teacher(config.teacher.name)
    elif isinstance(teacher, Tensor):
        _check_logits(teacher, data.num_nodes, classes)
    run = None if folder is None else RunFolder(folder, config, resume=resume, overwrite=overwrite)
    progress = Progress(console)
    progress.say(
        f"{data.num_nodes:,} nodes, {data.num_edges:,} edges, {data.num_features:,} features, {classes} classes"
    )
    teacher_name = config.teacher.name if teacher is None else "given"

    with _deterministic():
        teacher, teacher_logits, soft_labels, teacher_result = _teach(split, teacher, config, classes, run, progress)
        mlp, mlp_result = _learn("mlp", split, soft_labels, config, classes, run, progress)
        student, student_result = _learn("student", split, soft_labels, config, classes, run, progress)

    summary = {
        "dataset": config.dataset,
        "setting": config.setting,
        "preset": config.preset,
        "seed": config.seed,
        "nodes": data.num_nodes,
        "edges": data.num_edges,
        "features": data.num_features,
        "classes": classes,
        "teacher": {"name": teacher_name, **teacher_result, **_parameters(teacher)},
        "mlp": {**mlp_result, **_parameters(mlp)},
        "student": {**student_result, **_parameters(student)},
    }
    timings = _timings(split, teacher, mlp, student, config)
    if run:
        save_student(run.path, student, _student_arguments(config, data.num_features, classes))
        write_json(run.path / "summary.json", summary)
        write_json(run.path / "timings.json", timings)
    return Distillation(student, mlp, teacher, teacher_logits, split, summary, timings, config)


def _teach(
    split: GraphSplit,
    teacher: nn.Module | Tensor | None,
    config: Config,
    classes: int,
    folder: RunFolder | None,
    progress: Progress,
) -> tuple[nn.Module | None, Tensor, Tensor, dict[str, Any]]:
    """The teacher, its logits on the full graph, its soft labels for the observed nodes, and how well it does."""
    full, observed = split.graph, split.observed
    if isinstance(teacher, Tensor):
        logits = teacher.detach().to(full.x.device, torch.float32)
        soft_labels = logits[split.observed_nodes]
        return None, logits, soft_labels, _given_result(soft_labels, logits, split)

    given = teacher is not None
    if not given:
        torch.manual_seed(config.seed)
        teacher = _build_teacher(config, full.num_features, classes).to(full.x.device)
        result = _fit_phase("teacher", TeacherTraining(teacher, split, config), config, folder, progress)
    with torch.no_grad(), evaluating(teacher):
        logits = teacher(features_for(teacher, full.x), edges_for(teacher, full))
        _check_logits(logits, full.num_nodes, classes)
        # A teacher that never met the unseen nodes must not meet them here either.
        soft_labels = logits
        if len(split.unseen_nodes):
            soft_labels = teacher(features_for(teacher, observed.x), edges_for(teacher, observed))
    if given:
        result = _given_result(soft_labels, logits, split)
    return teacher, logits, soft_labels, result


def _learn(
    phase: str,
    split: GraphSplit,
    soft_labels: Tensor,
    config: Config,
    classes: int,
    folder: RunFolder | None,
    progress: Progress,
) -> tuple[Any, dict[str, Any]]:
    """Train one student; each starts from the seed, so that none depends on what ran before it."""
    torch.manual_seed(config.seed)
    student = _build_student(phase, config, split.graph.num_features, classes).to(split.graph.x.device)
    learner = StudentTraining(student, split, soft_labels, config)
    result = _fit_phase(phase, learner, config, folder, progress)
    for buffer in student.buffers():
        buffer.requires_grad_(False)
    return student, result


def _fit_phase(
    phase: str,
    learner: TeacherTraining | StudentTraining,
    config: Config,
    folder: RunFolder | None,
    progress: Progress,
) -> dict[str, Any]:
    """Train a phase, or take it from the run folder where it is finished."""
    if folder and (result := folder.finished(phase)) is not None:
        folder.load_phase(phase, learner.model)
        learner.resume_at(config.student.pretrain_epochs + 1)
        learner.model.eval()
        progress.say(f"{phase}: finished before, taken from {folder.path}")
        return result
    section = getattr(config, phase)
    result = asdict(
        fit(
            phase,
            learner,
            max_epochs=section.max_epochs,
            patience=section.patience,
            warmup=config.student.pretrain_epochs if phase == "student" else 0,
            min_epochs=section.min_epochs,
            folder=folder,
            progress=progress,
        )
    )
    if folder:
        folder.save_phase(phase, learner.model, result)
    return result


def _build_teacher(config: Config, features: int, classes: int) -> nn.Module:
    section = config.teacher
    return build_teacher(
        section.name,
        features,
        classes,
        hidden_channels=section.hidden_channels,
        num_layers=section.num_layers,
        dropout=section.dropout,
        norm=section.norm,
    )


def _build_student(phase: str, config: Config, features: int, classes: int) -> MLPStudent | RbMStudent:
    if phase == "student":
        return RbMStudent(**_student_arguments(config, features, classes))
    shape = config.student
    return MLPStudent(
        features,
        shape.hidden_channels,
        classes,
        num_layers=shape.num_layers,
        norm=shape.norm,
        dropout=config.mlp.dropout,
    )


def _student_arguments(config: Config, features: int, classes: int) -> dict[str, Any]:
    """Arguments of :class:`RbMStudent`; they are also what a saved student is rebuilt from."""
    names = (
        "hidden_channels",
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
    chosen = {name: getattr(config.student, name) for name in names}
    return {"in_channels": features, "out_channels": classes, **chosen}


def _given_result(observed_logits: Tensor, full_logits: Tensor, split: GraphSplit) -> dict[str, Any]:
    accuracies = split_accuracies(observed_logits, full_logits, split)
    return asdict(Result(accuracies.val, accuracies.test, accuracies.test))


def _parameters(model: nn.Module | None) -> dict[str, Any]:
    if model is None:
        return {"parameters": None, "active_parameters": None}
    total, active = count_parameters(model)
    return {"parameters": total, "active_parameters": active}


def _timings(
    split: GraphSplit, teacher: nn.Module | None, mlp: nn.Module, student: nn.Module, config: Config
) -> dict[str, dict[str, float]]:
    full = split.graph
    latencies = {"mlp": student_latency(mlp, full.x), "student": student_latency(student, full.x)}
    if teacher is not None:
        latencies["teacher"] = teacher_latency(teacher, full, num_layers=config.teacher.num_layers)
    return {name: {"one_node_ms": one, "all_nodes_ms": every} for name, (one, every) in latencies.items()}


def _check_logits(logits: Tensor, nodes: int, classes: int) -> None:
    if not isinstance(logits, Tensor) or logits.shape != (nodes, classes):
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"teacher logits have shape {shape}, expected [{nodes}, {classes}]: one row a node of the full graph,"
            " one column a class"
        )
    if not torch.isfinite(logits).all():
        row = int((~torch.isfinite(logits)).any(-1).nonzero()[0])
        raise ValueError(f"teacher logits of node {row} are not finite; every node needs a finite row")


def _check_experts(student: StudentConfig, nodes: int) -> None:
    if student.num_experts > nodes:
        raise ValueError(
            f"student.num_experts is {student.num_experts} but the observed graph has {nodes} nodes;"
            " use at most as many experts as nodes"
        )


@contextmanager
def _deterministic() -> Iterator[None]:
    """Repeatable kernels inside, and the caller's random state and settings untouched outside."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)

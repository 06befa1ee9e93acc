"""The main job: train a teacher on the graph, distil it into students that need no graph, and compare them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch_geometric.data import Data

from rbm.cache import Cache
from rbm.checkpoint import RunFolder, save_student, write_json
from rbm.config import Config, StudentConfig
from rbm.datasets import num_classes, validate_data
from rbm.encodings import Encodings, encode
from rbm.learners import StudentTraining, TeacherTraining, student_inputs
from rbm.metrics import student_latency, teacher_latency
from rbm.progress import Progress
from rbm.sparse import Rows
from rbm.splits import GraphSplit, split_graph, without_test_set
from rbm.students import MLPStudent, RbMStudent, count_parameters
from rbm.teachers import check_teacher
from rbm.teaching import (
    Teaching,
    build_configured_teacher,
    cached_teacher,
    check_logits,
    teaching_from_logits,
    teaching_from_module,
)
from rbm.training import fit

STUDENTS = ("mlp", "student")


@dataclass
class Distillation:
    """What :func:`distill` returns.

    Attributes:
        student: the RbM student at its best validation epoch, in eval mode; None where it was not asked for.
        mlp: the plain student, trained with the same width, depth and soft labels; None likewise.
        teacher: the teacher's module, or None where only its logits were given.
        teacher_logits: ``[N, C]`` on the full graph.
        split: who was seen in training and who was not.
        encodings: what students see beside the features, or None: their input is :meth:`student_inputs`.
        summary: accuracies and parameter counts, as in ``summary.json``.
        timings: seconds of each phase in this process, and milliseconds for one node and for all, as in
            ``timings.json``.
        config: the configuration that made it.
    """

    student: RbMStudent | None
    mlp: MLPStudent | None
    teacher: nn.Module | None
    teacher_logits: Tensor
    split: GraphSplit
    encodings: Encodings | None
    summary: dict[str, Any]
    timings: dict[str, Any]
    config: Config

    def student_inputs(self) -> Rows:
        """The rows that a student takes for all nodes of the full graph: features, and beside them encodings."""
        return student_inputs(self.split, self.encodings)[1]


def distill(
    data: Data,
    teacher: nn.Module | Tensor | str | None = None,
    *,
    config: Config | None = None,
    students: Sequence[str] = STUDENTS,
    encodings: Sequence[Tensor] = (),
    folder: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    cache: Path | str | None = None,
    unseen_fraction: float = 0.2,
    measure_latency: bool = True,
    console: Console | None = None,
) -> Distillation:
    """Distil a graph neural network into a Routing-by-Memory student.

    Args:
        data: a graph with ``x [N, F]`` (dense or CSR), ``edge_index [2, M]``, ``y [N]`` and boolean ``train_mask``,
            ``val_mask``, ``test_mask``.
        teacher: a trained module called as ``teacher(x, edge_index) -> logits [N, C]``; or logits ``[N, C]``; or the
            name of a teacher to train (``sage`` or ``gcn``), or ``logits`` for those that ``data.teacher_logits``
            holds; by default the one in ``config``.
        config: everything else; see :class:`rbm.config.Config`. Its ``dataset`` and ``root`` are not read.
        students: which to train, of ``mlp`` and ``student`` (the RbM student).
        encodings: further columns of a student's input, ``[N, D]`` each, beside those of ``config.encoding``.
        folder: run folder to write to (see :class:`rbm.checkpoint.RunFolder`); nothing is written by default.
        resume: continue the run of this folder.
        overwrite: replace the run of this folder.
        cache: folder where trained teachers and encodings are kept for other runs (see :class:`rbm.cache.Cache`).
        unseen_fraction: share of the test nodes that the inductive setting hides; all of those that take their place
            where ``config.evaluate_on`` is ``validation``.
        measure_latency: time predictions at the end, a second or so; idle in a run that shares its cores.
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
    _check_students(students)
    validate_data(data)
    classes = num_classes(data)
    if config.evaluate_on == "validation":
        if isinstance(teacher, Tensor) or len(encodings):
            raise ValueError(
                "evaluate_on is 'validation', which takes nodes away, and logits or encodings are given for all nodes;"
                " train a teacher, pass a module, or set data.teacher_logits and teacher='logits'"
            )
        data = without_test_set(data, config.setting, unseen_fraction=unseen_fraction, seed=config.seed)
        unseen_fraction = 1.0
    split = split_graph(data, config.setting, unseen_fraction=unseen_fraction, seed=config.seed)
    _check_experts(config.student, split.observed.num_nodes)
    if teacher is None and config.teacher.name == "logits":
        teacher = _stored_logits(data)
    if teacher is None:
        check_teacher(config.teacher.name)
    elif isinstance(teacher, Tensor):
        check_logits(teacher, data.num_nodes, classes)
    run = None if folder is None else RunFolder(folder, config, resume=resume, overwrite=overwrite)
    kept, progress = Cache(cache), Progress(console)
    progress.say(
        f"{data.num_nodes:,} nodes, {data.num_edges:,} edges, {data.num_features:,} features, {classes} classes"
    )
    teacher_name = config.teacher.name if teacher is None else "given"

    trained: dict[str, nn.Module] = {}
    results: dict[str, dict[str, Any]] = {}
    timings: dict[str, dict[str, float]] = {}
    with _deterministic():
        with _timed(timings, "teacher"):
            teacher, teaching = _teach(split, teacher, config, classes, run, kept, progress)
        with progress.step("encodings"), _timed(timings, "encodings"):
            encoded = encode(split, config.encoding, classes, seed=config.seed, cache=kept, extra=list(encodings))
        for phase in students:
            with _timed(timings, phase):
                trained[phase], results[phase] = _learn(phase, split, teaching, encoded, config, classes, run, progress)

    summary = {
        "dataset": config.dataset,
        "setting": config.setting,
        "protocol": config.protocol,
        "preset": config.preset,
        "seed": config.seed,
        "nodes": data.num_nodes,
        "edges": data.num_edges,
        "features": data.num_features,
        "classes": classes,
        "teacher": {"name": teacher_name, **teaching.result, **_parameters(teacher)},
        **{phase: {**results[phase], **_parameters(trained[phase])} for phase in students},
    }
    if measure_latency:
        for name, latency in _latencies(split, encoded, teacher, trained, config).items():
            timings[name] |= latency
    student, mlp = trained.get("student"), trained.get("mlp")
    if run:
        if student is not None:
            width = student.layers[0].in_features
            save_student(run.path, student, _student_arguments(config, width, classes))
        if encoded is not None:
            run.save_tensors("encodings", {"encodings": encoded.full})
        write_json(run.path / "summary.json", summary)
        write_json(run.path / "timings.json", timings)
    return Distillation(student, mlp, teacher, teaching.logits, split, encoded, summary, timings, config)


def _teach(
    split: GraphSplit,
    teacher: nn.Module | Tensor | None,
    config: Config,
    classes: int,
    run: RunFolder | None,
    cache: Cache,
    progress: Progress,
) -> tuple[nn.Module | None, Teaching]:
    """The teacher's module, where there is one, and what students learn from it."""
    if isinstance(teacher, Tensor):
        return None, teaching_from_logits(teacher, split)
    result = None
    if teacher is None:
        torch.manual_seed(config.seed)
        teacher = build_configured_teacher(config, split.graph.num_features, classes).to(split.graph.x.device)

        def train() -> dict[str, Any]:
            return _fit_phase("teacher", TeacherTraining(teacher, split, config), config, run, progress)

        if run is not None and run.finished("teacher") is not None:
            result = train()  # a run folder keeps a teacher of its own
        else:
            result = cached_teacher(teacher, split, config, cache, train, progress)
            teacher.eval()
            if run is not None:
                run.save_phase("teacher", teacher, result)
    return teacher, teaching_from_module(teacher, split, config, classes, result)


def _learn(
    phase: str,
    split: GraphSplit,
    teaching: Teaching,
    encodings: Encodings | None,
    config: Config,
    classes: int,
    run: RunFolder | None,
    progress: Progress,
) -> tuple[Any, dict[str, Any]]:
    """Train one student; each starts from the seed, so that none depends on what ran before it."""
    torch.manual_seed(config.seed)
    width = split.graph.num_features + (0 if encodings is None else encodings.full.shape[1])
    student = build_student(phase, config, width, classes).to(split.graph.x.device)
    learner = StudentTraining(student, split, teaching, config, encodings)
    result = _fit_phase(phase, learner, config, run, progress)
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


def build_student(phase: str, config: Config, features: int, classes: int) -> MLPStudent | RbMStudent:
    """The untrained student of a phase, ``mlp`` or ``student``, that takes ``features`` columns, encodings included."""
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


def _parameters(model: nn.Module | None) -> dict[str, Any]:
    if model is None:
        return {"parameters": None, "active_parameters": None}
    total, active = count_parameters(model)
    return {"parameters": total, "active_parameters": active}


def _latencies(
    split: GraphSplit,
    encodings: Encodings | None,
    teacher: nn.Module | None,
    students: dict[str, nn.Module],
    config: Config,
) -> dict[str, dict[str, float]]:
    rows = student_inputs(split, encodings)[1]
    latencies = {phase: student_latency(student, rows) for phase, student in students.items()}
    if teacher is not None:
        latencies["teacher"] = teacher_latency(teacher, split.graph, num_layers=config.teacher.num_layers)
    return {name: {"one_node_ms": one, "all_nodes_ms": every} for name, (one, every) in latencies.items()}


def _check_students(students: Sequence[str]) -> None:
    if not students or not set(students) <= set(STUDENTS):
        raise ValueError(f"students is {list(students)}, expected one or more of {', '.join(STUDENTS)}")


def _stored_logits(data: Data) -> Tensor:
    logits = data.get("teacher_logits")
    if logits is None:
        raise ValueError(
            "teacher is 'logits' but the graph holds none; set data.teacher_logits ([nodes, classes]), or name another"
        )
    return logits


def _check_experts(student: StudentConfig, nodes: int) -> None:
    if student.num_experts > nodes:
        raise ValueError(
            f"student.num_experts is {student.num_experts} but the observed graph has {nodes} nodes;"
            " use at most as many experts as nodes"
        )


@contextmanager
def _timed(timings: dict[str, dict[str, float]], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    timings[name] = {"seconds": round(time.perf_counter() - started, 3)}


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

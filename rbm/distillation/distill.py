"""The main job: train a teacher on the graph, distil it into students that need no graph, and compare them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch_geometric.data import Data

from rbm.config import Config, EncodingConfig
from rbm.config.presets import teacher_settings
from rbm.datasets import num_classes, validate_data
from rbm.datasets.encodings import Encodings, encode
from rbm.datasets.splits import GraphSplit, split_graph, without_test_set
from rbm.distillation.latency import student_latency, teacher_latency
from rbm.distillation.registry import METHODS, Method
from rbm.distillation.summary import results_markdown
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import student_inputs
from rbm.nn.parameters import count_parameters
from rbm.nn.sparse_rows import Rows
from rbm.teachers import check_teacher
from rbm.teachers.neighbor_sampling import check_sampling
from rbm.teachers.outputs import (
    TeacherOutputs,
    build_configured_teacher,
    cached_teacher,
    check_logits,
    outputs_from_logits,
    outputs_from_module,
)
from rbm.teachers.training import build_teacher_trainer
from rbm.training.loop import fit_phase
from rbm.training.run_folder import RunFolder, save_student
from rbm.training.tensorboard import check_tensorboard, events
from rbm.utils.cache import Cache
from rbm.utils.distributed import broadcast_from_rank0, forked, is_main_process, on_main_process, once
from rbm.utils.files import write_atomically, write_json
from rbm.utils.precision import fast_float32
from rbm.utils.progress import Progress

DEFAULT_METHODS = ("mlp", "rbm")


@dataclass
class Distillation:
    """What :func:`distill` returns.

    Attributes:
        students: method -> its student at its best validation epoch, in eval mode.
        student: the one that the run folder keeps for predictions: that of the last method.
        teacher: the teacher's module, or None where only its logits were given.
        teacher_logits: ``[N, C]`` on the full graph.
        split: who was seen in training and who was not.
        encodings: method -> what its student sees beside the features, or None.
        summary: accuracies and parameter counts, as in ``summary.json``.
        timings: seconds of each phase in this process, and milliseconds for one node and for all, as in
            ``timings.json``.
        config: the configuration that made it.
    """

    students: dict[str, nn.Module]
    teacher: nn.Module | None
    teacher_logits: Tensor
    split: GraphSplit
    encodings: dict[str, Encodings | None]
    summary: dict[str, Any]
    timings: dict[str, Any]
    config: Config

    @property
    def student(self) -> nn.Module:
        return self.students[self.method]

    @property
    def method(self) -> str:
        """The method whose student :attr:`student` is."""
        return list(self.students)[-1]

    def student_inputs(self, method: str | None = None) -> Rows:
        """The rows that a method's student takes for all nodes of the full graph: features, and beside them encodings.
        By default those of :attr:`student`.
        """
        return student_inputs(self.split, self.encodings[method or self.method])[1]


def distill(
    data: Data,
    teacher: nn.Module | Tensor | str | None = None,
    *,
    config: Config | None = None,
    methods: Sequence[str] = DEFAULT_METHODS,
    encodings: Sequence[Tensor] = (),
    folder: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    cache: Path | str | None = None,
    unseen_fraction: float = 0.2,
    measure_latency: bool = True,
    tensorboard: bool = False,
    console: Console | None = None,
) -> Distillation:
    """Distil a graph neural network into students that need no graph: an MLP and an RbM student, or others.

    Args:
        data: a graph with ``x [N, F]`` (dense or CSR), ``edge_index [2, M]``, ``y [N]`` and boolean ``train_mask``,
            ``val_mask``, ``test_mask``.
        teacher: a trained module called as ``teacher(x, edge_index) -> logits [N, C]``; or logits ``[N, C]``; or the
            name of a teacher to train (of ``rbm.teachers.TEACHERS``), or ``logits`` for those that
            ``data.teacher_logits`` holds; by default the one in ``config``.
        config: everything else; see :class:`rbm.config.Config`. Its ``dataset`` and ``root`` are not read. By default
            the tree's defaults, and the settings of its own that a named teacher may have.
        methods: which students to train, of ``rbm.distillation.registry.METHODS``; the run folder keeps the last one's
            for predictions.
        encodings: further columns of a student's input, ``[N, D]`` each, beside those that its section ``encoding``
            asks for; methods that see features alone do not get them.
        folder: run folder to write to (see :class:`rbm.training.run_folder.RunFolder`); nothing is written by default.
        resume: continue the run of this folder.
        overwrite: replace the run of this folder.
        cache: folder where trained teachers and encodings are kept for other runs (see :class:`rbm.utils.cache.Cache`).
        unseen_fraction: share of the test nodes that the inductive setting hides; all of those that take their place
            where ``config.evaluate_on`` is ``validation``.
        measure_latency: time predictions at the end, a second or so; idle in a run that shares its cores.
        tensorboard: write the metrics of every epoch, and the load of a mixture's experts, as events of TensorBoard
            into the folder too; ``metrics.jsonl`` then has the load as well.
        console: shows progress there; silent by default.

    Returns:
        The students and all that is needed to judge them. The same seed gives the same numbers, bit for bit, on the
        same machine; the global random state is left as it was.

    Where a process group runs, call it on all ranks, with the same arguments: students whose method is
    ``data_parallel`` are trained by all of them, everything else by the first while the others wait. The first one has
    the folder and the cache, and reports; all get the students (:mod:`rbm.utils.distributed`).

    Raises:
        ValueError, TypeError: data, teacher or configuration do not fit; before any work.
        ModuleNotFoundError: tensorboard is asked for and not installed.
        FileExistsError, FileNotFoundError: there is a run in the folder, or none to resume.
    """
    if isinstance(teacher, str):
        config = config or Config().updated(teacher_settings(teacher))
        config, teacher = config.updated({"teacher": {"name": teacher}}), None
    config = config or Config()
    _check_methods(methods)
    if tensorboard:
        check_tensorboard(folder)
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
    _check_experts(config, methods, split.observed.num_nodes)
    if teacher is None and config.teacher.name == "logits":
        teacher = _stored_logits(data)
    if teacher is None:
        check_teacher(config.teacher.name)
        check_sampling(config)
    elif isinstance(teacher, Tensor):
        check_logits(teacher, data.num_nodes, classes)
    run = None
    if folder is not None:
        run = on_main_process(lambda: RunFolder(folder, config, resume=resume, overwrite=overwrite))
    kept, progress = Cache(cache), Progress(console if is_main_process() else None)
    progress.say(
        f"{data.num_nodes:,} nodes, {data.num_edges:,} edges, {data.num_features:,} features, {classes} classes"
    )
    teacher_name = config.teacher.name if teacher is None else "given"

    learned: dict[str, TrainedStudent] = {}
    timings: dict[str, dict[str, float]] = {}
    writes_events = tensorboard and run is not None
    with deterministic(), fast_float32(data.x.device), events(run) if writes_events else nullcontext():
        with _timed(timings, "teacher"):
            teacher, teacher_outputs = _teach(split, teacher, config, classes, run, kept, progress)
        encode_once = _encoder(split, config, classes, kept, list(encodings), progress, timings)
        task = DistillationTask(split, teacher_outputs, config, classes, encode_once, run, progress)
        if any("encoding" in METHODS[method].sections for method in methods):
            encode_once(config.encoding)
        for method in methods:
            with _timed(timings, method):
                learned[method] = _train_student(METHODS[method], task)

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
        "teacher": {"name": teacher_name, **teacher_outputs.result, **_parameters(teacher)},
        **{method: {**found.result, **_parameters(found.student)} for method, found in learned.items()},
    }
    if measure_latency and is_main_process():
        for name, latency in _latencies(split, teacher, learned, config).items():
            timings[name] |= latency
    if run:
        method, found = list(learned.items())[-1]
        run.save_phase(method, found.student, found.result)
        save_student(run.path, method, found.student, found.arguments)
        if found.encodings is not None:
            run.save_tensors("encodings", {"encodings": found.encodings.full})
        write_json(run.path / "summary.json", summary)
        write_json(run.path / "timings.json", timings)
        text = results_markdown(summary, timings)
        write_atomically(run.path / "results.md", lambda partial: partial.write_text(text))
    return Distillation(
        {method: found.student for method, found in learned.items()},
        teacher,
        teacher_outputs.logits,
        split,
        {method: found.encodings for method, found in learned.items()},
        summary,
        timings,
        config,
    )


def _encoder(
    split: GraphSplit,
    config: Config,
    classes: int,
    cache: Cache,
    extra: list[Tensor],
    progress: Progress,
    timings: dict[str, dict[str, float]],
) -> Callable[[EncodingConfig], Encodings | None]:
    """Encodings by what asks for them; methods that ask for the same share one, and the time that it took."""
    known: dict[Any, Encodings | None] = {}

    def encode_once(section: EncodingConfig) -> Encodings | None:
        def compute() -> Encodings | None:
            with progress.step("encodings"), _timed(timings, "encodings"):
                return encode(split, section, classes, seed=config.seed, cache=cache, extra=extra)

        return once(known, section, compute)

    return encode_once


def _train_student(method: Method, task: DistillationTask) -> TrainedStudent:
    """A method that knows nothing of ranks is the first one's."""
    return method.train(task) if method.data_parallel else broadcast_from_rank0(lambda: method.train(task))


def _teach(
    split: GraphSplit,
    teacher: nn.Module | Tensor | None,
    config: Config,
    classes: int,
    run: RunFolder | None,
    cache: Cache,
    progress: Progress,
) -> tuple[nn.Module | None, TeacherOutputs]:
    """The teacher's module, where there is one, and what students learn from it."""
    if isinstance(teacher, Tensor):
        return None, outputs_from_logits(teacher, split)
    named = teacher is None
    if named:
        torch.manual_seed(config.seed)
        teacher = build_configured_teacher(config, split, classes)

    def train() -> dict[str, Any]:
        return fit_phase("teacher", build_teacher_trainer(teacher, split, config), config.teacher, run, progress)

    def taught() -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Any]]:
        result = None
        if named and run is not None and run.finished("teacher") is not None:
            result = train()  # a run folder keeps a teacher of its own
        elif named:
            result = cached_teacher(teacher, split, config, cache, train, progress)
            teacher.eval()
            if run is not None:
                run.save_phase("teacher", teacher, result)
        teacher_outputs = outputs_from_module(teacher, split, classes, result)
        return teacher.state_dict(), teacher_outputs.soft_labels, teacher_outputs.logits, teacher_outputs.result

    state, soft_labels, logits, result = broadcast_from_rank0(taught)
    if not is_main_process():
        teacher.load_state_dict(state)
        teacher.eval()
    return teacher, TeacherOutputs(soft_labels, logits, result, teacher, split.observed)


def _parameters(model: nn.Module | None) -> dict[str, Any]:
    if model is None:
        return {"parameters": None, "active_parameters": None}
    total, active = count_parameters(model)
    return {"parameters": total, "active_parameters": active}


def _latencies(
    split: GraphSplit, teacher: nn.Module | None, learned: dict[str, TrainedStudent], config: Config
) -> dict[str, dict[str, float]]:
    latencies = {
        method: student_latency(found.student, student_inputs(split, found.encodings)[1])
        for method, found in learned.items()
    }
    if teacher is not None:
        latencies["teacher"] = teacher_latency(teacher, split.graph, num_layers=config.teacher.num_layers)
    return {name: {"one_node_ms": one, "all_nodes_ms": every} for name, (one, every) in latencies.items()}


def _check_methods(methods: Sequence[str]) -> None:
    unknown = [name for name in methods if name not in METHODS]
    if not methods or unknown or len(set(methods)) < len(methods):
        raise ValueError(f"methods is {list(methods)}, expected one or more of {', '.join(METHODS)}, each once")


def _stored_logits(data: Data) -> Tensor:
    logits = data.get("teacher_logits")
    if logits is None:
        raise ValueError(
            "teacher is 'logits' but the graph holds none; set data.teacher_logits ([nodes, classes]), or name another"
        )
    return logits


def _check_experts(config: Config, methods: Sequence[str], nodes: int) -> None:
    if "rbm" in methods and config.rbm.num_experts > nodes:
        raise ValueError(
            f"rbm.num_experts is {config.rbm.num_experts} but the observed graph has {nodes} nodes;"
            " use at most as many experts as nodes"
        )


@contextmanager
def _timed(timings: dict[str, dict[str, float]], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    before = timings.get(name, {}).get("seconds", 0.0)
    timings[name] = {"seconds": round(before + time.perf_counter() - started, 3)}


@contextmanager
def deterministic() -> Iterator[None]:
    """Repeatable kernels inside, and the caller's random state and settings untouched outside."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling every new tensor finds reads of what was never written; a seventh of an epoch on a CPU goes into it.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with forked():
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills

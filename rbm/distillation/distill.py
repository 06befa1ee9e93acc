"""The main function: train a teacher on the graph, distil it into students that need no graph, and compare them."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
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
from rbm.distillation.auto.folder import read_chosen
from rbm.distillation.auto.run import Chosen, budget_in_seconds, choose, searched_for, with_logits
from rbm.distillation.choices import Choices, with_labels
from rbm.distillation.finish import REPORT_SECONDS, draws, finish, sizes_of, summary_of
from rbm.distillation.neighbor_labels import uses_neighbor_labels
from rbm.distillation.registry import METHODS, Method, check_hidden_layer, check_teacher_of
from rbm.distillation.result import Distillation
from rbm.distillation.run_graph import named_after_graph
from rbm.distillation.run_inputs import check_inputs, choices_of, hashes
from rbm.distillation.source import is_ahead_of_teacher, outputs_of_labels
from rbm.distillation.task import DistillationTask, Encoder, TrainedStudent, check_student, columns_of
from rbm.distillation.verdict import LABELS_ALONE, judge
from rbm.teachers import TEACHERS, check_teacher
from rbm.teachers.neighbor_sampling import check_sampling
from rbm.teachers.outputs import TeacherOutputs, check_logits, check_module, warn_of_flat_soft_labels
from rbm.teachers.prepare import outputs_of_given, prepare_teacher
from rbm.training.run_folder import RunFolder, check_has_folder, open_run
from rbm.training.tensorboard import check_tensorboard, events
from rbm.utils.arguments import check_flags
from rbm.utils.cache import Cache, cache_or_temporary
from rbm.utils.distributed import broadcast_from_rank0, is_main_process, on_main_process
from rbm.utils.files import as_path
from rbm.utils.precision import fast_float32
from rbm.utils.progress import Progress, console_for
from rbm.utils.repeatable import deterministic, plain_modes
from rbm.utils.suggestions import did_you_mean
from rbm.utils.timings import Timings

DEFAULT_METHODS = ("mlp", "rbm")


@plain_modes()
def distill(
    data: Data,
    teacher: nn.Module | Tensor | str | None = None,
    *,
    config: Config | None = None,
    methods: Sequence[str] | None = None,
    keep: str | None = None,
    labels_alone: bool | None = None,
    auto: bool = False,
    budget: float | str | None = None,
    encodings: Sequence[Tensor] = (),
    features_only: bool = False,
    folder: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    cache: Path | str | None = None,
    unseen_fraction: float | None = None,
    measure_latency: bool = True,
    tensorboard: bool = False,
    plots: bool | None = None,
    console: Console | Literal["auto"] | None = "auto",
) -> Distillation:
    """Distil a graph neural network into students that need no graph: an MLP and an RbM student, or others.

    Args:
        data: a graph with ``x [N, F]`` (dense or CSR), ``edge_index [2, M]``, ``y [N]`` and boolean ``train_mask``,
            ``val_mask``, ``test_mask``. Results refer to it by ``data.name``, which :func:`rbm.load_dataset` sets; a
            graph without a name is called :data:`~rbm.distillation.run_graph.OWN_GRAPH`.
        teacher: a trained module called as ``teacher(x, edge_index) -> logits [N, C]``; logits ``[N, C]``; the name of
            a teacher to train (see ``rbm.teachers.TEACHERS``); or ``"logits"`` to use ``data.teacher_logits``. By
            default the one in ``config``.
        config: all other settings; see :class:`rbm.config.Config`. ``dataset`` and ``root`` are not used to load
            anything; a ``dataset`` other than the default is the name of the graph in the results. By default, the
            default configuration with the settings of the named teacher, if it has its own.
        methods: the students to train, from ``rbm.distillation.registry.METHODS``; by default ``mlp`` and ``rbm``, or
            those of the run that is resumed. The run folder stores all of them.
        keep: the method whose student is kept for predictions; in a resumed run by default the one named before.
            Otherwise the best at validation, or a cheaper one that is behind it by at most half a point and by no more
            than chance (:func:`rbm.distillation.verdict.judge`).
        labels_alone: also train the method ``labels``, an MLP that the teacher is compared with; by default, unless a
            run is resumed that was started without. Its student can be kept only if ``keep`` names it, if ``methods``
            contains it, or if there are several ``methods`` and it is more than half a point ahead of all others.
        auto: first search for the teacher, the encodings, the student and its most important settings on validation
            nodes (:mod:`rbm.distillation.auto`). The search starts from ``config``; a given ``teacher``, ``methods``
            and ``keep`` restrict it. The run then uses the configuration that was chosen.
        budget: time for the search and the run after it, in seconds or as ``"90s"``, ``"10m"``, ``"1.5h"``; by default
            ten minutes. If it is too small for the starting points of the search and for the run, ``config`` is used as
            it is, and the run may take longer.
        encodings: further columns of a student's input, ``[N, D]`` each, in addition to those of the ``encoding``
            section. Methods that use only features do not get them.
        features_only: train students whose input is only the features, whatever encodings ``config`` selects; with
            ``auto``, encodings are not searched.
        folder: run folder to write to (see :class:`rbm.training.run_folder.RunFolder`); nothing is written by default.
            Your own graph is stored in it, for ``rbm latency`` and ``rbm report``. ``resume``, ``overwrite``, ``plots``
            and ``tensorboard`` need it.
        resume: continue the run in this folder, or, with ``auto``, its search.
        overwrite: replace the run in this folder.
        cache: folder where trained teachers and encodings are kept for other runs (see :class:`rbm.utils.cache.Cache`).
        unseen_fraction: share of the test nodes that the inductive setting hides; by default that of the graph, see
            :func:`rbm.datasets.splits.split_graph`.
        measure_latency: measure the latency of predictions at the end, which takes about a second. The result means
            little if other processes use the same cores.
        tensorboard: also write the metrics of every epoch and the load of the experts to the folder as TensorBoard
            events; ``metrics.jsonl`` then contains the load as well.
        plots: also write plots and ``report.html`` at the end; if this fails, the run logs a warning. On by default if
            there is a folder, unless the environment variable ``RBM_PLOTS`` is 0.
        console: where progress is shown, or None; by default standard error, if it is a terminal, or a notebook. With
            None and without a folder, warnings about the graph and the teacher are left out as well.

    Returns:
        The students and everything needed to judge them. The same seed gives the same numbers, bit for bit, on the same
        machine; the global random state is left unchanged. The number of trials that fit into the budget of a search
        depends on the speed of the machine; the trials themselves do not.

    In a process group, call the function on all ranks with the same arguments. Students whose method is
    ``data_parallel`` are trained by all ranks; everything else runs on the first rank while the others wait. Only the
    first rank uses the folder and the cache and reports progress; all ranks get the students
    (:mod:`rbm.utils.distributed`).

    Raises:
        ValueError, TypeError: data, teacher or configuration are invalid; raised before any work.
        ModuleNotFoundError: ``tensorboard`` is set but TensorBoard is not installed.
        ValueError: ``auto`` is set without Optuna, with ``encodings``, or when several processes train together.
        FileExistsError, FileNotFoundError: the folder already has a run, or has none to resume.
        BlockingIOError: another process has the folder open.
    """
    timings, named = Timings(), teacher if isinstance(teacher, str) else None
    check_flags(auto=auto, features_only=features_only, resume=resume, overwrite=overwrite)
    check_flags(measure_latency=measure_latency, tensorboard=tensorboard, plots=plots or False)
    config, teacher = _named(config, teacher)
    warn = folder is not None or console is not None  # also without a terminal, but not for each trial of a search
    console = console_for(console)
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
    requested, methods = tuple(methods), with_labels(methods, labels_alone)
    keep = before.keep if keep is None and before.keep in methods else keep
    if keep is not None and keep not in methods:
        raise ValueError(f"keep is {keep!r}, expected one of {', '.join(methods)}, which this run trains")
    asked = Choices(requested, keep, labels_alone)
    check_has_folder(folder, resume=resume, overwrite=overwrite, plots=plots, tensorboard=tensorboard)
    if tensorboard:
        check_tensorboard()
    _check_graph(data, config, warn=warn)
    for place, own in enumerate(encodings):
        own_encoding(own, place, data.num_nodes)  # checked before the teacher is trained
    config = named_after_graph(config, data, folder if resume else None)
    classes, split = num_classes(data), split_for(config, data, unseen_fraction=unseen_fraction)
    given = _given(teacher, config, split, classes, methods)
    _check_sizes(config, methods, split)
    outputs = None
    if given is not None:  # asked before a run folder is made or replaced, since its answer may not fit
        with timings.measured("teacher"), deterministic(), fast_float32(data.x.device):
            outputs = outputs_of_given(given, split, classes)
    chosen: Chosen | None = None
    with ExitStack() as opened:
        if auto:
            if isinstance(given, Tensor):
                data, teacher, named = with_logits(data, given), None, "logits"
            config = config.updated({"teacher": {"name": named}}) if named else config
            cache = opened.enter_context(cache_or_temporary(cache))  # the run reuses encodings of the search
            chosen = choose(
                distill,
                data,
                teacher,
                config,
                teacher_name=named,
                methods=(keep,) if keep in requested else requested,
                asked=asked,
                budget=seconds,
                folder=folder,
                resume=resume,
                overwrite=overwrite,
                cache=cache,
                unseen_fraction=unseen_fraction,
                console=console,
                features_only=features_only,
                reserve=REPORT_SECONDS if folder is not None and draws(plots) else 0.0,
            )
            config, resume, overwrite = chosen.config, folder is not None, False
            given = given if isinstance(given, Tensor) else _given(teacher, config, split, classes, methods)
            timings["search"] = {"seconds": round(chosen.seconds, 3)}
        kept, progress = Cache(cache), Progress(console if is_main_process() else None, warn=warn)
        run = None
        if folder is not None:
            place = open_run(folder, config, resume=resume, overwrite=overwrite)
            run = on_main_process(lambda: opened.enter_context(place))
            now = partial(hashes, data, given, encodings, unseen_fraction)
            on_main_process(lambda: check_inputs(run, now(), asked, split.graph, resume))
        progress.say(sizes_of(split.graph, classes))

        with deterministic(), fast_float32(data.x.device), events(run) if tensorboard and run else nullcontext():
            outputs, trained, facts = _train(
                outputs, split, config, classes, methods, encodings, run, kept, progress, timings
            )
            search = chosen.outcome if chosen else read_chosen(folder)
            name = config.teacher.name if given is None else "given"
            facts |= {"searched_for": searched_for(search), "teacher": name}
            verdict = broadcast_from_rank0(lambda: judge(split, outputs.soft_labels, trained, requested, keep, **facts))
            if search:
                verdict["search"] = search

        found = Distillation(
            students={method: trained_student.student for method, trained_student in trained.items()},
            method=verdict["kept"],
            teacher=outputs.module,
            teacher_logits=outputs.logits,
            split=split,
            encodings={method: trained_student.encodings for method, trained_student in trained.items()},
            summary={
                **summary_of(config, split.graph, classes, {"name": name, **outputs.result}, outputs.module, trained),
                "verdict": verdict,
            },
            timings=timings,
            config=config,
            trials=chosen.rows if chosen else None,
        )
        finish(found, trained, run, data, latency=measure_latency, plots=plots, progress=progress)
    return found


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


def _given(
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


def _train(
    given: TeacherOutputs | None,
    split: GraphSplit,
    config: Config,
    classes: int,
    methods: Sequence[str],
    encodings: Sequence[Tensor],
    run: RunFolder | None,
    cache: Cache,
    progress: Progress,
    timings: Timings,
) -> tuple[TeacherOutputs, dict[str, TrainedStudent], dict[str, Any]]:
    """Train the teacher if the outputs of none are ``given``, then the students.

    Returns:
        The teacher's outputs; the students by method, in the order of ``methods``; and ``neighbors`` and ``source``,
        which say what the students learned from, as arguments of :func:`rbm.distillation.verdict.judge`.
    """
    outputs = given
    if outputs is None:
        with timings.measured("teacher"):
            outputs = prepare_teacher(split, config, classes, run=run, cache=cache, progress=progress)
    if "teacher" in cache.taken:
        timings["teacher"]["cached"] = True
    if progress.warn and is_main_process():
        warn_of_flat_soft_labels(outputs, split)
    encode = Encoder(split, classes, config.seed, cache, list(encodings), progress, timings)
    if any("encoding" in METHODS[method].sections for method in methods):
        encode(config.encoding)
    neighbors, source = uses_neighbor_labels(split, config), "teacher"
    student_config = config.updated({"distill": {"neighbors": neighbors}})
    of_teacher = task = DistillationTask(split, outputs, student_config, classes, encode, run, progress, cache)
    # The MLP on labels is trained first if the others may learn from it.
    others = [method for method in methods if method != LABELS_ALONE and METHODS[method].check_teacher is None]
    may_teach = LABELS_ALONE if given is None and config.distill.source == "auto" and others else None
    trained: dict[str, TrainedStudent] = {}
    for method in sorted(methods, key=lambda method: method != may_teach):
        with timings.measured(method):
            trained[method] = _train_student(METHODS[method], of_teacher if METHODS[method].check_teacher else task)
        if method in cache.taken:
            timings[method]["cached"] = True
        if method == may_teach and broadcast_from_rank0(partial(is_ahead_of_teacher, split, outputs, trained[method])):
            source = LABELS_ALONE
            task = replace(task, teacher_outputs=outputs_of_labels(split, trained[method]))
    for trained_student in trained.values():
        trained_student.student.encodings = columns_of(trained_student.encodings)
    return outputs, {method: trained[method] for method in methods}, {"neighbors": neighbors, "source": source}


def _train_student(method: Method, task: DistillationTask) -> TrainedStudent:
    """Train on all ranks if the method is data-parallel, otherwise on the first rank only."""
    trained = method.train(task) if method.data_parallel else broadcast_from_rank0(lambda: method.train(task))
    if not isinstance(trained, TrainedStudent):
        raise TypeError(f"method {method.title} returned a {type(trained).__name__}, expected a TrainedStudent")
    check_student(type(trained.student))
    return trained

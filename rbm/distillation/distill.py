"""The main function: train a teacher on the graph, distil it into students that need no graph, and compare them."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from torch import Tensor, nn
from torch_geometric.data import Data

from rbm.config import Config
from rbm.distillation.auto.folder import read_chosen
from rbm.distillation.auto.run import Chosen, choose, searched_for, with_logits
from rbm.distillation.finish import REPORT_SECONDS, draws, finish, sizes_of, summary_of
from rbm.distillation.neighbor_labels import uses_neighbor_labels
from rbm.distillation.registry import METHODS, Method
from rbm.distillation.request import Request, check_request
from rbm.distillation.result import Distillation
from rbm.distillation.run_inputs import check_inputs, hashes
from rbm.distillation.source import is_ahead_of_teacher, outputs_of_labels
from rbm.distillation.task import DistillationTask, Encoder, TrainedStudent, check_student, columns_of
from rbm.distillation.verdict import LABELS_ALONE, judge
from rbm.teachers.outputs import TeacherOutputs, warn_of_flat_soft_labels
from rbm.teachers.prepare import outputs_of_given, prepare_teacher
from rbm.training.run_folder import RunFolder, open_run
from rbm.training.tensorboard import events
from rbm.utils.arguments import check_flags
from rbm.utils.cache import Cache, cache_or_temporary
from rbm.utils.distributed import broadcast_from_rank0, is_main_process, on_main_process
from rbm.utils.precision import fast_float32
from rbm.utils.progress import Progress, console_for
from rbm.utils.repeatable import deterministic, plain_modes
from rbm.utils.timings import Timings


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
    timings = Timings()
    check_flags(auto=auto, features_only=features_only, resume=resume, overwrite=overwrite)
    check_flags(measure_latency=measure_latency, tensorboard=tensorboard, plots=plots or False)
    warn = folder is not None or console is not None  # also without a terminal, but not for each trial of a search
    console = console_for(console)
    request = check_request(
        data,
        teacher,
        config=config,
        methods=methods,
        keep=keep,
        labels_alone=labels_alone,
        auto=auto,
        budget=budget,
        encodings=encodings,
        features_only=features_only,
        folder=folder,
        resume=resume,
        overwrite=overwrite,
        unseen_fraction=unseen_fraction,
        tensorboard=tensorboard,
        plots=plots,
        warn=warn,
    )
    outputs, chosen = None, None
    if request.teacher is not None:  # asked before a run folder is made or replaced, since its answer may not fit
        with timings.measured("teacher"), deterministic(), fast_float32(data.x.device):
            outputs = outputs_of_given(request.teacher, request.split, request.classes)
    with ExitStack() as opened:
        if auto:
            cache = opened.enter_context(cache_or_temporary(cache))  # the run reuses encodings of the search
            request, chosen = _search(
                request,
                resume=resume,
                overwrite=overwrite,
                cache=cache,
                unseen_fraction=unseen_fraction,
                console=console,
                features_only=features_only,
                reserve=REPORT_SECONDS if request.folder is not None and draws(plots) else 0.0,
            )
            resume, overwrite = request.folder is not None, False
            timings["search"] = {"seconds": round(chosen.seconds, 3)}
        kept, progress = Cache(cache), Progress(console if is_main_process() else None, warn=warn)
        run = None
        if request.folder is not None:
            place = open_run(request.folder, request.config, resume=resume, overwrite=overwrite)
            run = on_main_process(lambda: opened.enter_context(place))
            now = partial(hashes, request.data, request.teacher, encodings, unseen_fraction)
            on_main_process(lambda: check_inputs(run, now(), request.asked, request.split.graph, resume))
        progress.say(sizes_of(request.split.graph, request.classes))
        with deterministic(), fast_float32(data.x.device), events(run) if tensorboard and run else nullcontext():
            outputs, trained, facts = _train(request, outputs, run, kept, progress, timings)
            verdict = _verdict(request, outputs, trained, chosen.outcome if chosen else None, facts)
        found = _result(request, outputs, trained, verdict, chosen, timings)
        finish(found, trained, run, request.data, latency=measure_latency, plots=plots, progress=progress)
    return found


def _search(request: Request, **options: Any) -> tuple[Request, Chosen]:
    """Search for a configuration. Returns the request with the chosen one; ``options`` are those of
    :func:`rbm.distillation.auto.run.choose`.
    """
    teacher, name, config = request.teacher, request.teacher_name, request.config
    if isinstance(teacher, Tensor):
        request = replace(request, data=with_logits(request.data, teacher))
        teacher, name = None, "logits"
    asked = request.asked
    chosen = choose(
        distill,
        request.data,
        teacher,
        config.updated({"teacher": {"name": name}}) if name else config,
        teacher_name=name,
        methods=(asked.keep,) if asked.keep in asked.methods else asked.methods,
        asked=asked,
        budget=request.budget,
        folder=request.folder,
        **options,
    )
    return request.after_search(chosen.config), chosen


def _train(
    request: Request,
    given: TeacherOutputs | None,
    run: RunFolder | None,
    cache: Cache,
    progress: Progress,
    timings: Timings,
) -> tuple[TeacherOutputs, dict[str, TrainedStudent], dict[str, Any]]:
    """Train the teacher if the outputs of none are ``given``, then the students.

    Returns:
        The teacher's outputs; the students by method, in the order of the request; and ``neighbors`` and ``source``,
        which say what the students learned from, as arguments of :func:`rbm.distillation.verdict.judge`.
    """
    split, config, classes, methods = request.split, request.config, request.classes, request.methods
    outputs = given
    if outputs is None:
        with timings.measured("teacher"):
            outputs = prepare_teacher(split, config, classes, run=run, cache=cache, progress=progress)
    if "teacher" in cache.taken:
        timings["teacher"]["cached"] = True
    if progress.warn and is_main_process():
        warn_of_flat_soft_labels(outputs, split)
    encode = Encoder(split, classes, config.seed, cache, list(request.encodings), progress, timings)
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


def _verdict(
    request: Request,
    outputs: TeacherOutputs,
    trained: dict[str, TrainedStudent],
    search: dict[str, Any] | None,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """The verdict of :func:`rbm.distillation.verdict.judge`, with the outcome of a search if there was one, also before
    the run was resumed.
    """
    search = search or read_chosen(request.folder)
    facts |= {"searched_for": searched_for(search), "teacher": request.teacher_in_results}
    asked = request.asked
    verdict = broadcast_from_rank0(
        lambda: judge(request.split, outputs.soft_labels, trained, asked.methods, asked.keep, **facts)
    )
    return verdict | ({"search": search} if search else {})


def _result(
    request: Request,
    outputs: TeacherOutputs,
    trained: dict[str, TrainedStudent],
    verdict: dict[str, Any],
    chosen: Chosen | None,
    timings: Timings,
) -> Distillation:
    config, graph, classes = request.config, request.split.graph, request.classes
    teacher = {"name": request.teacher_in_results, **outputs.result}
    return Distillation(
        students={method: of.student for method, of in trained.items()},
        method=verdict["kept"],
        teacher=outputs.module,
        teacher_logits=outputs.logits,
        split=request.split,
        encodings={method: of.encodings for method, of in trained.items()},
        summary={**summary_of(config, graph, classes, teacher, outputs.module, trained), "verdict": verdict},
        timings=timings,
        config=config,
        trials=chosen.rows if chosen else None,
    )

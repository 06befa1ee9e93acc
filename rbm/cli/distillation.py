"""``rbm distill``."""

import shlex
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from rbm.cli.errors import SAME_COMMAND, advise_resuming
from rbm.cli.experiments import run_and_show
from rbm.cli.options import (
    CACHE,
    EXECUTION,
    FOLDER,
    SETTINGS,
    STUDENTS,
    Assignments,
    CacheFolder,
    ConfigFile,
    Dataset,
    Device,
    Precision,
    Protocol,
    Root,
    Setting,
    TeacherName,
    Undirected,
    configuration,
    console,
    lasting_changes,
    run_name,
    status,
    usable_device,
)
from rbm.utils.console import print_line, print_table


def distill(
    dataset: Dataset = None,
    root: Root = None,
    setting: Setting = None,
    protocol: Protocol = None,
    undirected: Undirected = False,
    teacher: TeacherName = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Students to train, of mlp, rbm, moe, ensemble, glnn, krd, nosmog, cohop, hgmd, tined, tined_plus,"
            " simmlp, vqgraph, sign, trees and labels; the run folder keeps all of them (default: mlp,rbm; with"
            " --resume, those of the run).",
            rich_help_panel=STUDENTS,
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Student to use for predictions (default: the best on validation nodes, or a cheaper one that is"
            " about as good; with --resume, the one named before).",
            rich_help_panel=STUDENTS,
        ),
    ] = None,
    inflate: Annotated[
        int | None,
        typer.Option(
            help="Factor for the students' hidden width (default: 1); 8 gives the paper's + variants.",
            rich_help_panel=STUDENTS,
        ),
    ] = None,
    features_only: Annotated[
        bool,
        typer.Option(
            "--features-only",
            help="Train students on node features alone, without encodings.",
            rich_help_panel=STUDENTS,
        ),
    ] = False,
    preset: Annotated[
        str | None,
        typer.Option(
            help="clean (default, recommended), paper (its equations) or official (its released code).",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed for the split, initialisation and dropout (default: 0).", rich_help_panel=SETTINGS),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Several seeds, such as 0-9; writes one CSV file instead of a run folder.", rich_help_panel=SETTINGS
        ),
    ] = None,
    precision: Precision = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder (default: runs/DATASET-SETTING-PRESET-seedN); with --seeds, the CSV file (default:"
            " runs/DATASET-SETTING-PRESET.csv).",
            rich_help_panel=FOLDER,
        ),
    ] = None,
    auto: Annotated[
        bool,
        typer.Option(
            "--auto",
            help="First search for teacher, encodings, student and settings on validation nodes.",
            rich_help_panel=STUDENTS,
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(help="With --auto: total time, such as 90s or 1.5h (default: 10m).", rich_help_panel=STUDENTS),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the run folder.", rich_help_panel=FOLDER)
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in the run folder.", rich_help_panel=FOLDER)
    ] = False,
    plots: Annotated[
        bool | None,
        typer.Option(
            "--plots/--no-plots",
            help="Write plots and report.html into the run folder (default: plots).",
            rich_help_panel=FOLDER,
        ),
    ] = None,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard",
            help="Log losses, accuracies and expert load to the run folder for TensorBoard.",
            rich_help_panel=FOLDER,
        ),
    ] = False,
    device: Device = None,
    cache: CacheFolder = CACHE,
    jobs: Annotated[
        int, typer.Option(min=1, help="With --seeds: number of parallel processes.", rich_help_panel=EXECUTION)
    ] = 1,
) -> None:
    """Train a teacher on a graph, distil it into students, and compare them.

    To train the students with N processes, use torchrun --nproc-per-node N -m rbm distill.
    """
    from rbm.config.presets import FEATURES_ONLY
    from rbm.datasets.load import load_configured_dataset
    from rbm.distillation.distill import distill as run_distillation
    from rbm.distillation.run_graph import graph_of_resumed_run
    from rbm.utils.distributed import is_main_process, joined

    if features_only and not auto:  # a search stores this option separately from its initial settings
        set_ = [*(set_ or []), *FEATURES_ONLY]
    given = {"root": root, "setting": setting, "protocol": protocol, "seed": seed, "inflate": inflate}
    given |= {"precision": precision, "undirected": True if undirected else None}
    methods = None if method is None else [name.strip() for name in method.split(",")]
    options = (dataset, teacher, preset, given, config, set_)
    if seeds is not None:
        for option, value in (("tensorboard", tensorboard), ("keep", keep), ("plots", plots)):
            if value:
                raise ValueError(f"--{option} is about a run folder, and --seeds leaves none; use one or the other")
        for option, value in (("resume", resume), ("overwrite", overwrite)):
            if value:
                raise ValueError(
                    f"--{option} is about a run folder, and --seeds leaves none; without it, --seeds continues its CSV"
                    " file, and starts anew if you remove that file"
                )
        if seed is not None:
            raise ValueError(f"--seed {seed} and --seeds {seeds} are both given; use one or the other")
        if auto or budget:
            raise ValueError(
                "--auto is about a run folder, and --seeds leaves none; search first, then give what was chosen:"
                " rbm distill --config RUN/config.yaml --seeds 0-9"
            )
        distill_seeds(seeds, methods, out, root, cache, jobs, device, options)
        return
    if jobs > 1:
        raise ValueError(f"--jobs {jobs} runs several --seeds side by side, and none are given; add --seeds 0-9")
    named = None
    # A search stores the configuration that it chose, but options given here describe the one from which it started.
    resumed = out if resume and not (auto and _has_settings(options)) else None
    if auto and resume and _continues_search(out, options):
        chosen, named, budget, searched = _search_settings(out, budget)
        features_only = features_only or searched
    else:
        chosen = configuration(*options, resumed=resumed)
        if auto and (teacher is not None or chosen.teacher.name == "logits"):
            named = chosen.teacher.name
    path = out or Path("runs") / f"{run_name(chosen)}-seed{chosen.seed}"
    lasting = {"method": method, "keep": keep, "device": device, "cache": None if cache == CACHE else str(cache)}
    flags = {"--auto": auto, "--tensorboard": tensorboard, "--plots": plots, "--no-plots": plots is False}
    again = _resuming(path, lasting, [flag for flag, given in flags.items() if given])
    with joined(usable_device(device)) as place:
        replaced = _stored_settings(path) if overwrite else set()
        with advise_resuming(lambda: again if _stored_settings(path) - replaced else SAME_COMMAND):
            continues = resume and out is not None and dataset is None
            data = graph_of_resumed_run(out, chosen) if continues else load_configured_dataset(chosen)
            data = data.to(place)
            result = run_distillation(
                data,
                named,
                config=chosen,
                methods=methods,
                keep=keep,
                auto=auto,
                budget=budget,
                features_only=features_only,
                folder=path,
                resume=resume,
                overwrite=overwrite,
                cache=cache,
                tensorboard=tensorboard,
                plots=plots,
                console=status,
            )
        is_main = is_main_process()
    if is_main:
        _report(result, path)


def _resuming(path: Path, options: dict[str, str | None], flags: list[str]) -> str:
    """The command that continues a run, with the plugins and with the options that its folder does not store."""
    from rbm.utils.plugins import loaded_plugins

    plugins = [("--plugin", plugin) for plugin in loaded_plugins()]
    given = [(f"--{name}", value) for name, value in options.items() if value is not None]
    return shlex.join(["rbm", *chain(*plugins), "distill", "--out", str(path), "--resume", *chain(*given), *flags])


def _stored_settings(path: Path) -> set[tuple[Path, int, int]]:
    """The files in which a run has stored its settings, without which it cannot be resumed, each with what tells it
    from a file that replaces it.
    """
    files = [path / name for name in ("config.yaml", "auto.yaml")]
    return {(file, file.stat().st_ino, file.stat().st_mtime_ns) for file in files if file.is_file()}


def _has_settings(options) -> bool:
    """Whether any setting is given on the command line."""
    dataset, teacher, preset, given, config, set_ = options
    given_values = (dataset, teacher, preset, config, *given.values())
    return bool(set_) or any(value is not None for value in given_values)


def _continues_search(out: Path | None, options) -> bool:
    """Whether a search is resumed without any option that changes its settings."""
    return not _has_settings(options) and out is not None and (out / "auto.yaml").is_file()


def _search_settings(out: Path, budget: str | None):
    """What the search in a run folder was started with: configuration, teacher, budget, features only."""
    from rbm.distillation.auto.folder import config_of, read_begun

    known = read_begun(out)["search"]
    return config_of(known), known["teacher"], budget or known["budget"], known.get("features_only", False)


def _report(result, path) -> None:
    from rbm.distillation.report import REPORT
    from rbm.distillation.summary import results_table
    from rbm.utils.timings import time_sentence

    print_table(console, results_table(result.summary, result.timings))
    for sentence in result.verdict:
        console.print(sentence, markup=False, highlight=False)
    console.print(time_sentence(result.timings), markup=False, highlight=False)
    console.print()
    print_line(console, f"run folder: {path}")
    if (path / REPORT).is_file():
        print_line(console, f"report:     {path / REPORT}")


def distill_seeds(seeds, methods, out, root, cache, jobs, device, options) -> None:
    from rbm.distillation.request import DEFAULT_METHODS
    from rbm.experiments.experiment import Experiment, parse_seeds
    from rbm.experiments.seeds import seeds_report
    from rbm.utils.distributed import launched

    if launched() > 1:
        raise ValueError(
            f"seeds is {seeds!r} in {launched()} processes of torchrun, which train one run together; leave torchrun"
            " out and give --jobs to run seeds side by side"
        )
    chosen = configuration(*options)
    run = Experiment(
        datasets=(chosen.dataset,),
        settings=(chosen.setting,),
        methods=DEFAULT_METHODS if methods is None else tuple(methods),
        protocol=chosen.protocol,
        seeds=parse_seeds(seeds),
        preset=chosen.preset,
        teacher=chosen.teacher.name,
        changes={
            **lasting_changes(*options[-2:]),
            "inflate": chosen.inflate,
            "precision": chosen.precision,
            "undirected": chosen.undirected,
        },
    )
    table = out or Path("runs") / f"{run_name(chosen)}.csv"
    place = usable_device(device)
    run_and_show(run, table, root or chosen.root or None, cache, jobs, place, show=seeds_report)

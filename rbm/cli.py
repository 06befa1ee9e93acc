"""The command line: ``rbm distill``, ``experiment``, ``predict``, ``export``, and others; ``rbm --help`` lists them."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rbm.tuning.command import tune

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# Results go to standard output, progress and errors to standard error.
console, status = Console(), Console(stderr=True)
CACHE = Path("runs/cache")
_OF_RUNS = ("dataset", "root", "setting", "protocol", "preset", "seed")


@app.callback()
def common(
    plugin: Annotated[
        list[Path] | None, typer.Option(help="Python file with a method, teacher or dataset of your own; repeatable.")
    ] = None,
) -> None:
    """Distil a graph neural network into a Routing-by-Memory student that needs no graph."""
    from rbm.plugins import load_plugin

    for path in plugin or []:
        load_plugin(path)


@app.command()
def distill(
    dataset: Annotated[
        str | None, typer.Option(help="Name, or the path of your own graph; the default, digits, needs no files.")
    ] = None,
    root: Annotated[str | None, typer.Option(help="Folder of the datasets' raw files; may be read-only.")] = None,
    setting: Annotated[str | None, typer.Option(help="transductive or inductive.")] = None,
    protocol: Annotated[
        str | None, typer.Option(help="rbm or cpf: which form and split of a named graph [default: rbm].")
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="sage, gcn, revgat or drgat.")] = None,
    method: Annotated[
        str, typer.Option(help="Students to train, such as glnn or mlp,rbm,moe; the last one is kept for predictions.")
    ] = "mlp,rbm",
    inflate: Annotated[
        int | None, typer.Option(help="Multiplies the students' hidden width; 8 for the paper's plus variants.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="clean (recommended), paper (its equations) or official (its released code).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of splits, initialisation and dropout.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Several, such as 0-9: a CSV file of all runs.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings, applied after the preset.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, for example rbm.lr=0.005; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/DATASET-SETTING-PRESET-seedN].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run of this folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run of this folder.")] = False,
    plots: Annotated[bool, typer.Option(help="Write plots into the run folder.")] = True,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Losses, accuracies and expert load for TensorBoard, in the run folder."),
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda [default: cuda where there is one].")] = None,
    cache: Annotated[Path, typer.Option(help="Folder of trained teachers and encodings.")] = CACHE,
    jobs: Annotated[int, typer.Option(help="With --seeds: processes side by side.")] = 1,
) -> None:
    """Train a teacher on a graph, distil it into students, and compare them.

    Under torchrun --nproc-per-node N -m rbm distill, N processes train the students together.
    """
    from rbm.datasets import load_dataset, unseen_fraction
    from rbm.distillation import distill as run_distillation
    from rbm.distributed import is_first, joined

    given = {"root": root, "setting": setting, "protocol": protocol, "seed": seed, "inflate": inflate}
    methods = [name.strip() for name in method.split(",")]
    options = (dataset, teacher, preset, given, config, set_)
    if seeds is not None:
        if tensorboard:
            raise ValueError("--tensorboard writes into a run folder, and --seeds leaves none; use one or the other")
        _distill_seeds(seeds, methods, out, root, cache, jobs, options)
        return
    chosen = _configuration(*options, resumed=out if resume else None)
    path = out or Path("runs") / f"{Path(chosen.dataset).stem}-{chosen.setting}-{chosen.preset}-seed{chosen.seed}"
    with joined(_device(device)) as place:
        data = load_dataset(
            chosen.dataset,
            chosen.root or None,
            protocol=chosen.protocol,
            seed=chosen.seed,
            sparse_features=chosen.sparse_features,
        ).to(place)
        result = run_distillation(
            data,
            config=chosen,
            methods=methods,
            folder=path,
            resume=resume,
            overwrite=overwrite,
            cache=cache,
            unseen_fraction=unseen_fraction(chosen.dataset, chosen.protocol),
            tensorboard=tensorboard,
            console=status,
        )
        speaks = is_first()
    if speaks:
        _report(result, path, plots)


@app.command()
def experiment(
    file: Annotated[Path, typer.Argument(help="YAML: datasets, settings, methods, seeds, preset, changes, variants.")],
    out: Annotated[Path | None, typer.Option(help="CSV file, a row a model [default: results/NAME.csv].")] = None,
    root: Annotated[str | None, typer.Option(help="Folder of the datasets' raw files; may be read-only.")] = None,
    cache: Annotated[Path, typer.Option(help="Folder of trained teachers and encodings.")] = CACHE,
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 1,
) -> None:
    """Run all that a file describes and the CSV file does not hold yet; a run that was killed goes on."""
    from rbm.experiments import Experiment

    _run_experiment(Experiment.from_yaml(file), out or Path("results") / f"{file.stem}.csv", root, cache, jobs)


@app.command()
def reproduce(
    table: Annotated[str, typer.Argument(help="Which of the paper's tables; a wrong name lists them.")],
    datasets: Annotated[str, typer.Option(help="Comma-separated names.")] = "cora,citeseer,amazon-photo",
    settings: Annotated[str | None, typer.Option(help="transductive,inductive [default: the table's].")] = None,
    seeds: Annotated[str, typer.Option(help="Such as 0-9.")] = "0-4",
    methods: Annotated[str | None, typer.Option(help="Only these columns' methods, such as glnn,rbm.")] = None,
    protocol: Annotated[str, typer.Option(help="rbm or cpf: which form and split of a named graph.")] = "rbm",
    out: Annotated[Path, typer.Option(help="CSV file of all runs, which tables share.")] = Path("results/paper.csv"),
    root: Annotated[str | None, typer.Option(help="Folder of the datasets' raw files; may be read-only.")] = None,
    cache: Annotated[Path, typer.Option(help="Folder of trained teachers and encodings.")] = CACHE,
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda [default: cuda where there is one].")] = None,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Or only show what there is.")] = True,
) -> None:
    """Run one of the paper's tables on the graphs that you have, and set it beside the paper's figures.

    ``complexity`` counts and times students; ``representation`` shows whether experts specialise in classes.

    What is there already is not run again; a run that was killed goes on. Beside the CSV file stand, in a folder of its
    name, the table as Markdown and as a picture.
    """
    from dataclasses import replace

    from rbm.experiments import parse_seeds, run_experiment
    from rbm.reproduction import read_table, render, write_outputs
    from rbm.rows import read_rows
    from rbm.studies import STUDIES, study

    command = f"rbm {' '.join(sys.argv[1:])}"
    if table in STUDIES:
        page = study(
            table,
            datasets.split(","),
            out.with_suffix(""),
            command=command,
            root=root,
            seed=parse_seeds(seeds)[0],
            setting=settings or "transductive",
            cache=cache,
            device=_device(device),
            console=status,
        )
        print(page.read_text(), end="")
        return
    chosen = replace(read_table(table), protocol=protocol)
    if settings is not None:
        chosen = replace(chosen, settings=tuple(settings.split(",")))
    if methods is not None:
        wanted = {"teacher", *methods.split(",")}
        chosen = replace(
            chosen, columns={title: column for title, column in chosen.columns.items() if column.method in wanted}
        )
    experiments = chosen.experiments(datasets=tuple(datasets.split(",")), seeds=parse_seeds(seeds))
    if run:
        run_experiment(experiments, out, root=root, cache=cache, jobs=jobs, device=_device(device), console=status)
    rows = read_rows(out)
    files = write_outputs(chosen, rows, out.with_suffix(""), command)
    print(render(chosen, rows), end="")
    console.print(f"rows: {out}; {', '.join(str(file) for file in files)}", highlight=False)


app.command()(tune)


@app.command()
def table(
    file: Annotated[Path, typer.Argument(help="CSV file of an experiment.")],
    methods: Annotated[bool, typer.Option("--methods", help="A column for each method, and median Scores.")] = False,
    variants: Annotated[bool, typer.Option("--variants", help="A column for each variant of the RbM student.")] = False,
    column: Annotated[
        str, typer.Option(help="With --methods or --variants: test_at_best_val, test_max, or val, by which to choose.")
    ] = "test_at_best_val",
    plot: Annotated[Path | None, typer.Option(help="With --variants: draw them into this PNG file.")] = None,
) -> None:
    """Print an experiment as a Markdown table, beside the paper's figures where it has them."""
    from rbm import tables
    from rbm.reproduction import render, table_of
    from rbm.rows import ACCURACIES, read_rows
    from rbm.tables import main_table, variants_table

    if not file.is_file():
        raise FileNotFoundError(f"results file {file} does not exist; rbm experiment writes one")
    rows = read_rows(file)
    if column not in ACCURACIES:
        raise ValueError(f"column is {column!r}, expected one of {', '.join(ACCURACIES)}")
    if methods:
        print(render(table_of(rows), rows, column), end="")
    else:
        print(variants_table(rows, column=column) if variants else main_table(rows), end="")
    if variants and plot is not None:
        from rbm.plots import plot_variants

        plot_variants(tables.variants(rows, column=column), plot, ylabel=column.replace("_", " "))


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="Run folder of a finished distillation.")],
    features: Annotated[
        Path, typer.Argument(help=".npy, .npz (array x, or scipy.sparse.save_npz), .csv or .parquet, one row a node.")
    ],
    neighbors: Annotated[
        Path | None, typer.Option(help=".npy or .csv, [M, 2]: a row, and a node of the training graph joined to it.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="File to write: .csv or .parquet (class and probability) or .npy (all).")
    ] = Path("predictions.csv"),
) -> None:
    """Predict classes for rows of features with the student of a run folder; files may be larger than memory."""
    from rbm.serving.prediction import predict_file

    rows = predict_file(run, features, out, neighbors=neighbors, console=status)
    console.print(f"{rows} predictions written to {out}", highlight=False)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder of a finished distillation.")],
    format_: Annotated[
        str, typer.Option("--format", help="torch-export, aoti (compiled here, for this processor) or onnx.")
    ],
    out: Annotated[Path | None, typer.Option(help="File to write [default: student.pt2 or .onnx in RUN].")] = None,
) -> None:
    """Write the student of a run folder to one file that needs nothing of this package, for any batch size."""
    from rbm.serving.export import export_student

    with status.status(f"{format_}: written, and compared with the student"):
        path = export_student(run, format_, out)
    console.print(f"{path}: {path.stat().st_size:,} bytes, answers as the student of {run} does", highlight=False)


@app.command()
def latency(
    run: Annotated[Path, typer.Argument(help="Run folder of a finished distillation.")],
    root: Annotated[str | None, typer.Option(help="Folder of the dataset's raw files [default: the run's].")] = None,
    batch_sizes: Annotated[str, typer.Option(help="How many nodes are asked for at once.")] = "1,64,4096",
    repeats: Annotated[int, typer.Option(help="Calls of each kind; fewer where they take over ten seconds.")] = 200,
    device: Annotated[str | None, typer.Option(help="cpu or cuda [default: cuda where there is one].")] = None,
) -> None:
    """Time a run's student, an MLP and the teacher on the run's own graph; latency.json and .png go into its folder."""
    from rbm.plots import plot_latency
    from rbm.serving.latency import latency_table, measure_run

    try:
        sizes = [int(size) for size in batch_sizes.split(",")]
    except ValueError as error:
        raise ValueError(f"batch-sizes: got {batch_sizes!r}, expected whole numbers such as 1,64,4096") from error
    found = measure_run(run, root=root, batch_sizes=sizes, repeats=repeats, device=_device(device), console=status)
    plot_latency(found["rows"], run / "latency.png", title=f"{found['dataset']}, threads: {found['threads']}")
    console.print(latency_table(found))
    console.print(f"{run / 'latency.json'}, {run / 'latency.png'}", highlight=False)


@app.command()
def info() -> None:
    """Tell what was built, what is installed, and which implementation serves each operator."""
    from rbm.info import tables

    for table in tables():
        console.print(table)


def _report(result, path, plots) -> None:
    from rbm.checkpoint import read_metrics
    from rbm.report import results_markdown, results_table, write_plots

    console.print(results_table(result.summary, result.timings))
    (path / "results.md").write_text(results_markdown(result.summary, result.timings))
    if plots:
        with status.status("plots"):
            write_plots(result, read_metrics(path), path)
    console.print(f"run folder: {path}", highlight=False)


def _distill_seeds(seeds, methods, out, root, cache, jobs, options) -> None:
    from rbm.distributed import launched
    from rbm.experiments import Experiment, parse_seeds

    if launched() > 1:
        raise ValueError(
            f"seeds is {seeds!r} in {launched()} processes of torchrun, which train one run together; leave torchrun"
            " out and give --jobs to run seeds side by side"
        )
    chosen = _configuration(*options)
    run = Experiment(
        datasets=(chosen.dataset,),
        settings=(chosen.setting,),
        methods=tuple(methods),
        protocol=chosen.protocol,
        seeds=parse_seeds(seeds),
        preset=chosen.preset,
        teacher=chosen.teacher.name,
        changes={**_changes(*options[-2:]), "inflate": chosen.inflate},
    )
    name = f"{Path(chosen.dataset).stem}-{chosen.setting}-{chosen.preset}.csv"
    _run_experiment(run, out or Path("runs") / name, root or chosen.root or None, cache, jobs)


def _run_experiment(chosen, out, root, cache, jobs) -> None:
    from rbm.experiments import run_experiment
    from rbm.reproduction import render, table_of
    from rbm.tables import main_table

    rows = run_experiment(chosen, out, root=root, cache=cache, jobs=jobs, console=status)
    print(main_table(rows, teacher=chosen.teacher) if "rbm" in chosen.methods else render(table_of(rows), rows), end="")
    console.print(f"rows: {out}", highlight=False)


def _changes(config_file, assignments) -> dict:
    """What a file and ``--set`` change beyond the preset, for many runs: nothing that tells the runs apart."""
    from rbm.config import merged, parse_assignments, read_changes

    changes = {} if config_file is None else read_changes(config_file)
    changes = merged(changes, parse_assignments(assignments or []))
    return {key: value for key, value in changes.items() if key not in _OF_RUNS}


def _configuration(dataset, teacher, preset, given, config_file, assignments, *, resumed=None):
    """Preset, then file, then options and ``--set``; or, resuming with no options, what the run was started with."""
    from rbm.config import Config, parse_assignments, read_changes
    from rbm.datasets import dataset_name
    from rbm.presets import preset_config

    given = {key: value for key, value in given.items() if value is not None}
    if resumed is not None and not any((given, dataset, teacher, preset, config_file, assignments)):
        stored = Path(resumed) / "config.yaml"
        if not stored.is_file():
            raise FileNotFoundError(f"run folder {resumed} has no config.yaml: there is no run to resume")
        return Config.from_yaml(stored)

    changes = {} if config_file is None else read_changes(config_file)
    dataset = dataset_name(dataset or changes.get("dataset", "digits"))
    preset = preset or changes.get("preset", "clean")
    setting = given.get("setting") or changes.get("setting", "transductive")
    teacher = teacher or changes.get("teacher", {}).get("name", "sage")
    protocol = given.get("protocol") or changes.get("protocol", "rbm")
    chosen = preset_config(preset, dataset, setting, teacher, protocol).updated(changes)
    fixed = {**given, "dataset": dataset, "preset": preset, "teacher": {"name": teacher}}
    return chosen.updated(fixed).updated(parse_assignments(assignments or []))


def _device(name: str | None) -> str:
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {name!r}, which is not usable here: {str(error).splitlines()[0]}") from error
    return name


def main() -> None:
    """Entry point: a user's mistake ends in one sentence and exit status 2, not in a traceback."""
    try:
        app()
    except (ValueError, TypeError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        if getattr(error, "told_by_first", False):  # one of several processes says it for all
            sys.exit(2)
        status.print("[bold red]Error:[/]", end=" ")
        status.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()

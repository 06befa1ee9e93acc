"""``rbm experiment``, ``reproduce`` and ``table``."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from rbm.cli.errors import advise_resuming
from rbm.cli.options import CACHE, CacheFolder, Device, Jobs, Root, console, status, usable_device
from rbm.utils.console import print_line

# Read from the files, so that --help does not import the modules that make tables.
_FILES = Path(__file__).parent.parent / "config" / "configs" / "tables"
_TABLES = (*sorted(file.stem for file in _FILES.glob("*.yaml")), "complexity", "representation")


def experiment(
    file: Annotated[
        Path, typer.Argument(help="YAML file: datasets, settings, methods, seeds, preset, changes, variants.")
    ],
    out: Annotated[Path | None, typer.Option(help="CSV file, one row per model (default: results/NAME.csv).")] = None,
    root: Root = None,
    cache: CacheFolder = CACHE,
    jobs: Jobs = 1,
    device: Device = None,
) -> None:
    """Run the experiment that a YAML file describes, and print its results as a table.

    Rows that the CSV file already contains are not run again, so the same command continues a killed experiment.
    """
    from rbm.experiments.experiment import Experiment

    table = out or Path("results") / f"{file.stem}.csv"
    run_and_show(Experiment.from_yaml(file), table, root, cache, jobs, usable_device(device))


def reproduce(
    table: Annotated[str, typer.Argument(help=f"Table to make: {', '.join(_TABLES)}.")],
    datasets: Annotated[str, typer.Option(help="Comma-separated datasets.")] = "cora,citeseer,amazon-photo",
    settings: Annotated[str | None, typer.Option(help="transductive,inductive (default: the table's).")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, such as 0-9 (default: 0-4); complexity and representation take one.")
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only the columns of these methods, such as glnn,rbm.")] = None,
    protocol: Annotated[str, typer.Option(help="Version and split of a named graph: rbm or cpf.")] = "rbm",
    out: Annotated[Path, typer.Option(help="CSV file of all runs, shared by the tables.")] = Path("results/paper.csv"),
    root: Root = None,
    cache: CacheFolder = CACHE,
    jobs: Jobs = 1,
    device: Device = None,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Run what is missing, or only show existing results.")
    ] = True,
) -> None:
    """Run one of the paper's tables on the graphs of --datasets, and compare the results with the paper's figures.

    "complexity" counts and times students; "representation" shows whether experts specialise in classes.

    Rows that the CSV file already contains are not run again, so the same command continues a killed run.

    The table is also written as Markdown and as a picture, into a folder next to the CSV file and with its name.
    """
    from dataclasses import replace

    from rbm.experiments.analysis import STUDIES, study
    from rbm.experiments.experiment import parse_seeds
    from rbm.experiments.paper_tables import read_table, render, write_outputs
    from rbm.experiments.results import read_rows
    from rbm.experiments.runner import run_experiment
    from rbm.utils.files import check_writable

    command = shlex.join(["rbm", *sys.argv[1:]])
    if seeds is None:
        seeds = "0" if table in STUDIES else "0-4"
    folder = out.with_suffix("")
    if folder == out:
        raise ValueError(f"out is {out}, expected an ending, such as {out}.csv: tables go into a folder {out}")
    if table in STUDIES:
        if methods is not None:
            raise ValueError(f"methods is {methods!r}, expected none: the study {table} has methods of its own")
        (seed, *others) = parse_seeds(seeds)
        if others:
            raise ValueError(f"seeds is {seeds!r}, expected one: the study {table} is made of one run a graph")
        if protocol != "rbm":
            raise ValueError(f"protocol is {protocol!r}, expected rbm: the study {table} knows no other")
        if not run:
            print(_earlier(folder / f"{table}.md").read_text(encoding="utf-8"), end="")
            return
        page = study(
            table,
            datasets.split(","),
            folder,
            command=command,
            root=root,
            seed=seed,
            setting=settings or "transductive",
            cache=cache,
            device=usable_device(device),
            console=status,
        )
        print(page.read_text(encoding="utf-8"), end="")
        return
    chosen = replace(read_table(table), protocol=protocol)
    if settings is not None:
        chosen = replace(chosen, settings=tuple(settings.split(",")))
    if methods is not None:
        chosen = chosen.only(methods.split(","))
    experiments = chosen.experiments(datasets=tuple(datasets.split(",")), seeds=parse_seeds(seeds))
    place = usable_device(device)
    check_writable(f"folder of tables {folder}", folder, "give another file by --out, or allow it")
    if run:
        with advise_resuming():
            run_experiment(experiments, out, root=root, cache=cache, jobs=jobs, device=place, console=status)
    rows = read_rows(_earlier(out))
    files = write_outputs(chosen, rows, folder, command)
    print(render(chosen, rows), end="")
    print_line(console, f"rows: {out}; {', '.join(str(file) for file in files)}")


def _earlier(file: Path) -> Path:
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist, so --no-run has nothing to show; leave it out, or name --out")
    return file


def table(
    file: Annotated[Path, typer.Argument(help="CSV file of an experiment.")],
    methods: Annotated[
        bool,
        typer.Option(
            "--methods", help="One column per method; Score: (accuracy - worst) / (best - worst) on each graph."
        ),
    ] = False,
    variants: Annotated[bool, typer.Option("--variants", help="One column per variant of the RbM student.")] = False,
    column: Annotated[
        str,
        typer.Option(
            help="Accuracy for --methods, --variants and --against: test_at_best_val, test_max, or val, which is the"
            " one to choose settings by."
        ),
    ] = "test_at_best_val",
    against: Annotated[
        str | None, typer.Option(help="Show each student's gain over this one: mlp, or 'rbm, NAME' for a variant.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="With --variants: also draw them into this PNG file.")] = None,
) -> None:
    """Print the results of an experiment as a Markdown table, with the paper's figures if there are any.

    Without options, it shows the RbM student beside the MLP, or --methods if the file has no row of rbm.
    """
    from rbm.experiments import tables
    from rbm.experiments.comparisons import gains_table
    from rbm.experiments.paper_tables import render, table_of
    from rbm.experiments.results import ACCURACIES, read_rows
    from rbm.experiments.tables import main_table, variants_table

    if not file.is_file():
        found = "is a folder" if file.is_dir() else "does not exist"
        raise FileNotFoundError(f"results file {file} {found}; rbm experiment writes one")
    if not (rows := read_rows(file)):
        raise ValueError(f"results file {file} has no row yet; rbm experiment writes one for each model")
    if plot is not None and not variants:
        raise ValueError(f"plot is {plot}, but only variants are drawn; add --variants, or leave out --plot")
    has_rbm = any(row["method"] == "rbm" for row in rows)
    if variants and not has_rbm:
        raise ValueError(f"results file {file} has no row of rbm, whose variants --variants shows; use --methods")
    if column not in ACCURACIES:
        raise ValueError(f"column is {column!r}, expected one of {', '.join(ACCURACIES)}")
    if column != ACCURACIES[0] and has_rbm and not (methods or variants or against):
        raise ValueError(
            f"column is {column!r}, but RbM beside the MLP is shown by test accuracy; add --methods, --variants or"
            " --against"
        )
    if against is not None:
        print(gains_table(rows, against, column), end="")
    elif methods or not has_rbm:
        protocols = list(dict.fromkeys(row["protocol"] for row in rows))
        for protocol in protocols:  # another one has other graphs and splits, so it gets a table of its own
            of_protocol = [row for row in rows if row["protocol"] == protocol]
            heading = f"Protocol {protocol}:\n\n" if len(protocols) > 1 else ""
            between = "" if protocol == protocols[-1] else "\n"
            print(f"{heading}{render(table_of(of_protocol), of_protocol, column)}{between}", end="")
    else:
        print(variants_table(rows, column=column) if variants else main_table(rows), end="")
    if variants and plot is not None:
        from rbm.experiments.plots import plot_variants

        plot_variants(tables.variants(rows, column=column), plot, ylabel=column.replace("_", " "))


def run_and_show(chosen, out, root, cache, jobs, device, show=None) -> None:
    """Run an experiment and print ``show(chosen, rows)``, by default a table of its results."""
    from rbm.experiments.paper_tables import render, table_of
    from rbm.experiments.runner import run_experiment
    from rbm.experiments.tables import main_table

    with advise_resuming():
        rows = run_experiment(chosen, out, root=root, cache=cache, jobs=jobs, device=device, console=status)
    if show is not None:
        print(show(chosen, rows), end="")
    else:
        print(main_table(rows, chosen.methods) if "rbm" in chosen.methods else render(table_of(rows), rows), end="")
    print_line(console, f"rows: {out}")
